// `loupe calibrate spherical`: measures on running text and on items with a hidden fact what each list loses at some bits or
// shares of its entries, and the mean keys that codes subtract. Every layer of a prompt is a cell of a results file, so that
// an interrupted calibration goes on.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/calibrate/spherical_probe.h"
#include "engine/eval/result_file.h"
#include "nlohmann/json.hpp"

namespace loupe {

struct SphericalOptions {
  std::string text;             // folder of .txt files
  std::vector<EvalItem> items;  // with a hidden fact; may be empty
  int prompts = 8;              // of text
  int context = 2048;           // tokens of each
  int continuation = 128;       // predictions compared
  uint64_t seed = 1;            // which pieces of text
  int chunk = 512;
  int max_rows = 512;           // of a step of the model: an item's question and answer have to fit
  double needle_weight = 0.1;   // of items beside text in a cost
  int part = 0, parts = 1;      // only every `parts`-th prompt from `part` on is measured: shares of one calibration, on many cores
  std::string model_id, weights_hash;
};

struct SphericalSummary {
  SphericalProfile profile;             // without lists if other parts have still to be measured
  nlohmann::ordered_json calibration;   // how it came about, for the file
  double seconds = 0;                   // of measurement, without cells that were found
  int missing_cells = 0;                // of other parts
};

// INVALID_ARGUMENT: text, items or numbers do not fit the model.
absl::StatusOr<SphericalSummary> CalibrateSpherical(LoadedModel& model, const SphericalOptions& options, ResultFile& results,
                                                    const EvalProgress& progress);

}  // namespace loupe
