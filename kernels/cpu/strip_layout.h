// How matrices lie in memory on the CPU. A matrix is cut into strips of 16 rows (outputs); a strip is one sequential
// stream over the columns, in which the 16 rows are the 16 lanes of a vector. So a kernel needs no horizontal sums and
// an output sees the same operations in the same order whatever the number of activations in the call.
//
//   strip := groups of columns, by type
//   F32   1 column    64 B   16 f32
//   F16   2 columns   64 B   2 x 16 fp16
//   BF16  2 columns   64 B   16 x (column 0, column 1)
//   Q8_0  64 columns  1088 B 2 blocks x 8 vectors (lane r, byte i: code of column 4j + i, plus 128), then 2 x 16 fp16
//   scales Q4_0  64 columns  576 B  2 blocks x 4 vectors (lane r, byte i: columns 4j + i, low nibble, and 16 + 4j + i),
//   2 x 16 scales Q4_1  32 columns  320 B  4 vectors as Q4_0, 16 fp16 scales, 16 fp16 minima
//
// Columns beyond the matrix and rows beyond the last are zero (scale 0). No standard templates here: files built for
// different instruction sets include this header.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace loupe {

static constexpr int kStripRows = 16;
static constexpr int kQuantBlock = 32;  // columns that share a scale

struct StripLayout {
  int group_cols;
  int group_bytes;
  int zero;  // what was added to a code of the file's block to make it unsigned; also for Q4_0, whose file does so
             // itself
};

static constexpr StripLayout LayoutOf(WeightType type) {
  switch (type) {
    case WeightType::kF32:
      return {1, 64, 0};
    case WeightType::kF16:
    case WeightType::kBF16:
      return {2, 64, 0};
    case WeightType::kQ8_0:
      return {64, 1088, 128};
    case WeightType::kQ4_0:
      return {64, 576, 8};
    case WeightType::kQ4_1:
      return {32, 320, 0};
  }
  return {1, 64, 0};
}

static constexpr bool IsQuantised(WeightType type) {
  return type == WeightType::kQ8_0 || type == WeightType::kQ4_0 || type == WeightType::kQ4_1;
}

static constexpr int64_t StripBytes(WeightType type, int64_t cols) {
  const StripLayout layout = LayoutOf(type);
  return (cols + layout.group_cols - 1) / layout.group_cols * layout.group_bytes;
}

// Where a quantised block of 32 columns keeps its codes and its 16 scales.
struct BlockPlace {
  int64_t codes;
  int64_t scales;
};
static constexpr BlockPlace PlaceOf(WeightType type, int64_t block) {
  const StripLayout layout = LayoutOf(type);
  if (type == WeightType::kQ4_1) return {block * layout.group_bytes, block * layout.group_bytes + 256};
  const int64_t codes_bytes = (layout.group_bytes - 64) / 2;
  const int64_t group = block / 2 * layout.group_bytes;
  return {group + block % 2 * codes_bytes, group + 2 * codes_bytes + block % 2 * 32};
}

}  // namespace loupe
