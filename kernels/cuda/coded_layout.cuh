// Where the codes of a block of 16 entries lie, and how single ones are read and written. The layout is that of tensor-core
// operands: what a lane (g, t) loads in one piece becomes, after a table look-up, rows g and g + 8 of the operand A of
// mma.m16n8k32 (keys: rows are entries, columns head dimensions) or m16n8k16 (values: rows are dimensions, columns entries).
//
// Keys. Step kk is dimensions 32 kk..; lane (g, t) holds bytes b of dimensions 32 kk + 16 half + 4 t + b of entries g + 8 r.
//   s8  [kk][lane][half][r][b]            two's complement
//   s4  [kk / 2][lane][kk % 2][r][half]   16 bits: nibble b
//   s2  [lane][kk][r]                     16 bits: code (b, half) at bit 4 b + 2 half
//   s3  index like s2, then signs [lane][kk / 2][r] 16 bits: (b, kk % 2, half) at bit 4 b + 2 (kk % 2) + half
// Values. Tile i is dimensions 16 i..; lane (g, t) holds dimensions 16 i + 8 high + g of entries 8 far + 2 t + odd.
//   s8  [i / 2][lane][i % 2][far][odd][high]   a byte: code + 128
//   s4  [i / 4][lane][i % 4][far][odd]         a byte: index (high) at bit 4 high; sign at bit 7 - 4 high
//   s2  [lane][i / 2][far][odd]                a byte: code (high, i % 2) at bit 4 high + 2 (i % 2)
//   s3  index like s2, then signs [lane][i / 4][far][odd] a byte: (high, i % 4) at bit 4 high + i % 4
// No byte holds codes of two entries, so that entries can be written side by side.
#pragma once

#include "kernels/cuda/pages.cuh"
#include "kernels/spherical.h"

namespace loupe::cuda {

// The entry of a block whose codes are meant.
struct CodedEntry {
  uint8_t* block;
  Codec codec;
  bool key;
  int entry, dim;

