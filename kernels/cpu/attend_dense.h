// The reader of dense (fp16) and f32 pages. A reader gives two
// products for up to V::kMaxHeads queries at once: scores s = q . k of a page's entries, and o += p . v. Templates over
// the vector type V (16 lanes of f32), so that every instruction set compiles its own copy under its own flags. Pure
// compute, any thread, no errors.
//
// Lane = output (an entry for scores, a head dimension for values); the reduced dimension runs over instructions. So an
// output sees the same operations in the same order whatever else is computed beside it, and no sum crosses lanes.
#pragma once

#include <cstdint>

#include "kernels/cpu/attend_kernels.h"
#include "kernels/page_layout.h"

// Loops over register arrays must be unrolled, or the compiler keeps the arrays in memory. Not under clang's sanitizers:
// their checks make the unrolled loops take minutes to compile.
#if defined(__clang__)
#if __has_feature(address_sanitizer) || __has_feature(undefined_behavior_sanitizer)
#define LOUPE_ATTEND_UNROLL
#else
#define LOUPE_ATTEND_UNROLL _Pragma("unroll")
#endif
#else
#define LOUPE_ATTEND_UNROLL _Pragma("GCC unroll 16")
#endif

namespace loupe::attend {

// Queries against a page: q [heads, stride], s [heads, stride]. `ahead` is the plane read next, prefetched on the way,
// since the hardware does not follow a page table.
template <class V>
struct ScoresArgs {
  const PageView& page;
  const uint8_t* ahead;
  int head_dim;
  const float* q;
  int64_t q_stride;
  float* s;
  int64_t s_stride;
};

// o [heads, stride] += p [heads, stride] times values of entries [begin, end).
template <class V>
struct ValuesArgs {
  const PageView& page;
  const uint8_t* ahead;
  int head_dim;
  const float* p;
  int64_t p_stride;
  float* o;
  int64_t o_stride;
  int begin;
  int end;
};

// The elements that a page stores.
template <class V>
struct HalfElement {
  static constexpr int kBytes = 2;
  static V Load(const uint8_t* p) { return V::LoadHalfs(p); }
  static V LoadEight(const uint8_t* p) { return V::LoadEightHalfs(p); }
};
template <class V>
struct FloatElement {
  static constexpr int kBytes = 4;
  static V Load(const uint8_t* p) { return V::Load(reinterpret_cast<const float*>(p)); }
  static V LoadEight(const uint8_t* p) { return V::LoadEight(reinterpret_cast<const float*>(p)); }
};

// D is the head size where a loop of its own pays, 0 for any.
template <class V, int D, class Element>
struct PlainPage {
  static constexpr int kVectorBytes = 16 * Element::kBytes;
  static_assert(D % 64 == 0);
  static constexpr int Dim(int head_dim) { return D != 0 ? D : head_dim; }

  // How many vectors beside each other fit the registers for H queries.
  static constexpr int Width(int heads) {
    return V::kAccumulators >= 4 * heads ? 4 : V::kAccumulators >= 2 * heads ? 2 : 1;
  }

