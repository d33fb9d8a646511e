// Models of a known shape with random weights, for benches that need no file: `loupe bench ... --random-weights SHAPE`.
// There is no tokenizer and no template behind them, so they cannot serve.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/load/load_model.h"

namespace loupe {

// INVALID_ARGUMENT for an unknown shape, naming the known ones.
absl::StatusOr<ModelConfig> ShapeByName(const std::string& name);
absl::StatusOr<LoadedModel> MakeRandomModel(const std::string& shape, const EngineConfig& config);

}  // namespace loupe
