// A weight of the CPU backend: parts of one element type each, in strips (strip_layout.h), stacked by rows. Immutable
// after packing, shared by all threads.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/huge_memory.h"
#include "kernels/cpu/strip_layout.h"
#include "kernels/ops.h"

namespace loupe {

// Carves weights out of large mappings: a mapping of its own for every small matrix would waste most of its last 2 MiB
// page. A mapping goes when its last weight has gone. Used by one thread.
class WeightMemory {
 public:
  struct Piece {
    std::shared_ptr<HugeMemory> owner;
    uint8_t* data = nullptr;
  };
  absl::StatusOr<Piece> Take(int64_t bytes);

 private:
  std::shared_ptr<HugeMemory> current_;
  int64_t used_ = 0;
};

struct WeightPart {
  WeightType type = WeightType::kF32;
  int64_t first_row = 0;  // output index of its first row
  int64_t rows = 0;
  int64_t strip_bytes = 0;
  const uint8_t* strips = nullptr;

  int64_t num_strips() const { return (rows + kStripRows - 1) / kStripRows; }
  const uint8_t* strip(int64_t i) const { return strips + i * strip_bytes; }
};

class PackedWeight : public Weight {
 public:
  PackedWeight(std::vector<WeightPart> parts, int64_t cols, WeightMemory::Piece memory);
  int64_t rows() const override { return rows_; }
  int64_t cols() const override { return cols_; }
  int64_t bytes() const override { return bytes_; }
  const std::vector<WeightPart>& parts() const { return parts_; }

  // One row as f32, for embeddings.
  void ReadRow(int64_t row, float* out) const;

 private:
  std::vector<WeightPart> parts_;
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  int64_t bytes_ = 0;
  WeightMemory::Piece memory_;
};

}  // namespace loupe
