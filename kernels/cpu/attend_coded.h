// The reader of pages of spherical codes: codes are looked up in a table of levels and multiplied in f32, lane = output as
// in attend_dense.h. Queries come turned and without the mean (their product with it is one number a query, which the
// caller adds); outputs leave turned, to be turned back once. Templates over V; pure compute, any thread, no errors.
#pragma once

#include <cstdint>

#include "kernels/cpu/attend_dense.h"
#include "kernels/spherical.h"

namespace loupe::attend {

// How a codec's codes become numbers of one vector.
template <class V, Codec kCodec>
struct Codes {
  static constexpr int kBits = kCodec == Codec::kS3 ? 2 : CodecBits(kCodec);  // of a field; s3 has a sign bit elsewhere
  static constexpr int kFields = 8 / kBits;

  struct Table {
    alignas(64) float levels[16];
    constexpr Table() : levels() {
      if (kCodec == Codec::kS8) return;
      for (int code = 0; code < 16; ++code) {
        levels[code] = static_cast<float>(spherical::TwiceLevel(spherical::LevelsOf(kCodec), code)) * 0.5f;
      }
    }
  };
  static constexpr Table kTable{};

  // Field `f` of byte `j` of 16 words; `signs` are the words with the sign bits of s3, whose field is `sign`.
  [[gnu::always_inline]] static V Load(const uint8_t* words, int j, int f, const uint8_t* signs, int sign) {
    if constexpr (kCodec == Codec::kS8) {
      return V::BytesLess128(words, 8 * j);
    } else if constexpr (kCodec == Codec::kS3) {
      return V::LookUpSigned(words, 8 * j + kBits * f, signs, 8 * j + sign, kTable.levels);
    } else {
      return V::template LookUp<kBits>(words, 8 * j + kBits * f, kTable.levels);
    }
  }
};

template <class V, Codec kCodec>
struct CodedPage {
  using C = Codes<V, kCodec>;

  // Scores of B blocks from `block` on.
  template <int H, int B>
  static void ScoreBlocks(const ScoresArgs<V>& a, int block) {
    const int dim = a.head_dim;
    const int64_t block_bytes = PlaneBytes(kCodec, dim) * 16;
    const uint8_t* keys = a.page.keys + block * block_bytes;
    const uint8_t* ahead = a.ahead + block * block_bytes;
    V sum[H][B];
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) sum[h][b] = V::Zero();
    }
    for (int i = 0; i < dim / (4 * C::kFields); ++i) {
      LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) V::Prefetch(ahead + b * block_bytes + i * 64);
      LOUPE_ATTEND_UNROLL for (int f = 0; f < C::kFields; ++f) {
        LOUPE_ATTEND_UNROLL for (int j = 0; j < 4; ++j) {
          const int d = i * 4 * C::kFields + f * 4 + j;
          LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) {
            const uint8_t* words = keys + b * block_bytes + i * 64;
            const uint8_t* signs = keys + b * block_bytes + 4 * dim + d / 32 * 64;
            const V k = C::Load(words, j, f, signs, i % 2 * 4 + f);
            LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) sum[h][b] = V::Fma(V::Set(a.q[h * a.q_stride + d]), k, sum[h][b]);
          }
        }
      }
    }
    LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) {
      const V scale = V::LoadHalfs(reinterpret_cast<const uint8_t*>(a.page.key_scales + (block + b) * 16));
      LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
        V::Mul(sum[h][b], scale).Store(a.s + h * a.s_stride + (block + b) * 16);
      }
    }
  }

  template <int H>
  static void Scores(const ScoresArgs<V>& a) {
    constexpr int kWidth = V::kAccumulators >= 2 * H ? 2 : 1;
    const int blocks = (a.page.count + 15) / 16;
    int block = 0;
    for (; block + kWidth <= blocks; block += kWidth) ScoreBlocks<H, kWidth>(a, block);
    if constexpr (kWidth > 1) {
      if (block < blocks) ScoreBlocks<H, 1>(a, block);
    }
  }

  // W vectors of 16 dimensions from vector `first` on; p [H][64], scaled.
  template <int H, int W>
  static void AddDims(const ValuesArgs<V>& a, const float* p, int first) {
    const int dim = a.head_dim;
    const int64_t quad_bytes = int64_t{4} * dim / C::kFields;
    V sum[H][W];
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      LOUPE_ATTEND_UNROLL for (int w = 0; w < W; ++w) sum[h][w] = V::Load(a.o + h * a.o_stride + (first + w) * 16);
    }
    for (int quad = a.begin / 4; quad * 4 < a.end; ++quad) {
      const int64_t plane = quad / 4 * PlaneBytes(kCodec, dim) * 16;  // of the block
      const uint8_t* words = a.page.values + plane + quad % 4 * quad_bytes;
      const uint8_t* signs = a.page.values + plane + 4 * dim + quad % 4 / 2 * dim;
      const uint8_t* ahead = a.ahead + plane + quad % 4 * quad_bytes;
      LOUPE_ATTEND_UNROLL for (int w = 0; w < W; ++w) {
        const int vector = first + w, row = vector / C::kFields, f = vector % C::kFields;
        if (w % C::kFields == 0) V::Prefetch(ahead + row * 64);
        LOUPE_ATTEND_UNROLL for (int j = 0; j < 4; ++j) {
          const V v = C::Load(words + row * 64, j, f, signs + row * 64, quad % 2 * 4 + f);
          LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) sum[h][w] = V::Fma(V::Set(p[h * 64 + quad * 4 + j]), v, sum[h][w]);
        }
      }
    }
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      LOUPE_ATTEND_UNROLL for (int w = 0; w < W; ++w) sum[h][w].Store(a.o + h * a.o_stride + (first + w) * 16);
    }
  }

  template <int H>
  static void Values(const ValuesArgs<V>& a) {
    constexpr int kWidth = V::kAccumulators >= 4 * H ? 4 : V::kAccumulators >= 2 * H ? 2 : 1;
    alignas(64) float p[H * 64];
    for (int b = a.begin / 16; b * 16 < a.end; ++b) {
      const V scale = V::LoadHalfs(reinterpret_cast<const uint8_t*>(a.page.value_scales + b * 16));
      for (int h = 0; h < H; ++h) V::Mul(V::Load(a.p + h * a.p_stride + b * 16), scale).Store(p + h * 64 + b * 16);
    }
    for (int h = 0; h < H; ++h) {  // outside there may be anything
      for (int e = a.begin / 4 * 4; e < a.begin; ++e) p[h * 64 + e] = 0;
      for (int e = a.end; e % 4 != 0; ++e) p[h * 64 + e] = 0;
    }
    for (int first = 0; first < a.head_dim / 16; first += kWidth) AddDims<H, kWidth>(a, p, first);
  }
};

