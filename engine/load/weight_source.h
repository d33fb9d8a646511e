// Named tensors of a model file in mapped memory, under the file's own names (GGUF's, for GGUF). Read-only; the memory
// lives as long as the source.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ops.h"

namespace loupe {

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // A matrix [rows, cols], or a vector as [1, cols]. Nothing if the file has no such tensor.
  virtual std::optional<HostMatrix> Find(std::string_view name) const = 0;
  // The pages of this tensor will not be read again: give them back.
  virtual void Release(std::string_view name) const = 0;
};

}  // namespace loupe
