#include "engine/eval/kl.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "engine/eval/text_windows.h"

namespace loupe {
namespace {

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string CellKey(const KlOptions& o, const TextWindow& window, const EvalPolicy& policy) {
  return absl::StrCat("kl|", o.model_id, "|", window.file, "@", window.first, " ", Fingerprint(window.ids), "|", o.context, "+",
                      o.continuation, "|chunk ", o.chunk, "|", policy.label);
}

// What one window says of one policy.
struct Cell {
  std::vector<double> kl;
  int same_top = 0;
  double nll_gap = 0;  // sum
  double bytes_ratio = 0, peak_bytes_ratio = 0;
  double seconds = 0;
};

nlohmann::json ToJson(const Cell& c) {
  return {{"kl", c.kl},
          {"same_top", c.same_top},
          {"nll_gap", c.nll_gap},
          {"bytes_ratio", c.bytes_ratio},
          {"peak_bytes_ratio", c.peak_bytes_ratio},
          {"seconds", c.seconds}};
}

absl::StatusOr<Cell> FromJson(const nlohmann::json& j, int predictions) {
  Cell c;
  try {
    c.kl = j.at("kl").get<std::vector<double>>();
    c.same_top = j.at("same_top"), c.nll_gap = j.at("nll_gap"), c.seconds = j.at("seconds");
    c.bytes_ratio = j.at("bytes_ratio"), c.peak_bytes_ratio = j.at("peak_bytes_ratio");
  } catch (const nlohmann::json::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("a cell of the results file cannot be read: ", e.what()));
  }
  if (c.kl.size() != static_cast<size_t>(predictions)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a cell of the results file has ", c.kl.size(), " predictions, not ", predictions));
  }
  return c;
}

// All `policies` on one window.
absl::StatusOr<std::vector<Cell>> RunWindow(EvalRunner& runner, const TextWindow& window,
                                            const std::vector<EvalPolicy>& policies, const KlOptions& options) {
  const double start = Seconds();
  const std::span<const int32_t> ids(window.ids);
  std::vector<KvSequenceReport> reports;
  auto seqs = runner.OpenAll(policies, ids.first(static_cast<size_t>(options.context)), options.chunk, &reports);
  if (!seqs.ok()) return seqs.status();
  std::vector<Cell> cells(policies.size());
  const auto vocab = static_cast<size_t>(runner.vocab_size());
  absl::Status status = absl::OkStatus();
  for (int t = 0; t < options.continuation && status.ok(); ++t) {
    const size_t at = static_cast<size_t>(options.context + t);
    const std::vector<int32_t> row(seqs->size(), ids[at]);
    const auto logits = runner.Decode(*seqs, row);
    if (!logits.ok()) {
      status = logits.status();
      break;
    }
    for (size_t i = 0; i < cells.size(); ++i) {
      const RowComparison c = CompareRows(logits->first(vocab), logits->subspan((i + 1) * vocab, vocab), ids[at + 1]);
      cells[i].kl.push_back(c.kl);
      cells[i].same_top += c.same_top;
      cells[i].nll_gap += c.nll - c.nll_full;
    }
  }
  runner.CloseAll(&*seqs);
  if (!status.ok()) return status;
  for (size_t i = 0; i < cells.size(); ++i) {
    const KvSequenceReport& r = reports[i + 1];
    cells[i].bytes_ratio = static_cast<double>(r.prompt_device_bytes) / static_cast<double>(r.prompt_full_bytes);
    cells[i].peak_bytes_ratio = static_cast<double>(r.peak_device_bytes) / static_cast<double>(r.prompt_full_bytes);
    cells[i].seconds = (Seconds() - start) / static_cast<double>(cells.size());
  }
  return cells;
}

KlResult Summarise(const std::string& label, const std::vector<Cell>& cells, const std::vector<Cell>& first,
                   double predictions) {
  KlResult r;
  r.label = label;
  std::vector<double> all, sums, differences;
  const std::vector<double> weights(cells.size(), predictions);
  for (size_t w = 0; w < cells.size(); ++w) {
    const Cell& c = cells[w];
    all.insert(all.end(), c.kl.begin(), c.kl.end());
    sums.push_back(Mean(c.kl) * predictions);
    differences.push_back(sums.back() - Mean(first[w].kl) * predictions);
    r.bytes_ratio += c.bytes_ratio / static_cast<double>(cells.size());
    r.peak_bytes_ratio += c.peak_bytes_ratio / static_cast<double>(cells.size());
    r.top1 += c.same_top, r.nll_gap += c.nll_gap, r.seconds += c.seconds;
  }
  r.top1 /= static_cast<double>(all.size()), r.nll_gap /= static_cast<double>(all.size());
  r.kl_mean = Mean(all);
  r.kl_p95 = PercentileOf(all, 0.95);
  r.kl_ci95 = BootstrapRatio(sums, weights);
  r.kl_minus_first = Mean(differences) / predictions;
  r.kl_minus_first_ci95 = BootstrapRatio(differences, weights);
  return r;
}

}  // namespace

absl::StatusOr<std::vector<KlResult>> EvalKl(LoadedModel& model, const std::vector<EvalPolicy>& policies,
                                             const KlOptions& options, ResultFile& results,
                                             const EvalProgress& progress) {
  const int tokens = options.context + options.continuation + 1;
  const auto windows = CutWindows(options.text, *model.tokenizer, tokens, options.windows, options.seed);
  if (!windows.ok()) return windows.status();
  // Beside one sequence a policy: the full cache and the shared prompt.
  auto runner = EvalRunner::Create(model, static_cast<int>(policies.size()) + 2, tokens, options.chunk);
  if (!runner.ok()) return runner.status();
  std::vector<std::vector<Cell>> cells(policies.size());
  for (size_t w = 0; w < windows->size(); ++w) {
    const TextWindow& window = (*windows)[w];
    if (progress) {
      progress(static_cast<double>(w) / static_cast<double>(windows->size()),
               absl::StrCat("window ", w + 1, " of ", windows->size(), " (", window.file, ")"));
    }
    std::vector<EvalPolicy> missing;
    for (const EvalPolicy& policy : policies) {
      if (results.Find(CellKey(options, window, policy)) == nullptr) missing.push_back(policy);
    }
    if (!missing.empty()) {
      const auto fresh = RunWindow(**runner, window, missing, options);
      if (!fresh.ok()) return fresh.status();
      for (size_t i = 0; i < missing.size(); ++i) {
        if (absl::Status s = results.Add(CellKey(options, window, missing[i]), ToJson((*fresh)[i])); !s.ok()) return s;
      }
    }
    for (size_t i = 0; i < policies.size(); ++i) {
      auto cell = FromJson(*results.Find(CellKey(options, window, policies[i])), options.continuation);
      if (!cell.ok()) return cell.status();
      cells[i].push_back(*std::move(cell));
    }
  }
  if (progress) progress(1, "done");
  std::vector<KlResult> summaries;
  for (size_t i = 0; i < policies.size(); ++i) {
    summaries.push_back(Summarise(policies[i].label, cells[i], cells[0], options.continuation));
  }
  return summaries;
}

}  // namespace loupe
