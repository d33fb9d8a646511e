// Inner loops over one row, built once per instruction set from row_kernels.inc. Plain structs only: files built for
// different instruction sets include this.
#pragma once

#include <cstdint>

namespace loupe {

struct RowKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // out = gate / (1 + e^-gate) * up
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* out);
  // Rotates the pairs (2i, 2i + 1), or (i, i + pairs), of one head in place.
  void (*rotate_interleaved)(float* x, const float* cosine, const float* sine, float scale, int64_t pairs);
  void (*rotate_halves)(float* x, const float* cosine, const float* sine, float scale, int64_t pairs);
};

extern const RowKernels kPortableRows;
extern const RowKernels kAvx2Rows;    // as portable off x86
extern const RowKernels kAvx512Rows;  // as portable off x86

}  // namespace loupe
