#include "engine/eval/eval_runner.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "engine/eval/llamacpp_cache.h"
#include "engine/eval/statistics.h"
#include "kvcache/policies/registry.h"

namespace loupe {

// Keeps everything and collects what several policies ask for, so that forks of one prompt can serve them all.
class EvalRunner::SharedSignals : public Policy {
 public:
  std::string_view name() const override { return "shared signals"; }
  Signals signals() const override { return signals_; }
  void AfterPrefill(const SequenceView&, std::vector<ListAction>*) const override {}
  void AfterDecode(const SequenceView&, std::vector<ListAction>*) const override {}

  // False if one pass over the prompt cannot serve `asked` beside what was added before.
  bool Add(const Signals& asked) {
    if (asked.columns.stride > 0 && signals_.columns.stride > 0 && asked.columns != signals_.columns) return false;
    if (asked.columns.stride > 0) signals_.columns = asked.columns;
    signals_.window_query_rows = std::max(signals_.window_query_rows, asked.window_query_rows);
    signals_.entries |= asked.entries;
    signals_.output_norms |= asked.output_norms;
    signals_.surprisal |= asked.surprisal;
    return true;
  }

 private:
  Signals signals_;
};

// Keeps everything; what entries are is copied when the sequence is made.
class EvalRunner::Rival : public Policy {
 public:
  explicit Rival(RivalBlock block) : block_(block) {}
  std::string_view name() const override { return "rival"; }
  Signals signals() const override {
    Signals signals;
    signals.entries = true;
    return signals;
  }
  void AfterPrefill(const SequenceView& sequence, std::vector<ListAction>*) const override {
    keys_.assign(sequence.keys.begin(), sequence.keys.end());
    values_.assign(sequence.values.begin(), sequence.values.end());
  }
  void AfterDecode(const SequenceView&, std::vector<ListAction>*) const override {}

  absl::Status Round(SeqId seq, KvCache& cache, Stream& stream) const {
    absl::Status status = RoundCache(block_, keys_, values_, seq, cache, stream);
    keys_.clear(), values_.clear();
    return status;
  }
  // What blocks would take, in place of the dense pages that stand for them.
  void Correct(KvSequenceReport* report) const {
    report->prompt_device_bytes = static_cast<int64_t>(BytesRatio(block_) * static_cast<double>(report->prompt_full_bytes));
  }

