// The turn of spherical codes and their encoder, a vector a warp: lane l holds coordinates kPer l..; kPer is 2 for head size
// 64, 4 for 128, 8 beyond (zeros behind the last). Every operation is rounded by itself, in the order of kernels/spherical.h.
#pragma once

#include "kernels/cuda/coded_layout.cuh"

namespace loupe::cuda {

// Coordinates a lane holds.
__host__ __device__ constexpr int CoordinatesOf(int dim) { return dim <= 64 ? 2 : dim <= 128 ? 4 : 8; }

// spherical::IsNegative without a table in memory.
__device__ __forceinline__ bool IsNegative(int d) {
  constexpr uint64_t k0 = spherical::kSigns[0], k1 = spherical::kSigns[1], k2 = spherical::kSigns[2], k3 = spherical::kSigns[3];
  const uint64_t signs = d < 128 ? (d < 64 ? k0 : k1) : d < 192 ? k2 : k3;
  return signs >> (d & 63) & 1;
}

template <int kPer>
__device__ __forceinline__ void Butterflies(float (&x)[kPer], int block) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 1; h < kPer; h *= 2) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = __fadd_rn(a, b), x[i + h] = __fsub_rn(a, b);
    }
  }
  for (int h = 1; h * kPer < block; h *= 2) {
    const bool upper = lane & h;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], h);
      x[i] = __fadd_rn(other, upper ? -x[i] : x[i]);
    }
  }
}

template <int kPer>
__device__ __forceinline__ void Turn(float (&x)[kPer], int dim) {
  const int first = threadIdx.x % 32 * kPer, block = spherical::TurnBlock(dim);
#pragma unroll
  for (int i = 0; i < kPer; ++i) x[i] = IsNegative(first + i) ? -x[i] : x[i];
  Butterflies(x, block);
  const float scale = spherical::TurnScale(block);
#pragma unroll
  for (int i = 0; i < kPer; ++i) x[i] = __fmul_rn(x[i], scale);
}

template <int kPer>
__device__ __forceinline__ void TurnBack(float (&x)[kPer], int dim) {
  const int first = threadIdx.x % 32 * kPer, block = spherical::TurnBlock(dim);
  Butterflies(x, block);
  const float scale = spherical::TurnScale(block);
#pragma unroll
  for (int i = 0; i < kPer; ++i) x[i] = __fmul_rn(x[i], IsNegative(first + i) ? -scale : scale);
}

// Squares summed as the tree that spherical.h prescribes; in every lane.
template <int kPer>
__device__ __forceinline__ float SumOfSquares(const float (&y)[kPer]) {
  float s[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) s[i] = __fmul_rn(y[i], y[i]);
#pragma unroll
  for (int h = 16; h > 0; h /= 2) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) s[i] = __fadd_rn(s[i], __shfl_xor_sync(~0u, s[i], h));
  }
#pragma unroll
  for (int h = kPer / 2; h > 0; h /= 2) {
#pragma unroll
    for (int i = 0; i < h; ++i) s[i] = __fadd_rn(s[i], s[i + h]);
  }
  return s[0];
}

// Index and sign of u among the levels; `twice_squared` grows by the square of twice its level.
template <Codec kCodec>
__device__ __forceinline__ int Quantise(float u, int* twice_squared) {
  constexpr spherical::Levels kLevels = spherical::LevelsOf(kCodec);
  const float size = fabsf(u);
  int index = 0, twice = 2 * kLevels.magnitudes[0] + 1;
#pragma unroll
  for (int i = 0; i + 1 < kLevels.count; ++i) {
    const bool above = size >= spherical::Bound(kLevels, i);
    index += above, twice = above ? 2 * kLevels.magnitudes[i + 1] + 1 : twice;
  }
  *twice_squared += twice * twice;
  return index | (u < 0 ? kLevels.count : 0);
}

struct Encoded {
  __half scale;
  bool finite;
};

// x becomes its turn; codes as StoreCodes takes them.
template <int kPer>
__device__ Encoded Encode(float (&x)[kPer], int dim, Codec codec, int (&codes)[kPer]) {
  Turn(x, dim);
  const float norm = __fsqrt_rn(SumOfSquares(x));
  const bool in = threadIdx.x % 32 * kPer < dim;
  int sum = 0;
  if (codec == Codec::kS8) {
    float top = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
    top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(top)));
    const float factor = top > 0 ? __fdiv_rn(127.0f, top) : 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      float rounded = rintf(__fmul_rn(x[i], factor));
      rounded = rounded > 127.0f ? 127.0f : rounded;
      rounded = rounded >= -127.0f ? rounded : -127.0f;
      const int code = static_cast<int>(rounded);
      sum += 4 * code * code;
      codes[i] = code + 128;
    }
  } else {
    const float factor = norm > 0 ? __fdiv_rn(__fsqrt_rn(static_cast<float>(dim)), norm) : 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const float u = __fmul_rn(x[i], factor);
      codes[i] = codec == Codec::kS4   ? Quantise<Codec::kS4>(u, &sum)
                 : codec == Codec::kS3 ? Quantise<Codec::kS3>(u, &sum)
                                       : Quantise<Codec::kS2>(u, &sum);
    }
  }
  sum = __reduce_add_sync(~0u, in ? sum : 0);
  Encoded encoded;
  encoded.finite = norm <= 3.402823466e38f;
  const float length = __fmul_rn(__fsqrt_rn(static_cast<float>(sum)), 0.5f);
  encoded.scale = !encoded.finite ? __ushort_as_half(0x7e00) : norm > 0 ? FromFloat<__half>(__fdiv_rn(norm, length)) : __ushort_as_half(0);
  return encoded;
}

