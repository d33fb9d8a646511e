// Pages as the GPU lays them out: both planes are [D / 8][entries][8], so that eight dimensions of eight entries are
// the 128 bytes that ldmatrix and wgmma take as a unit, and a plane is one contiguous copy.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/page_layout.h"

namespace loupe::cuda {

inline constexpr int kChunkDims = 8;

// Index of dimension `d` of entry `e` in a plane of `entries`.
__host__ __device__ __forceinline__ int ElementIndex(int e, int d, int entries) {
  return (d / kChunkDims * entries + e) * kChunkDims + d % kChunkDims;
}

// A PageRef by its bits; page_layout.h says what they are.
struct PageView {
  int64_t offset = 0;  // bytes from the start of the arena
  int count = 0;
  int entries = kPageEntries;
  int key_bytes = 2, value_bytes = 2;  // of an element
  bool log_weights = false;

  __device__ __forceinline__ PageView() {}
  __device__ __forceinline__ explicit PageView(const PageRef& ref)
      : offset(int64_t{ref.unit} * kPageAlignment),
        count(ref.count),
        entries(ref.small ? kSmallPageEntries : kPageEntries),
        key_bytes(ref.key_codec == static_cast<uint8_t>(Codec::kF32) ? 4 : 2),
        value_bytes(ref.value_codec == static_cast<uint8_t>(Codec::kF32) ? 4 : 2),
        log_weights(ref.log_weights != 0) {}

  __device__ __forceinline__ int64_t ValueOffset(int dim) const {
    return offset + Aligned(int64_t{entries} * dim * key_bytes);
  }
  __device__ __forceinline__ int64_t LogWeightOffset(int dim) const {
    return ValueOffset(dim) + Aligned(int64_t{entries} * dim * value_bytes);
  }

 private:
  static __device__ __forceinline__ int64_t Aligned(int64_t bytes) {
    return (bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
  }
};

}  // namespace loupe::cuda
