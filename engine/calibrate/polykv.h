// `loupe calibrate polykv`: measures the signals on prompts of running text and, if given, on items that hide a needle,
// and fits a strategy. Every measurement is a cell of a results file, so that an interrupted calibration goes on, and
// further fits of the same measurements take no time.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/calibrate/polykv_signals.h"
#include "engine/eval/items.h"
#include "engine/eval/result_file.h"

namespace loupe {

struct PolyKvOptions {
  std::string text;             // folder of .txt files
  std::vector<EvalItem> items;  // with a needle; may be empty
  int prompts = 8;              // of text
  int context = 4096;           // tokens of each
  int continuation = 64;       // rows that are compared
  uint64_t seed = 1;            // which pieces of text
  int chunk = 512;
  int max_rows = 256;  // of a step of the model: an item's question and answer have to fit
  std::vector<int> means = {128, 256, 512, 1024, 2048};  // budgets of the strategy
  std::string model_id, weights_hash;
  FitOptions fit;
};

struct PolyKvSummary {
  Strategy strategy;
  nlohmann::ordered_json calibration;  // how it came about, for the file
  double seconds = 0;                  // of measurement, without cells that were found
};

// INVALID_ARGUMENT: text, items or numbers do not fit the model.
absl::StatusOr<PolyKvSummary> CalibratePolyKv(LoadedModel& model, const PolyKvOptions& options, ResultFile& results,
                                              const EvalProgress& progress);

}  // namespace loupe
