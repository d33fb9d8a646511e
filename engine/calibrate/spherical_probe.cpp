#include "engine/calibrate/spherical_probe.h"

#include <algorithm>
#include <cmath>

#include "kvcache/calibration/spherical_round.h"
#include "kvcache/policies/snap_score.h"

namespace loupe {
namespace {

// Those that a request protects unless it says otherwise.
const Protection kProtected = {4, 64, {}};
constexpr Codec kCodecs[] = {Codec::kS2, Codec::kS3, Codec::kS4};  // of kProfileBits

// Rows [n, D] as their codes stand for, protected ones as they are.
std::vector<float> Rounded(Codec codec, std::span<const float> mean, std::vector<float> rows, int dim, int threads) {
  const int n = static_cast<int>(rows.size()) / dim;
  constexpr int kPiece = 256;
  InParallel(threads, static_cast<size_t>((n + kPiece - 1) / kPiece), [&](size_t piece) {
    for (int e = static_cast<int>(piece) * kPiece; e < std::min(n, static_cast<int>(piece + 1) * kPiece); ++e) {
      if (kProtected.Covers(e, n)) continue;
      RoundSpherical(codec, mean, std::span(rows).subspan(static_cast<size_t>(e * dim), static_cast<size_t>(dim)));
    }
  });
  return rows;
}

}  // namespace

SphericalProbe::~SphericalProbe() { End(); }

absl::StatusOr<std::unique_ptr<SphericalProbe>> SphericalProbe::Create(LoadedModel& model, int tokens, int rows, int chunk) {
  std::unique_ptr<SphericalProbe> probe(new SphericalProbe(model));
  // The shared prompt, a copy under test and one to spare.
  auto runner = EvalRunner::Create(model, 4, tokens, std::max(chunk, rows));
  if (!runner.ok()) return runner.status();
  probe->runner_ = *std::move(runner);
  probe->chunk_ = chunk;
  return probe;
}

// Computes the context and shows it to `look`; the sequence keeps everything and asks for nothing more.
absl::StatusOr<SeqId> SphericalProbe::Collect(const CalibrationPrompt& prompt, const Onlooker::Callback& look) {
  KvCache& cache = runner_->cache();
  Signals asked;
  asked.window_query_rows = SnapOptions{}.window, asked.window_mass = true, asked.entries = true;
  const Onlooker onlooker(asked, look);
  const auto base = cache.Open(onlooker);
  if (!base.ok()) return base.status();
  const auto context = std::span<const int32_t>(prompt.ids).first(static_cast<size_t>(prompt.context));
  if (auto last = runner_->Prefill(*base, context, chunk_); !last.ok()) return last.status();
  const auto full = cache.Fork(*base, FullPolicy(), runner_->stream());
  cache.Close(*base);
  return full;
}

absl::StatusOr<std::vector<float>> SphericalProbe::MeanKeys(const CalibrationPrompt& prompt) {
  std::vector<float> means;
  const auto full = Collect(prompt, [&](const SequenceView& view) {
    const size_t width = view.keys[0].size() / static_cast<size_t>(view.num_prompt);  // G * D
    for (const std::vector<float>& layer : view.keys) {
      std::vector<double> sums(width, 0.0);
      for (size_t at = static_cast<size_t>(kProtected.sinks) * width; at < layer.size(); ++at) sums[at % width] += double{layer[at]};
      for (const double sum : sums) means.push_back(static_cast<float>(sum / (view.num_prompt - kProtected.sinks)));
    }
  });
  if (!full.ok()) return full.status();
  runner_->cache().Close(*full);
  return means;
}

absl::Status SphericalProbe::Begin(const CalibrationPrompt& prompt) {
  End();
  const auto scorer = MakeSnapScorer({}, kProtected.recent);
  const auto look = [&](const SequenceView& view) {
    keys_.assign(view.keys.begin(), view.keys.end());
    values_.assign(view.values.begin(), view.values.end());
    kept_.clear();
    LayerScores scores(static_cast<size_t>(view.num_kv_heads));
    const int fixed = kProtected.Count(view.num_tokens);
    for (int layer = 0; layer < view.num_layers(); ++layer) {
      scorer->ScoreLayer(view, layer, &scores);
      for (const ListView& list : view.layer(layer)) {
        auto& of_list = kept_.emplace_back();
        for (const double share : kProfileShares) {
          const int count = fixed + static_cast<int>(std::lround(share * (view.num_tokens - fixed)));
          of_list.push_back(KeepBest(list, scores[static_cast<size_t>(list.kv_head)], kProtected, view.num_tokens, count));
        }
      }
    }
  };
  const auto full = Collect(prompt, look);
  if (!full.ok()) return full.status();
  full_ = *full, prompt_ = &prompt, counted_ = prompt.CountedRows();
  const auto rows = std::span<const int32_t>(prompt.ids).subspan(static_cast<size_t>(prompt.context), static_cast<size_t>(prompt.rows()));
  const auto logits = runner_->Continue(full_, rows, EvalRunner::Rows::kDecode, 0, &residuals_, counted_);
  if (!logits.ok()) return logits.status();
  reference_ = Refer(prompt, *logits);
  return absl::OkStatus();
}

void SphericalProbe::End() {
  if (prompt_ != nullptr) runner_->cache().Close(full_);
  prompt_ = nullptr;
}

// [context, D] of one kv head.
std::vector<float> SphericalProbe::RowsOf(const std::vector<std::vector<float>>& all, int layer, int kv_head) const {
  const std::vector<float>& from = all[static_cast<size_t>(layer)];
  const int dim = model_.config.head_dim, stride = model_.config.num_kv_heads * dim;
  std::vector<float> rows;
  rows.reserve(from.size() / static_cast<size_t>(model_.config.num_kv_heads));
  for (auto at = from.begin() + kv_head * dim; at < from.end(); at += std::min<std::ptrdiff_t>(stride, from.end() - at)) {
    rows.insert(rows.end(), at, at + dim);
  }
  return rows;
}

// Rows are computed as generated tokens are: rounding of a prompt's activations alone would cost 2e-4 nats, more than most
// lists lose at 4 bits.
absl::StatusOr<double> SphericalProbe::Cost(int layer, int kv_head, const std::vector<float>& keys, const std::vector<float>& values,
                                            const std::vector<int32_t>* keep) {
  KvCache& cache = runner_->cache();
  const auto fork = cache.Fork(full_);
  if (!fork.ok()) return fork.status();
  absl::Status status = cache.Rewrite(*fork, layer, kv_head, keys, values, runner_->stream());
  if (status.ok() && keep != nullptr) {
    const ListAction action{layer, kv_head, *keep};
    status = cache.Repack(*fork, std::span(&action, 1), runner_->stream());
  }
  if (!status.ok()) {
    cache.Close(*fork);
    return status;
  }
  const auto rows =
      std::span<const int32_t>(prompt_->ids).subspan(static_cast<size_t>(prompt_->context), static_cast<size_t>(prompt_->rows()));
  const auto logits = runner_->Continue(*fork, rows, EvalRunner::Rows::kDecode, layer, layer == 0 ? nullptr : &residuals_, counted_);
  cache.Close(*fork);
  if (!logits.ok()) return logits.status();
  // What rounding of the comparison itself leaves below zero is nothing.
  return std::max(0.0, Compare(*prompt_, reference_, *logits, model_.backend->Info().num_threads).kl);
}

absl::StatusOr<std::vector<ListCosts>> SphericalProbe::Measure(int layer, std::span<const float> mean_keys) {
  const int dim = model_.config.head_dim, groups = model_.config.num_kv_heads, threads = model_.backend->Info().num_threads;
  std::vector<ListCosts> costs(static_cast<size_t>(groups));
  for (int g = 0; g < groups; ++g) {
    const size_t list = static_cast<size_t>(layer * groups + g);
    const auto mean = mean_keys.subspan(list * static_cast<size_t>(dim), static_cast<size_t>(dim));
    const std::vector<float> keys = RowsOf(keys_, layer, g), values = RowsOf(values_, layer, g);
    ListCosts& out = costs[static_cast<size_t>(g)];
    const auto measure = [&](const std::vector<float>& k, const std::vector<float>& v, const std::vector<int32_t>* keep, double* to) {
      const auto cost = Cost(layer, g, k, v, keep);
      if (cost.ok()) *to = *cost;
      return cost.status();
    };
    std::vector<float> keys4, values4;
    for (size_t b = 0; b < std::size(kCodecs); ++b) {
      keys4 = Rounded(kCodecs[b], mean, keys, dim, threads), values4 = Rounded(kCodecs[b], {}, values, dim, threads);
      if (absl::Status s = measure(keys4, values, nullptr, &out.key[b]); !s.ok()) return s;
      if (absl::Status s = measure(keys, values4, nullptr, &out.value[b]); !s.ok()) return s;
    }
    for (size_t s = 0; s < kProfileShares.size(); ++s) {
      if (absl::Status status = measure(keys4, values4, &kept_[list][s], &out.share[s]); !status.ok()) return status;
    }
  }
  return costs;
}

}  // namespace loupe
