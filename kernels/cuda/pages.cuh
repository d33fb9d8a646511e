// Pages as the GPU lays them out. Dense planes are [D / 8][entries][8], so that eight dimensions of eight entries are the 128
// bytes that ldmatrix and wgmma take as a unit, and a plane is one contiguous copy. Coded planes: coded_layout.cuh.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/page_layout.h"

namespace loupe::cuda {

inline constexpr int kChunkDims = 8;

// Index of dimension `d` of entry `e` in a dense plane of `entries`.
__host__ __device__ __forceinline__ int ElementIndex(int e, int d, int entries) {
  return (d / kChunkDims * entries + e) * kChunkDims + d % kChunkDims;
}

// Of one coordinate: CodecBits without a table in memory.
__device__ __forceinline__ int BitsOf(Codec codec) {
  return static_cast<int>(__byte_perm(0x04082010, 0x00000203, static_cast<uint32_t>(codec)) & 0xff);
}

// A PageRef by its bits; page_layout.h says what they are.
struct PageView {
  int64_t offset = 0;  // bytes from the start of the arena
  int count = 0;
  int entries = kPageEntries;
  Codec key_codec = Codec::kDense, value_codec = Codec::kDense;
  int key_bytes = 2, value_bytes = 2;  // of an element, if it is no code
  bool log_weights = false;

  __device__ __forceinline__ PageView() {}
  __device__ __forceinline__ explicit PageView(const PageRef& ref)
      : offset(int64_t{ref.unit} * kPageAlignment),
        count(ref.count),
        entries(ref.small ? kSmallPageEntries : kPageEntries),
        key_codec(static_cast<Codec>(ref.key_codec)),
        value_codec(static_cast<Codec>(ref.value_codec)),
        key_bytes(key_codec == Codec::kF32 ? 4 : 2),
        value_bytes(value_codec == Codec::kF32 ? 4 : 2),
        log_weights(ref.log_weights != 0) {}

  __device__ __forceinline__ int64_t ValueOffset(int dim) const { return offset + Aligned(entries * (dim * BitsOf(key_codec) / 8)); }
  __device__ __forceinline__ int64_t KeyScaleOffset(int dim) const {
    return ValueOffset(dim) + Aligned(entries * (dim * BitsOf(value_codec) / 8));
  }
  __device__ __forceinline__ int64_t ValueScaleOffset(int dim) const {
    return KeyScaleOffset(dim) + (IsCoded(key_codec) ? 2 * entries : 0);
  }
  __device__ __forceinline__ int64_t LogWeightOffset(int dim) const {
    return KeyScaleOffset(dim) + Aligned((IsCoded(key_codec) ? 2 * entries : 0) + (IsCoded(value_codec) ? 2 * entries : 0));
  }

 private:
  static __device__ __forceinline__ int Aligned(int bytes) {
    constexpr int kAlignment = static_cast<int>(kPageAlignment);
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
};

}  // namespace loupe::cuda
