// The signals of PolyKV's calibration, measured prompt by prompt on the model itself: what each primitive's choice
// costs each list's attention output (local), and what compressing one list or one layer costs the predictions
// (propagated; computed from that layer upward). One thread drives the model; local errors are spread over the cores.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/calibrate/local_error.h"
#include "engine/calibrate/prompts.h"
#include "engine/eval/eval_runner.h"
#include "kvcache/calibration/polykv_fit.h"

namespace loupe {

// How many entries a list keeps, and how many of them are the last ones.
struct TableCase {
  int recent = 0;
  int entries = 0;
};

struct LocalSignals {
  PatternTable squared, cosine;              // [patterns][cases][lists], all rows
  PatternTable squared_first, cosine_first;  // rows before the first cut of a decode form
  std::vector<double> entropy;               // [lists]
};

class SignalProbe {
 public:
  // Prompts have at most `tokens` tokens and `rows` rows after their context. Patterns are those a strategy may name.
  static absl::StatusOr<std::unique_ptr<SignalProbe>> Create(LoadedModel& model, std::vector<StrategyPattern> patterns,
                                                             std::vector<TableCase> cases, int tokens, int rows,
                                                             int chunk);

  absl::StatusOr<LocalSignals> Local(const CalibrationPrompt& prompt);

  struct Compressed {
    int pattern = 0;
    int layer = 0;
    int kv_head = -1;  // -1: all of the layer
  };
  // What each of `compressed` costs if only it is compressed.
  absl::StatusOr<std::vector<Change>> Propagated(const CalibrationPrompt& prompt, const TableCase& budget,
                                                 const std::vector<Compressed>& compressed);

 private:
  SignalProbe(LoadedModel& model, std::vector<StrategyPattern> patterns, std::vector<TableCase> cases)
      : model_(model), patterns_(std::move(patterns)), cases_(std::move(cases)) {}
  // [patterns][cases][lists] indexes that stay; of `base`, a full sequence at the end of its prompt.
  using Sets = std::vector<std::vector<std::vector<std::vector<int32_t>>>>;
  absl::StatusOr<Sets> Select(SeqId base, const std::vector<TableCase>& cases);

  LoadedModel& model_;
  const std::vector<StrategyPattern> patterns_;
  const std::vector<TableCase> cases_;
  int rows_ = 0, chunk_ = 0;
  std::unique_ptr<EvalRunner> runner_;
};

}  // namespace loupe
