// The arithmetic of decode attention: how a kernel for a head size is cut, and a warp's running softmax over 16 entries at a
// time. Products run on m16n8k16: entries (or head dimensions) are the 16 rows, the query heads of a group the 8 columns.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/page_layout.h"

namespace loupe::cuda {

inline constexpr float kNone = -INFINITY;
inline constexpr int kHeads = 8;  // query heads of a task: the columns of a product
inline constexpr int kMaxBlocksPerSm = 3;

// Small heads have half the bytes a page to hide the same chain of arithmetic behind, so more warps share an SM.
template <int kDim>
struct Shape {
  static constexpr int kBlocksPerSm = kDim == 128 ? 2 : kMaxBlocksPerSm;
  static constexpr int kStages = 3;
  static constexpr int kPlane = kBlockEntries * kDim * 2;  // bytes of the keys of 16 entries
  static constexpr int kStage = 2 * kPlane;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kMergeRow = kDim == 128 ? 132 : 200;
  static constexpr int kMaxSegments = 2 * kMergeRow;  // of a task: whose factors fit the merging block's memory
};

// Running softmax of a warp over its entries. Lane (g, t) holds queries 2t and 2t + 1; `out` rows are head dimensions.
template <int kDim>
struct Running {
  float max[2], sum[2];  // `max`: less kHeadroom, like that of every triple
  float out[Shape<kDim>::kSteps][4];

  __device__ void Clear() {
    max[0] = max[1] = kNone;
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < Shape<kDim>::kSteps; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0;
  }

  // Sixteen entries of dense keys and values in `stage`; those outside [low, high) are not seen. beta: log2 weights of
  // entries g and g + 8.
  __device__ void Add(const uint32_t (&q)[Shape<kDim>::kSteps][2], uint32_t stage, int low, int high, float scale,
                      float beta0, float beta1) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float s[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < Shape<kDim>::kSteps; ++k) {
      uint32_t a[4];
      LoadMatrices(a, stage + k * 512 + lane * 16);
      Mma(s, a, q[k][0], q[k][1]);
    }
    const bool seen0 = g >= low && g < high, seen1 = g + 8 >= low && g + 8 < high;
    s[0] = seen0 ? fmaf(s[0], scale, beta0) : kNone;
    s[1] = seen0 ? fmaf(s[1], scale, beta0) : kNone;
    s[2] = seen1 ? fmaf(s[2], scale, beta1) : kNone;
    s[3] = seen1 ? fmaf(s[3], scale, beta1) : kNone;
    uint32_t b[2];
    float top[2], factor[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float m = fmaxf(s[j], s[2 + j]);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, offset));
      m = fmaxf(m - kHeadroom, max[j]);
      top[j] = m == kNone ? 0 : m;
      factor[j] = exp2f(max[j] - top[j]);
      max[j] = m;
    }
    const uint32_t p0 = PackHalf(exp2f(s[0] - top[0]), exp2f(s[1] - top[1]));
    const uint32_t p1 = PackHalf(exp2f(s[2] - top[0]), exp2f(s[3] - top[1]));
    sum[0] = sum[0] * factor[0] + LowHalf(p0) + LowHalf(p1);
    sum[1] = sum[1] * factor[1] + HighHalf(p0) + HighHalf(p1);
    b[0] = TransposeMatrix(p0);
    b[1] = TransposeMatrix(p1);
    if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
      for (int i = 0; i < Shape<kDim>::kSteps; ++i)
        out[i][0] *= factor[0], out[i][1] *= factor[1], out[i][2] *= factor[0], out[i][3] *= factor[1];
    }
    // What lies in slots that are not in use may be anything, and zero times anything is not zero.
    uint32_t keep0 = ~0u, keep1 = ~0u;
    if (low > 0 || high < kBlockEntries) {
      const auto pair = [&](int e) {
        return (e >= low && e < high ? 0xffffu : 0) | (e + 1 >= low && e + 1 < high ? 0xffff0000u : 0);
      };
      keep0 = pair(2 * t), keep1 = pair(2 * t + 8);
    }
    const uint32_t values = stage + Shape<kDim>::kPlane + (lane / 8 % 2) * 256 + (lane / 16) * 128 + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < Shape<kDim>::kSteps; ++i) {
      uint32_t a[4];
      LoadMatricesTransposed(a, values + i * 512);
      a[0] &= keep0, a[1] &= keep0, a[2] &= keep1, a[3] &= keep1;
      Mma(out[i], a, b[0], b[1]);
    }
  }
};

}  // namespace loupe::cuda