// One side (keys or values) of an entry's slot in a page, of any codec.
struct Side {
  uint8_t* plane;
  __half* scales;
  Codec codec;
  bool key;
  int slot, entries;

  __device__ __forceinline__ Side(const PageView& page, bool is_key, int dim, uint8_t* arena)
      : plane(arena + (is_key ? page.offset : page.ValueOffset(dim))),
        scales(reinterpret_cast<__half*>(arena + (is_key ? page.KeyScaleOffset(dim) : page.ValueScaleOffset(dim)))),
        codec(is_key ? page.key_codec : page.value_codec),
        key(is_key),
        slot(page.count),
        entries(page.entries) {}
  __device__ __forceinline__ CodedEntry Entry(int dim) const {
    return {plane + slot / kBlockEntries * (2 * dim * BitsOf(codec)), codec, key, slot % kBlockEntries, dim};
  }
};

// A warp reads a side in f32; what a coded key lacks (`mean`, or null) is added.
template <int kPer>
__device__ void LoadSide(const Side& side, int dim, const float* mean, float (&x)[kPer]) {
  const int first = threadIdx.x % 32 * kPer;
  const bool in = first < dim;
#pragma unroll
  for (int i = 0; i < kPer; ++i) x[i] = 0;
  if (!IsCoded(side.codec)) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (first + i >= dim) continue;
      const int at = ElementIndex(side.slot, first + i, side.entries);
      x[i] = side.codec == Codec::kF32 ? reinterpret_cast<const float*>(side.plane)[at]
                                       : ToFloat(reinterpret_cast<const __half*>(side.plane)[at]);
    }
    return;
  }
  const CodedEntry entry = side.Entry(dim);
  const float scale = ToFloat(side.scales[side.slot]);
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (in) x[i] = __fmul_rn(static_cast<float>(ReadTwice(entry, first + i)) * 0.5f, scale);
  TurnBack(x, dim);
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (in && side.key && mean) x[i] = __fadd_rn(x[i], mean[first + i]);
}

__device__ __forceinline__ uint32_t PackFinite(float low, float high) {
  return __half_as_ushort(FromFloat<__half>(low)) | static_cast<uint32_t>(__half_as_ushort(FromFloat<__half>(high))) << 16;
}

// A warp writes a side from f32, whose contents are lost. `codes`: the warp's own [D] bytes of shared memory. False: it was
// to be coded and is not finite.
template <int kPer>
__device__ bool StoreSide(const Side& side, int dim, const float* mean, uint8_t* codes, float (&x)[kPer]) {
  const int lane = threadIdx.x % 32, first = lane * kPer;
  const bool in = first < dim;
  if (!IsCoded(side.codec)) {
    if (kPer == 4 && side.codec == Codec::kDense && in) {
      *reinterpret_cast<uint2*>(reinterpret_cast<__half*>(side.plane) + ElementIndex(side.slot, first, side.entries)) = {
          PackFinite(x[0], x[1]), PackFinite(x[kPer - 2], x[kPer - 1])};
      return true;
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (first + i >= dim) continue;
      const int at = ElementIndex(side.slot, first + i, side.entries);
      if (side.codec == Codec::kF32) {
        reinterpret_cast<float*>(side.plane)[at] = x[i];
      } else {
        reinterpret_cast<__half*>(side.plane)[at] = FromFloat<__half>(x[i]);
      }
    }
    return true;
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (in && side.key && mean) x[i] = __fsub_rn(x[i], mean[first + i]);
  int code[kPer];
  const Encoded encoded = Encode(x, dim, side.codec, code);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (in) codes[first + i] = static_cast<uint8_t>(code[i]);
  __syncwarp();
  StoreCodes(side.Entry(dim), codes);
  if (lane == 0) side.scales[side.slot] = encoded.scale;
  return encoded.finite;
}

// Turns a vector in shared memory in place; a warp.
__device__ inline void TurnShared(float* x, int dim, bool back) {
  const int lane = threadIdx.x % 32, block = spherical::TurnBlock(dim);
  __syncwarp();
  if (!back)
    for (int d = lane; d < dim; d += 32) x[d] = IsNegative(d) ? -x[d] : x[d];
  __syncwarp();
  for (int h = 1; h < block; h *= 2) {
    for (int i = lane; i < dim / 2; i += 32) {
      const int at = i / h * 2 * h + i % h;
      const float a = x[at], b = x[at + h];
      x[at] = a + b, x[at + h] = a - b;
    }
    __syncwarp();
  }
  const float scale = spherical::TurnScale(block);
  for (int d = lane; d < dim; d += 32) x[d] *= back && IsNegative(d) ? -scale : scale;
  __syncwarp();
}

}  // namespace loupe::cuda