 private:
  RivalBlock block_;
  mutable std::vector<std::vector<float>> keys_, values_;  // from AfterPrefill to Round
};

EvalRunner::EvalRunner(LoadedModel& model, int max_step_tokens)
    : model_(model), max_step_tokens_(max_step_tokens), stream_(model.backend->NewStream()) {}
EvalRunner::~EvalRunner() = default;

absl::StatusOr<std::unique_ptr<EvalRunner>> EvalRunner::Create(LoadedModel& model, int sequences, int tokens,
                                                               int max_step_tokens) {
  if (tokens > model.config.max_context) {
    return absl::InvalidArgumentError(absl::StrCat("a window of ", tokens, " tokens exceeds the model's context of ",
                                                   model.config.max_context, "; lower --context or --continuation"));
  }
  std::unique_ptr<EvalRunner> runner(new EvalRunner(model, max_step_tokens));
  const KvShape shape = model.decoder->kv_shape();
  const PageFormat format = model.backend->Info().dense_format;
  const int64_t entry_bytes = CodecBytes(format.key, shape.head_dim) + CodecBytes(format.value, shape.head_dim);
  const int64_t lists = int64_t{shape.num_layers} * shape.num_kv_heads;
  KvConfig config;
  config.max_sequences = sequences;
  config.max_step_rows = std::max(max_step_tokens, sequences);
  // Whole pages, one page a list for the open end, and slabs for the page classes.
  config.device_bytes = sequences * lists * entry_bytes * (tokens + 2 * kPageEntries) + 64 * kSlabBytes;
  auto cache = KvCache::Create(config, shape, *model.backend);
  if (!cache.ok()) return cache.status();
  runner->cache_ = *std::move(cache);
  if (const auto means = model.artifacts.mean_keys(); !means.empty()) {
    if (absl::Status s = runner->cache_->SetMeanKeys(means); !s.ok()) return s;
  }
  return runner;
}

// Reserves and runs a step; the caller commits or abandons it.
absl::Status EvalRunner::Compute(std::span<const KvStepItem> items, std::span<const int32_t> ids,
                                 std::span<const int32_t> logit_rows, DecoderStep step) {
  Backend& backend = *model_.backend;
  const auto num_ids = static_cast<int64_t>(ids.size()), num_logits = static_cast<int64_t>(logit_rows.size());
  absl::Status status = ids_.Ensure(backend, 4 * num_ids);
  if (status.ok()) status = logit_rows_.Ensure(backend, 4 * num_logits);
  if (status.ok()) status = device_logits_.Ensure(backend, 4 * num_logits * vocab_size());
  if (status.ok()) status = cache_->Reserve(items, &batch_);
  if (!status.ok()) return status;
  std::copy(ids.begin(), ids.end(), ids_.host<int32_t>());
  std::copy(logit_rows.begin(), logit_rows.end(), logit_rows_.host<int32_t>());
  ids_.Upload(backend, 0, 4 * num_ids, *stream_);
  logit_rows_.Upload(backend, 0, 4 * num_logits, *stream_);
  step.ids = MakeTensor(ids_.device<int32_t>(), DType::kI32, num_ids);
  step.cache = cache_.get();
  step.batch = &batch_;
  if (num_logits > 0) step.logit_rows = MakeTensor(logit_rows_.device<int32_t>(), DType::kI32, num_logits);
  step.logit_prompt_rows = static_cast<int>(
      std::count_if(logit_rows.begin(), logit_rows.end(), [&](int32_t row) { return row < batch_.prompt_rows; }));
  step.logits = MakeTensor(device_logits_.device<float>(), DType::kF32, num_logits, vocab_size());
  step.logits.rank = 2;
  model_.decoder->Forward(step, *stream_);
  device_logits_.Download(backend, 0, 4 * num_logits * vocab_size(), *stream_);
  status = stream_->Synchronize();
  const float* logits = device_logits_.host<float>();
  logits_.assign(logits, logits + num_logits * vocab_size());
  if (!status.ok()) cache_->Abandon(batch_);
  return status;
}

absl::Status EvalRunner::Step(std::span<const KvStepItem> items, std::span<const int32_t> ids,
                              std::span<const int32_t> logit_rows, const std::function<void()>& before_commit) {
  if (absl::Status s = Compute(items, ids, logit_rows, {}); !s.ok()) return s;
  if (before_commit) before_commit();
  cache_->Commit(batch_, *stream_);
  if (absl::Status s = stream_->Synchronize(); !s.ok()) return s;
  if (cache_->TakeFaults(*stream_).empty()) return absl::OkStatus();
  return absl::InternalError("the model computed a key or value that is not a finite number, which no code can store");
}

absl::StatusOr<std::span<const float>> EvalRunner::Prefill(SeqId seq, std::span<const int32_t> ids, int chunk) {
  const bool surprisal = cache_->WantsSurprisal(seq);
  const auto vocab = static_cast<size_t>(vocab_size());
  for (size_t done = 0; done < ids.size();) {
    const size_t rows =
        std::min({static_cast<size_t>(chunk), static_cast<size_t>(max_step_tokens_), ids.size() - done});
    const bool last = done + rows == ids.size();
    std::vector<int32_t> wanted;
    if (surprisal) {
      wanted.resize(rows);
      std::iota(wanted.begin(), wanted.end(), 0);
    } else if (last) {
      wanted = {static_cast<int32_t>(rows) - 1};
    }
    // Row r predicts token r + 1; the first token has no prediction.
    const auto add_surprisal = [&] {
      std::vector<float> chunk_surprisal(done == 0 ? 1 : 0, 0.f);
      for (size_t r = 0; r < rows && done + r + 1 < ids.size(); ++r) {
        const auto row = std::span<const float>(logits_).subspan(r * vocab, vocab);
        chunk_surprisal.push_back(static_cast<float>(NegativeLogProbability(row, ids[done + r + 1])));
      }
      cache_->AddSurprisal(seq, chunk_surprisal);
    };
    const KvStepItem item{seq, static_cast<int>(rows), 0, last};
    const auto before_commit = surprisal ? std::function<void()>(add_surprisal) : nullptr;
    if (absl::Status s = Step(std::span(&item, 1), ids.subspan(done, rows), wanted, before_commit); !s.ok()) return s;
    done += rows;
  }
  return std::span<const float>(logits_).last(vocab);
}

absl::StatusOr<std::span<const float>> EvalRunner::Continue(SeqId seq, std::span<const int32_t> ids, Rows rows, int first_layer,
                                                            std::vector<std::vector<char>>* residuals,
                                                            std::span<const int32_t> wanted) {
  const int count = static_cast<int>(ids.size());
  const bool decode = rows == Rows::kDecode, stays = rows == Rows::kStay;
  const KvStepItem item{seq, decode ? 0 : count, decode ? count : 0, stays};
  std::vector<int32_t> all(wanted.empty() ? ids.size() : 0);
  std::iota(all.begin(), all.end(), 0);
  DecoderStep step;
  step.first_layer = first_layer;
  step.residuals = residuals;
  if (absl::Status s = Compute(std::span(&item, 1), ids, wanted.empty() ? all : wanted, step); !s.ok()) return s;
  if (stays) {
    cache_->Commit(batch_, *stream_);
    if (absl::Status s = stream_->Synchronize(); !s.ok()) return s;
  } else {
    cache_->Abandon(batch_);
  }
  return std::span<const float>(logits_);
}

absl::StatusOr<std::span<const float>> EvalRunner::Decode(std::span<const SeqId> seqs, std::span<const int32_t> ids) {
  std::vector<KvStepItem> items;
  for (const SeqId seq : seqs) items.push_back({seq, 0, 1, false});
  std::vector<int32_t> wanted(seqs.size());
  std::iota(wanted.begin(), wanted.end(), 0);
  if (absl::Status s = Step(items, ids, wanted); !s.ok()) return s;
  return std::span<const float>(logits_);
}

absl::StatusOr<std::unique_ptr<Policy>> EvalRunner::MakeOne(const KvOptions& options, const PolicyContext& context) const {
  const auto rival = RivalOf(options.policy);
  if (!rival) return MakePolicy(options, context);
  if (options.budget.kind != KvBudget::Kind::kNone || !options.params.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("kv.policy: ", options.policy, " stores everything in its own format and takes neither ",
                                                   "budget nor parameters"));
  }
  return std::unique_ptr<Policy>(new Rival(*rival));
}

