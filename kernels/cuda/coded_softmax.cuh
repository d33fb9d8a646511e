// The arithmetic of decode attention over pages of any format: up to 64 entries of a page, as they lie in shared memory, become
// logits, weights and weighted values. Codes go from there through registers into tensor-core operands by table look-up
// (coded_layout.cuh says why no value has to change lanes); neither a key nor a value is written anywhere.
//
// Keys. Codes are integers, and so is the turned query: q' = unit * (high + low / 256) in two int8 numbers, 16 bits of it; their
// products are exact. s4 has no table of eight signed bytes, so its levels are shifted by 63.5 and the sum of the query is
// taken off. Values. An integer level of at most 255 is the fp16 number level * 2^-24 by its bits. s8, s3 and s2 are shifted
// to be positive, and what that adds, shift times the sum of the weights, is summed up by one product more.
#pragma once

#include "kernels/cuda/decode_softmax.cuh"
#include "kernels/cuda/spherical.cuh"

namespace loupe::cuda {

inline constexpr float kLowest = -1e30f;        // base of a sum that has seen nothing
inline constexpr float kLargestWeight = 14;  // in log2: fp16 holds four times that

// How a kernel for a head size is cut.
template <int kDim>
struct CodedShape {
  static constexpr int kWarps = kDim == 128 ? 6 : 4;  // of a block; an SM's four parts get equally many
  static constexpr int kBlocksPerSm = kDim == 128 ? 2 : 4;
  static constexpr int kSlots = 2;                                   // pieces on their way or at work, of a warp
  static constexpr int kPiece = kBlockEntries * kDim * 4;            // bytes of 16 dense entries
  static constexpr int kSlotBytes = kPiece + 4 * kPageEntries;       // and scales: of the keys, then of the values
  static constexpr int kSteps = kDim / 16, kIntSteps = kDim / 32;
  static constexpr int kMergeRow = kDim == 128 ? 132 : 264;
};

// 16-entry blocks of a page that are taken at once: as many as fit a slot.
__device__ __forceinline__ int PieceBlocks(const PageRef& ref) {
  const int bits = BitsOf(static_cast<Codec>(ref.key_codec)) + BitsOf(static_cast<Codec>(ref.value_codec));
  return bits <= 8 ? 4 : bits <= 16 ? 2 : 1;
}

// Bytes that one side of so many blocks takes of a slot; f32 ones, which only exact mode knows, are read where they lie.
__device__ __forceinline__ int SlotBytes(Codec codec, int blocks, int dim) {
  return codec == Codec::kF32 ? 0 : blocks * 2 * dim * BitsOf(codec);
}

// Where a slot's scales lie: of the keys, then of the values.
__device__ __forceinline__ int SlotScales(const PageRef& ref, int dim) {
  return SlotBytes(static_cast<Codec>(ref.key_codec), PieceBlocks(ref), dim) +
         SlotBytes(static_cast<Codec>(ref.value_codec), PieceBlocks(ref), dim);
}

__device__ __forceinline__ uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}
__device__ __forceinline__ void MmaSigned(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 LoadShared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ float LoadSharedHalf(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return __half2float(__ushort_as_half(v));
}
template <int kWords>
__device__ __forceinline__ void LoadWords(uint32_t address, uint32_t (&w)[kWords]) {
  if constexpr (kWords == 1) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(address));
  } else if constexpr (kWords == 2) {
    const uint2 v = LoadShared8(address);
    w[0] = v.x, w[1] = v.y;
  } else {
    static_assert(kWords == 4);
    const uint4 v = LoadShared16(address);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  }
}
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Where the two bits of a nibble are joined by their sign, whose bit of each nibble `which` tells.
__device__ __forceinline__ uint32_t WithSigns(uint32_t pairs, uint32_t signs, int which) {
  const uint32_t moved = which == 0 ? signs << 2 : which == 1 ? signs << 1 : which == 2 ? signs : signs >> 1;
  return (pairs & 0x33333333u) | (moved & 0x44444444u);
}

// Twice the levels of s2 and s3 as signed bytes, and shifted by 117 to be positive.
inline constexpr uint32_t kLevels2 = 0x8bdd7523, kShifted2 = 0x0052ea98;
inline constexpr uint32_t kLevels3Plus = 0x7549290d, kLevels3Minus = 0x8bb7d7f3;
inline constexpr uint32_t kShifted3Plus = 0xeabe9e82, kShifted3Minus = 0x002c4c68;
inline constexpr uint32_t kShift2 = 0x00750075, kShift8 = 0x00800080;  // the shifts as fp16 pairs

