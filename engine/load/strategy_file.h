// Strategies of PolyKV as files: JSON that holds data only. Read once when a model is loaded, and refused unless it was
// made for the very weights. Any thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine_config.h"
#include "engine/load/gguf.h"
#include "engine/load/mapped_file.h"
#include "engine/model/model_config.h"
#include "kvcache/policies/strategy.h"
#include "nlohmann/json.hpp"

namespace loupe {

inline constexpr char kStrategyKind[] = "polykv-strategy";
inline constexpr int kStrategyVersion = 1;

// INVALID_ARGUMENT names the field and what is wrong with it. `name` is what requests call it.
absl::StatusOr<Strategy> ParseStrategy(const std::string& text, const std::string& name);

// The text of a file. `calibration` says how the numbers came about; nothing reads it.
std::string StrategyToText(const Strategy& strategy, const nlohmann::ordered_json& calibration);

struct ModelFile {
  const MappedFile& file;
  const Gguf& gguf;
  const ModelConfig& config;
};
// What tells weights apart: FNV-1a over the bytes of all tensors in words of 8, as 16 hex digits.
std::string HashWeights(const MappedFile& file, const Gguf& gguf);
// The same of a model file. Errors as LoadModel's.
absl::StatusOr<std::string> HashWeights(const std::string& model_path);

// Those of config.strategy_files, in order, each of which must fit the model; without any, those of
// config.artifact_folder that fit, by name.
absl::StatusOr<std::vector<std::shared_ptr<const Strategy>>> LoadStrategies(const EngineConfig& config,
                                                                            const ModelFile& model);

}  // namespace loupe