  // Scores of B blocks from `block` on.
  template <int H, int B>
  static void ScoreBlocks(const ScoresArgs<V>& a, int block) {
    const int dim = Dim(a.head_dim);
    const uint8_t* keys = a.page.keys + int64_t{block} * dim * kVectorBytes;
    const uint8_t* ahead = a.ahead + int64_t{block} * dim * kVectorBytes;
    V sum[H][B];
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) sum[h][b] = V::Zero();
    }
    for (int d = 0; d < dim; ++d) {
      V q[H];
      LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) q[h] = V::Set(a.q[h * a.q_stride + d]);
      LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) {
        if (d % (64 / kVectorBytes) == 0) V::Prefetch(ahead + (b * dim + d) * kVectorBytes);
        const V k = Element::Load(keys + (b * dim + d) * kVectorBytes);
        LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) sum[h][b] = V::Fma(q[h], k, sum[h][b]);
      }
    }
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) sum[h][b].Store(a.s + h * a.s_stride + (block + b) * 16);
    }
  }

  template <int H>
  static void Scores(const ScoresArgs<V>& a) {
    constexpr int kWidth = Width(H);
    const int blocks = (a.page.count + 15) / 16;
    int block = 0;
    for (; block + kWidth <= blocks; block += kWidth) ScoreBlocks<H, kWidth>(a, block);
    if constexpr (kWidth > 2) {
      if (block + 2 <= blocks) ScoreBlocks<H, 2>(a, block), block += 2;
    }
    if constexpr (kWidth > 1) {
      if (block < blocks) ScoreBlocks<H, 1>(a, block);
    }
  }

  // C vectors of head dimensions from `first` on; Half: one vector of which only 8 lanes exist.
  template <int H, int C, bool Half>
  static void AddDims(const ValuesArgs<V>& a, int first) {
    const int64_t row_bytes = int64_t{Element::kBytes} * Dim(a.head_dim);
    const uint8_t* values = a.page.values + first * Element::kBytes;
    const uint8_t* ahead = a.ahead + first * Element::kBytes;
    V sum[H][C];
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      LOUPE_ATTEND_UNROLL for (int c = 0; c < C; ++c) sum[h][c] = V::Load(a.o + h * a.o_stride + first + c * 16);
    }
    for (int e = a.begin; e < a.end; ++e) {
      V p[H];
      LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) p[h] = V::Set(a.p[h * a.p_stride + e]);
      LOUPE_ATTEND_UNROLL for (int c = 0; c < C; ++c) {
        if (c % (64 / kVectorBytes) == 0) V::Prefetch(ahead + e * row_bytes + c * kVectorBytes);
        const uint8_t* at = values + e * row_bytes + c * kVectorBytes;
        const V v = Half ? Element::LoadEight(at) : Element::Load(at);
        LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) sum[h][c] = V::Fma(p[h], v, sum[h][c]);
      }
    }
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      LOUPE_ATTEND_UNROLL for (int c = 0; c < C; ++c) sum[h][c].Store(a.o + h * a.o_stride + first + c * 16);
    }
  }

  template <int H>
  static void Values(const ValuesArgs<V>& a) {
    constexpr int kWidth = Width(H);
    const int dim = Dim(a.head_dim);
    int first = 0;
    for (; first + 16 * kWidth <= dim; first += 16 * kWidth) AddDims<H, kWidth, false>(a, first);
    if constexpr (kWidth > 2) {
      if (first + 32 <= dim) AddDims<H, 2, false>(a, first), first += 32;
    }
    if constexpr (kWidth > 1) {
      if (first + 16 <= dim) AddDims<H, 1, false>(a, first), first += 16;
    }
    if constexpr (D == 0) {
      if (first < dim) AddDims<H, 1, true>(a, first);
    }
  }
};

template <class V, int D>
using DensePage = PlainPage<V, D, HalfElement<V>>;
template <class V, int D>
using F32Page = PlainPage<V, D, FloatElement<V>>;

template <class V>
using ScoresFunction = void (*)(const ScoresArgs<V>&);
template <class V>
using ValuesFunction = void (*)(const ValuesArgs<V>&);

// A reader's products by number of queries, 1 to V::kMaxHeads.
template <class V, template <class, int> class Page, int D>
struct ReaderTable {
  static constexpr ScoresFunction<V> kScores[8] = {
      Page<V, D>::template Scores<1>, Page<V, D>::template Scores<2>,
      Page<V, D>::template Scores<3>, Page<V, D>::template Scores<4>,
      Page<V, D>::template Scores<(V::kMaxHeads > 4 ? 5 : 4)>, Page<V, D>::template Scores<(V::kMaxHeads > 4 ? 6 : 4)>,
      Page<V, D>::template Scores<(V::kMaxHeads > 4 ? 7 : 4)>, Page<V, D>::template Scores<(V::kMaxHeads > 4 ? 8 : 4)>};
  static constexpr ValuesFunction<V> kValues[8] = {
      Page<V, D>::template Values<1>, Page<V, D>::template Values<2>,
      Page<V, D>::template Values<3>, Page<V, D>::template Values<4>,
      Page<V, D>::template Values<(V::kMaxHeads > 4 ? 5 : 4)>, Page<V, D>::template Values<(V::kMaxHeads > 4 ? 6 : 4)>,
      Page<V, D>::template Values<(V::kMaxHeads > 4 ? 7 : 4)>, Page<V, D>::template Values<(V::kMaxHeads > 4 ? 8 : 4)>};
};

}  // namespace loupe::attend
