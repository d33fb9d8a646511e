// The artifacts that load with a model: JSON files that hold data only, given by the operator or shipped beside the binary.
// Read once, and refused unless made for the very weights. Any thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine_config.h"
#include "engine/load/gguf.h"
#include "engine/load/mapped_file.h"
#include "engine/model/model_config.h"
#include "kvcache/policies/spherical_profile.h"
#include "kvcache/policies/strategy.h"

namespace loupe {

struct Artifacts {
  std::vector<std::shared_ptr<const Strategy>> strategies;        // of polykv
  std::vector<std::shared_ptr<const SphericalProfile>> profiles;  // of spherical

  // Those that codes subtract: the first profile's; empty without one.
  std::span<const float> mean_keys() const {
    return profiles.empty() ? std::span<const float>() : std::span<const float>(profiles[0]->mean_keys);
  }
};

struct ModelFile {
  const MappedFile& file;
  const Gguf& gguf;
  const ModelConfig& config;
};
// What tells weights apart: FNV-1a over the bytes of all tensors in words of 8, as 16 hex digits.
std::string HashWeights(const MappedFile& file, const Gguf& gguf);
// The same of a model file. Errors as LoadModel's.
absl::StatusOr<std::string> HashWeights(const std::string& model_path);

// Those of config.strategy_files, in order, each of which must fit the model. Kinds of which none was given: those of
// config.artifact_folder that fit, by name. INVALID_ARGUMENT names the file and what is wrong.
absl::StatusOr<Artifacts> LoadArtifacts(const EngineConfig& config, const ModelFile& model);

// What an artifact's text says that it is; empty if it does not.
std::string KindOfArtifact(const std::string& text);

}  // namespace loupe