absl::StatusOr<std::vector<SeqId>> EvalRunner::OpenAll(std::span<const EvalPolicy> policies,
                                                       std::span<const int32_t> prompt, int chunk,
                                                       std::vector<KvSequenceReport>* reports) {
  PolicyContext context = cache_->policy_context(static_cast<int>(prompt.size()));
  context.allow_baselines = true;
  context.strategies = model_.artifacts.strategies;
  context.profiles = model_.artifacts.profiles;
  made_.clear();
  std::vector<SeqId> seqs(policies.size() + 1);
  // Policies are grouped by the pass over the prompt that can serve them: nearly always one.
  std::vector<SharedSignals> passes;
  std::vector<size_t> pass_of;
  constexpr size_t kOwnPass = static_cast<size_t>(-1);
  for (const EvalPolicy& policy : policies) {
    auto made = MakeOne(policy.options, context);
    if (!made.ok()) return made.status();
    if ((*made)->acts_in_prefill()) {  // its prompt is another one's for nobody
      pass_of.push_back(kOwnPass);
      made_.push_back(*std::move(made));
      continue;
    }
    size_t pass = 0;
    while (pass < passes.size() && !passes[pass].Add((*made)->signals())) ++pass;
    if (pass == passes.size()) {
      passes.emplace_back();
      passes.back().Add((*made)->signals());
    }
    pass_of.push_back(pass);
    made_.push_back(*std::move(made));
  }
  if (passes.empty()) passes.emplace_back();
  absl::Status status = absl::OkStatus();
  const auto check = [&](const auto& result) {
    if (!result.ok() && status.ok()) status = result.status();
    return result.ok();
  };
  for (size_t i = 0; i < policies.size() && status.ok(); ++i) {
    if (pass_of[i] != kOwnPass) continue;
    auto own = cache_->Open(*made_[i]);
    if (!check(own)) break;
    seqs[i + 1] = *own;
    check(Prefill(*own, prompt, chunk));
  }
  for (size_t pass = 0; pass < passes.size() && status.ok(); ++pass) {
    auto base = cache_->Open(passes[pass]);
    if (!check(base)) break;
    if (check(Prefill(*base, prompt, chunk))) {
      for (size_t i = 0; i < policies.size() && status.ok(); ++i) {
        if (pass_of[i] != pass) continue;
        auto fork = cache_->Fork(*base, *made_[i], *stream_);
        if (!check(fork)) break;
        seqs[i + 1] = *fork;
        if (const auto* rival = dynamic_cast<const Rival*>(made_[i].get())) status = rival->Round(*fork, *cache_, *stream_);
      }
    }
    if (pass == 0 && status.ok()) {
      auto full = cache_->Fork(*base, FullPolicy(), *stream_);
      if (check(full)) seqs[0] = *full;
    }
    cache_->Close(*base);
  }
  if (!status.ok()) {
    CloseAll(&seqs);
    return status;
  }
  reports->clear();
  for (size_t i = 0; i < seqs.size(); ++i) {
    reports->push_back(cache_->Report(seqs[i]));
    if (const auto* rival = i == 0 ? nullptr : dynamic_cast<const Rival*>(made_[i - 1].get())) rival->Correct(&reports->back());
  }
  return seqs;
}

void EvalRunner::CloseAll(std::vector<SeqId>* seqs) {
  for (const SeqId seq : *seqs) {
    if (seq.value >= 0) cache_->Close(seq);
  }
  seqs->clear();
  made_.clear();
}

}  // namespace loupe
