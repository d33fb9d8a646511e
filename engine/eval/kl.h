// `loupe eval kl`: how far a policy's predictions are from those of the full cache on the same text. The context is
// computed once with everything kept; each policy then acts on a copy, as at the end of a prompt, and the continuation
// is fed token by token to all copies side by side, with what each appends kept by its own rule.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/eval/eval_runner.h"
#include "engine/eval/result_file.h"
#include "engine/eval/statistics.h"

namespace loupe {

struct KlOptions {
  std::string text;    // folder of .txt files
  int context = 2048;  // tokens before the policy acts
  int windows = 16;
  int continuation = 128;  // predictions compared in a window
  uint64_t seed = 1;
  int chunk = 512;       // prompt rows of a step
  std::string model_id;  // what tells models apart in a results file: their weights, and how they are computed
};

struct KlResult {
  std::string label;
  double bytes_ratio = 0;  // device bytes over dense bytes at the end of prefill; mean over windows
  double peak_bytes_ratio = 0;
  double kl_mean = 0, kl_p95 = 0;
  Interval kl_ci95;
  double top1 = 0;     // share of predictions with the same first choice
  double nll_gap = 0;  // mean of NLL(policy) - NLL(full)
  // kl_mean minus that of the first policy, windows paired.
  double kl_minus_first = 0;
  Interval kl_minus_first_ci95;
  double seconds = 0;  // of computation, without cells found in the results file
};

// One result a policy, in order. INVALID_ARGUMENT: text, sizes or a policy's fields do not fit.
absl::StatusOr<std::vector<KlResult>> EvalKl(LoadedModel& model, const std::vector<EvalPolicy>& policies,
                                             const KlOptions& options, ResultFile& results,
                                             const EvalProgress& progress);

}  // namespace loupe