// A row of four steps of the integer operand, by codec. `block` is the shared address of a block of 16 keys.
template <int kDim, Codec kCodec>
struct KeyBlock {
  static constexpr int kSteps = CodedShape<kDim>::kIntSteps;
  uint32_t words[kCodec == Codec::kS8 ? 4 : kCodec == Codec::kS4 ? kSteps * 2 : kSteps];
  uint32_t signs[kSteps / 2];

  __device__ __forceinline__ void Load(uint32_t block, int lane) {
    if constexpr (kCodec == Codec::kS4) {
#pragma unroll
      for (int c = 0; c < kSteps / 2; ++c) {
        const uint4 v = LoadShared16(block + c * 512 + lane * 16);
        words[4 * c] = v.x, words[4 * c + 1] = v.y, words[4 * c + 2] = v.z, words[4 * c + 3] = v.w;
      }
    } else if constexpr (kCodec != Codec::kS8) {
      LoadWords(block + lane * (kDim / 8), words);
      if constexpr (kCodec == Codec::kS3) LoadWords(block + 4 * kDim + lane * (kDim / 16), signs);
    }
  }
  __device__ __forceinline__ void Step(uint32_t block, int lane, int kk, uint32_t (&a)[4]) {
    if constexpr (kCodec == Codec::kS8) {
      LoadWords(block + kk * 512 + lane * 16, a);
    } else if constexpr (kCodec == Codec::kS4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t w = words[2 * kk + r], index = w & 0x77777777u;
        a[r] = Permute(0x2d33383d, 0x0a172027, index) ^ Permute(0x7f7f7f7f, 0x7f7f7f7f, w);
        a[2 + r] = Permute(0x2d33383d, 0x0a172027, index >> 16) ^ Permute(0x7f7f7f7f, 0x7f7f7f7f, w >> 16);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pairs = words[kk] >> (2 * half);
        if constexpr (kCodec == Codec::kS3) {
          const uint32_t index = WithSigns(pairs, signs[kk / 2], kk % 2 * 2 + half);
          a[2 * half] = Permute(kLevels3Plus, kLevels3Minus, index);
          a[2 * half + 1] = Permute(kLevels3Plus, kLevels3Minus, index >> 16);
        } else {
          const uint32_t index = pairs & 0x33333333u;
          a[2 * half] = Permute(kLevels2, kLevels2, index);
          a[2 * half + 1] = Permute(kLevels2, kLevels2, index >> 16);
        }
      }
    }
  }
};

// The queries of a task in shared memory, as operands, and what goes with them.
template <int kDim>
struct Queries {
  alignas(16) uint32_t plain[kDim / 16][32][2];   // fp16, for dense keys
  alignas(16) uint32_t turned[kDim / 32][32][4];  // int8: high, high, low, low
  float unit[kHeads];                             // what a product of codes counts, in log2
  float shift[kHeads];                            // what to take off s4's products
  float mean[kHeads];                             // query times mean key, in log2
};

// Logits of blocks of coded keys, in log2: x[b][2 r + j] is entry 16 b + g + 8 r against head 2t + j.
template <int kDim, Codec kCodec, int kAtOnce>
__device__ __forceinline__ void CodedLogits(uint32_t keys, uint32_t scales, const Queries<kDim>& queries,
                                            float (&x)[kAtOnce][4]) {
  constexpr int kSteps = CodedShape<kDim>::kIntSteps, kBlockBytes = 2 * kDim * CodecBits(kCodec);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint4 query[kSteps];
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) query[kk] = *reinterpret_cast<const uint4*>(queries.turned[kk][lane]);
  const auto of_heads = [&](const float (&x)[kHeads]) { return *reinterpret_cast<const float2*>(x + 2 * t); };
  const float2 unit = of_heads(queries.unit), shift = of_heads(queries.shift), mean = of_heads(queries.mean);
  constexpr float kUnit = kCodec == Codec::kS8 || kCodec == Codec::kS4 ? 1.0f : 0.5f;