  // Bits from the start of the block of the index of coordinate d and of its sign; s8: of its byte.
  __device__ __forceinline__ int2 BitsAt(int d) const {
    if (key) {
      const int kk = d / 32, half = d % 32 / 16, t = d % 16 / 4, b = d % 4, g = entry % 8, r = entry / 8, lane = 4 * g + t;
      if (codec == Codec::kS8) {
        const int bit = (kk * 512 + lane * 16 + half * 8 + r * 4 + b) * 8;
        return {bit, bit};
      }
      if (codec == Codec::kS4) {
        const int bit = (kk / 2 * 512 + lane * 16 + kk % 2 * 8 + r * 4 + half * 2) * 8 + 4 * b;
        return {bit, bit + 3};
      }
      const int bit = (lane * (dim / 8) + kk * 4 + r * 2) * 8 + 4 * b + 2 * half;
      if (codec == Codec::kS2) return {bit, bit + 1};
      return {bit, (4 * dim + lane * (dim / 16) + kk / 2 * 4 + r * 2) * 8 + 4 * b + kk % 2 * 2 + half};
    }
    const int i = d / 16, high = d % 16 / 8, g = d % 8, far = entry / 8, t = entry % 8 / 2, odd = entry % 2, lane = 4 * g + t;
    const int byte = far * 2 + odd;
    if (codec == Codec::kS8) {
      const int bit = (i / 2 * 512 + lane * 16 + i % 2 * 8 + far * 4 + odd * 2 + high) * 8;
      return {bit, bit};
    }
    if (codec == Codec::kS4) {
      const int bit = (i / 4 * 512 + lane * 16 + i % 4 * 4 + byte) * 8;
      return {bit + 4 * high, bit + 7 - 4 * high};
    }
    const int bit = (lane * (dim / 8) + i / 2 * 4 + byte) * 8 + 4 * high + i % 2 * 2;
    if (codec == Codec::kS2) return {bit, bit + 1};
    return {bit, (4 * dim + lane * (dim / 16) + i / 4 * 4 + byte) * 8 + 4 * high + i % 4};
  }
};

// The code of coordinate d; s8: code + 128.
__device__ __forceinline__ int ReadCode(const CodedEntry& at, int d) {
  const int2 bits = at.BitsAt(d);
  const int byte = at.block[bits.x / 8];
  if (at.codec == Codec::kS8) return at.key ? byte ^ 0x80 : byte;
  const int sign = at.block[bits.y / 8] >> bits.y % 8 & 1, index_bits = BitsOf(at.codec) - 1;
  return (byte >> bits.x % 8 & ((1 << index_bits) - 1)) | sign << index_bits;
}

// A code as an integer, twice its level.
__device__ __forceinline__ int TwiceOf(Codec codec, int code) {
  if (codec == Codec::kS8) return 2 * (code - 128);
  int twice, sign = code & 8;
  if (codec == Codec::kS4) {
    twice = 2 * static_cast<int>((code & 4 ? 0x35281f18u : 0x120c0702u) >> 8 * (code & 3) & 0xff) + 1;
  } else if (codec == Codec::kS3) {
    twice = 2 * static_cast<int>(0x3a241406u >> 8 * (code & 3) & 0xff) + 1, sign = code & 4;
  } else {
    twice = code & 1 ? 117 : 35, sign = code & 2;
  }
  return sign ? -twice : twice;
}
__device__ __forceinline__ int ReadTwice(const CodedEntry& at, int d) { return TwiceOf(at.codec, ReadCode(at, d)); }
static_assert(spherical::kLevels4.magnitudes[0] == 0x02 && spherical::kLevels4.magnitudes[3] == 0x12 &&
              spherical::kLevels4.magnitudes[4] == 0x18 && spherical::kLevels4.magnitudes[7] == 0x35);
static_assert(spherical::kLevels3.magnitudes[0] == 0x06 && spherical::kLevels3.magnitudes[3] == 0x3a);
static_assert(spherical::kLevels2.magnitudes[0] == 17 && spherical::kLevels2.magnitudes[1] == 58);

// A warp writes the entry's codes (s8: code + 128), which lie in shared memory, [D] bytes. `block` may be shared memory too.
__device__ inline void StoreCodes(const CodedEntry& at, const uint8_t* codes) {
  const int lane = threadIdx.x % 32;
  const auto byte_of = [&](int d) { return at.block + at.BitsAt(d).x / 8; };
  if (at.key) {
    if (at.codec == Codec::kS8) {
      for (int d = 4 * lane; d < at.dim; d += 128)
        *reinterpret_cast<uint32_t*>(byte_of(d)) = *reinterpret_cast<const uint32_t*>(codes + d) ^ 0x80808080u;
      return;
    }
    if (at.codec == Codec::kS4) {
      for (int d = 4 * lane; d < at.dim; d += 128)
        *reinterpret_cast<uint16_t*>(byte_of(d)) =
            static_cast<uint16_t>(codes[d] | codes[d + 1] << 4 | codes[d + 2] << 8 | codes[d + 3] << 12);
      return;
    }
    const int mask = at.codec == Codec::kS3 ? 3 : 15;
    for (int i = lane; i < at.dim / 8; i += 32) {
      const int d = i / 4 * 32 + i % 4 * 4;
      int bits = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) bits |= (codes[d + b] & mask) << 4 * b | (codes[d + 16 + b] & mask) << (4 * b + 2);
      *reinterpret_cast<uint16_t*>(byte_of(d)) = static_cast<uint16_t>(bits);
    }
    if (at.codec != Codec::kS3) return;
    for (int i = lane; i < at.dim / 16; i += 32) {
      const int d = i / 4 * 64 + i % 4 * 4;
      int bits = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int b = 0; b < 4; ++b) bits |= (codes[d + 16 * j + b] >> 2) << (4 * b + j);
      }
      *reinterpret_cast<uint16_t*>(at.block + at.BitsAt(d).y / 8) = static_cast<uint16_t>(bits);
    }
    return;
  }
  if (at.codec == Codec::kS8) {
    for (int d = lane; d < at.dim; d += 32) *byte_of(d) = codes[d];
    return;
  }
  if (at.codec == Codec::kS4) {
    for (int i = lane; i < at.dim / 2; i += 32) {
      const int d = i / 8 * 16 + i % 8, low = codes[d], high = codes[d + 8];
      *byte_of(d) = static_cast<uint8_t>((low & 7) | (high & 7) << 4 | (high >> 3) << 3 | (low >> 3) << 7);
    }
    return;
  }
  const int mask = at.codec == Codec::kS3 ? 3 : 15;
  for (int i = lane; i < at.dim / 4; i += 32) {
    const int d = i / 8 * 32 + i % 8;
    *byte_of(d) = static_cast<uint8_t>((codes[d] & mask) | (codes[d + 16] & mask) << 2 | (codes[d + 8] & mask) << 4 |
                                       (codes[d + 24] & mask) << 6);
  }
  if (at.codec != Codec::kS3) return;
  for (int i = lane; i < at.dim / 8; i += 32) {
    const int d = i / 8 * 64 + i % 8;
    int bits = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) bits |= (codes[d + 16 * j] >> 2) << j | (codes[d + 16 * j + 8] >> 2) << (4 + j);
    at.block[at.BitsAt(d).y / 8] = static_cast<uint8_t>(bits);
  }
}

}  // namespace loupe::cuda