template <class V, int>
struct CodedPageOf {};  // ReaderTable wants a head size, which codes do not care for
template <class V>
struct CodedPageOf<V, 8> : CodedPage<V, Codec::kS8> {};
template <class V>
struct CodedPageOf<V, 4> : CodedPage<V, Codec::kS4> {};
template <class V>
struct CodedPageOf<V, 3> : CodedPage<V, Codec::kS3> {};
template <class V>
struct CodedPageOf<V, 2> : CodedPage<V, Codec::kS2> {};

// The codec switch: a further codec is a further reader and a further case in these two functions. Of coded pages queries
// and outputs are turned ones.
template <class V>
ScoresFunction<V> FindScores(uint8_t codec, int head_dim, int heads) {
  switch (static_cast<Codec>(codec)) {
    case Codec::kS8: return ReaderTable<V, CodedPageOf, 8>::kScores[heads - 1];
    case Codec::kS4: return ReaderTable<V, CodedPageOf, 4>::kScores[heads - 1];
    case Codec::kS3: return ReaderTable<V, CodedPageOf, 3>::kScores[heads - 1];
    case Codec::kS2: return ReaderTable<V, CodedPageOf, 2>::kScores[heads - 1];
    case Codec::kF32: return ReaderTable<V, F32Page, 0>::kScores[heads - 1];
    default:
      return head_dim == 64    ? ReaderTable<V, DensePage, 64>::kScores[heads - 1]
             : head_dim == 128 ? ReaderTable<V, DensePage, 128>::kScores[heads - 1]
                               : ReaderTable<V, DensePage, 0>::kScores[heads - 1];
  }
}
template <class V>
ValuesFunction<V> FindValues(uint8_t codec, int head_dim, int heads) {
  switch (static_cast<Codec>(codec)) {
    case Codec::kS8: return ReaderTable<V, CodedPageOf, 8>::kValues[heads - 1];
    case Codec::kS4: return ReaderTable<V, CodedPageOf, 4>::kValues[heads - 1];
    case Codec::kS3: return ReaderTable<V, CodedPageOf, 3>::kValues[heads - 1];
    case Codec::kS2: return ReaderTable<V, CodedPageOf, 2>::kValues[heads - 1];
    case Codec::kF32: return ReaderTable<V, F32Page, 0>::kValues[heads - 1];
    default:
      return head_dim == 64    ? ReaderTable<V, DensePage, 64>::kValues[heads - 1]
             : head_dim == 128 ? ReaderTable<V, DensePage, 128>::kValues[heads - 1]
                               : ReaderTable<V, DensePage, 0>::kValues[heads - 1];
  }
}

}  // namespace loupe::attend