#pragma unroll
  for (int b = 0; b < kAtOnce; ++b) {
    int high[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0};
    KeyBlock<kDim, kCodec> block;
    block.Load(keys + b * kBlockBytes, lane);
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      uint32_t a[4];
      block.Step(keys + b * kBlockBytes, lane, kk, a);
      MmaSigned(high, a, query[kk].x, query[kk].y);
      MmaSigned(low, a, query[kk].z, query[kk].w);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = LoadSharedHalf(scales + (16 * b + g + 8 * r) * 2) * kUnit;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float dot = static_cast<float>(high[2 * r + j] * 256 + low[2 * r + j]);
        if constexpr (kCodec == Codec::kS4) dot -= j == 0 ? shift.x : shift.y;
        x[b][2 * r + j] = fmaf(dot, (j == 0 ? unit.x : unit.y) * scale, j == 0 ? mean.x : mean.y);
      }
    }
  }
}

// Sums of a warp: `base` is subtracted from logits before they are exponentiated and follows their maximum from afar. Rows of
// `out` are dimensions: turned ones times 2^-24 with the shifts still in them, which `shifts` has summed up, or `plain` ones.
// Lists change between dense and coded pages seldom, so the sums are turned when they do.
template <int kDim>
struct CodedRunning {
  static constexpr int kSteps = CodedShape<kDim>::kSteps;
  float base[2], sum[2];
  float out[kSteps][4], shifts[4];
  bool plain;

  __device__ void Clear() {
    base[0] = base[1] = kLowest, sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0;
    shifts[0] = shifts[1] = shifts[2] = shifts[3] = 0;
    plain = false;
  }

  // Butterflies over dimensions 16 i + 8 (j / 2) + g of out[i][j].
  __device__ __forceinline__ void Mix() {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 4; h < 32; h *= 2) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][j] = __shfl_xor_sync(~0u, out[i][j], h) + (lane & h ? -out[i][j] : out[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float a = out[i][j], b = out[i][2 + j];
        out[i][j] = a + b, out[i][2 + j] = a - b;
      }
    }
