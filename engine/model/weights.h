// Which tensors a model consists of, by their GGUF names, and the shapes that its configuration demands. Everything is
// checked here once, before any memory is taken for weights; after that the pass trusts its shapes. Stateless.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/load/weight_source.h"
#include "engine/model/model_config.h"

namespace loupe {

struct TensorSpec {
  std::string name;
  int64_t rows = 1;  // 1 for vectors
  int64_t cols = 0;
};

// "blk.<layer>.<part>.weight"
std::string LayerTensorName(int layer, const char* part);

// Every tensor that the pass reads, in the order in which it is packed. The frequency factors are part of the
// configuration, not of this list.
std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config);

// INVALID_ARGUMENT names the first tensor that is missing or whose shape differs, with both shapes.
absl::Status CheckWeights(const ModelConfig& config, const WeightSource& source);

// INVALID_ARGUMENT for dimensions that are out of range or do not fit together, with the numbers.
absl::Status CheckConfig(const ModelConfig& config);

// Bytes of a matrix in the file.
int64_t HostMatrixBytes(const HostMatrix& matrix);
const char* WeightTypeName(WeightType type);

// The values of an unquantised vector (F32, F16, BF16) as f32.
std::vector<float> ReadVector(const HostMatrix& vector);

}  // namespace loupe