#pragma unroll
    for (int h = 1; h < kSteps; h *= 2) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (i & h) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float a = out[i][j], b = out[i + h][j];
          out[i][j] = a + b, out[i + h][j] = a - b;
        }
      }
    }
  }
  __device__ __forceinline__ void Scale(float scale) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] *= IsNegative(16 * i + 8 * (j / 2) + g) ? -scale : scale;
    }
  }
  // Turned sums at their own size.
  __device__ __forceinline__ void TakeShiftsOff() {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = (out[i][j] - shifts[j]) * 0x1p24f;
    }
    shifts[0] = shifts[1] = shifts[2] = shifts[3] = 0;
  }
  __device__ __forceinline__ void MakePlain() {
    if (plain) return;
    TakeShiftsOff();
    Mix();
    Scale(spherical::TurnScale(kDim));
    plain = true;
  }
  __device__ __forceinline__ void MakeTurned() {
    if (!plain) return;
    Scale(spherical::TurnScale(kDim) * 0x1p-24f);
    Mix();
    plain = false;
  }

  // Moves the base of head 2t + j up, so that a weight of 2^`top` becomes 2^kHeadroom. Rare.
  __device__ __forceinline__ void Rebase(int j, float top) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    const float next = fmaxf(base[j], top - kHeadroom), factor = exp2f(base[j] - next);
    base[j] = next;
    sum[j] *= factor;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      out[i][j] *= factor, out[i][2 + j] *= factor;
    }
    shifts[j] *= factor, shifts[2 + j] *= factor;
  }

  // Logits become weights times the values' scales, as operands b of the product with the values. x is lost.
  template <int kAtOnce>
  __device__ __forceinline__ void Weigh(float (&x)[kAtOnce][4], const float (&scales)[kAtOnce][2], uint32_t (&weights)[kAtOnce][2]) {
    float top[2] = {kNone, kNone}, largest = 0x1p-24f;
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
      largest = fmaxf(largest, fmaxf(scales[b][0], scales[b][1]));
      top[0] = fmaxf(top[0], fmaxf(x[b][0], x[b][2])), top[1] = fmaxf(top[1], fmaxf(x[b][1], x[b][3]));
    }
    const float size = __log2f(largest);
    if (__any_sync(~0u, fmaxf(top[0] - base[0], top[1] - base[1]) + size > kLargestWeight)) {
#pragma unroll
      for (int j = 0; j < 2; ++j) Rebase(j, top[j] + size);
    }
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[b][i] = Exp2(x[b][i] - base[i % 2]);
      sum[0] += x[b][0] + x[b][2], sum[1] += x[b][1] + x[b][3];
      weights[b][0] = TransposeMatrix(PackHalf(x[b][0] * scales[b][0], x[b][1] * scales[b][0]));
      weights[b][1] = TransposeMatrix(PackHalf(x[b][2] * scales[b][1], x[b][3] * scales[b][1]));
    }
  }

  // Sixteen dense values; entries outside [low, high) may be anything, and zero times anything is not zero.
  __device__ __forceinline__ void AddDense(uint32_t values, const uint32_t (&b)[2], int low, int high) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const auto pair = [&](int e) {
      return (e >= low && e < high ? 0xffffu : 0) | (e + 1 >= low && e + 1 < high ? 0xffff0000u : 0);
    };
    const uint32_t keep0 = pair(2 * t), keep1 = pair(2 * t + 8);
    const uint32_t address = values + (lane / 8 % 2) * 256 + (lane / 16) * 128 + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t a[4];
      LoadMatricesTransposed(a, address + i * 512);
      a[0] &= keep0, a[1] &= keep0, a[2] &= keep1, a[3] &= keep1;
      Mma(out[i], a, b[0], b[1]);
    }
  }

  // Four shifted levels as bytes: entries 2t and 2t + 1, of dimensions g (bytes 0 and 2) and g + 8.
  static __device__ __forceinline__ void Spread(uint32_t bytes, uint32_t* a0, uint32_t* a1) {
    *a0 = bytes & 0x00ff00ffu;
    *a1 = Permute(bytes, 0, 0x4341);
  }

  __device__ __forceinline__ void Add8(uint32_t values, const uint32_t (&b)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < kSteps / 2; ++c) {
      const uint4 w = LoadShared16(values + c * 512 + lane * 16);
      uint32_t a[4];
      Spread(w.x, &a[0], &a[1]), Spread(w.y, &a[2], &a[3]);
      Mma(out[2 * c], a, b[0], b[1]);
      Spread(w.z, &a[0], &a[1]), Spread(w.w, &a[2], &a[3]);
      Mma(out[2 * c + 1], a, b[0], b[1]);
    }
    Mma(shifts, {kShift8, kShift8, kShift8, kShift8}, b[0], b[1]);
  }
  __device__ __forceinline__ void Add4(uint32_t values, const uint32_t (&b)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < kSteps / 4; ++c) {
      uint32_t words[4];
      LoadWords(values + c * 512 + lane * 16, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t w = words[i], index = w & 0x77777777u, first = w & 0x80808080u, second = w * 16 & 0x80808080u;
        const uint32_t near = Permute(0x25190f05, 0x6b513f31, index), far = Permute(0x25190f05, 0x6b513f31, index >> 16);
        const uint32_t a[4] = {Permute(near, first, 0x5240), Permute(near, second, 0x5341), Permute(far, first, 0x7260),
                               Permute(far, second, 0x7361)};
        Mma(out[4 * c + i], a, b[0], b[1]);
      }
    }
  }
  template <Codec kCodec>  // s3 or s2
  __device__ __forceinline__ void AddPairs(uint32_t values, const uint32_t (&b)[2]) {
    const int lane = threadIdx.x % 32;
    uint32_t words[kSteps / 2], signs[kSteps / 4];
    LoadWords(values + lane * (kDim / 8), words);
    if constexpr (kCodec == Codec::kS3) LoadWords(values + 4 * kDim + lane * (kDim / 16), signs);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t pairs = words[i / 2] >> (i % 2 * 2);
      uint32_t near, far;
      if constexpr (kCodec == Codec::kS3) {
        const uint32_t index = WithSigns(pairs, signs[i / 4], i % 4);
        near = Permute(kShifted3Plus, kShifted3Minus, index), far = Permute(kShifted3Plus, kShifted3Minus, index >> 16);
      } else {
        const uint32_t index = pairs & 0x33333333u;
        near = Permute(kShifted2, kShifted2, index), far = Permute(kShifted2, kShifted2, index >> 16);
      }
      uint32_t a[4];
      Spread(near, &a[0], &a[1]), Spread(far, &a[2], &a[3]);
      Mma(out[i], a, b[0], b[1]);
    }
    Mma(shifts, {kShift2, kShift2, kShift2, kShift2}, b[0], b[1]);
  }
};

}  // namespace loupe::cuda
