// Attention kernels for AVX-512 (F, BW, DQ, VL, BF16). Prompt rows have a fast path on bf16 dot products: queries, keys,
// values and the exponentials are rounded to bf16 (relative 2^-9 each), sums stay in f32. Compiled with flags of its
// own; nothing but the table leaves this file.
#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/attend_body.h"

namespace loupe::attend {
namespace {

struct Vector {
  static constexpr int kAccumulators = 24;
  static constexpr int kMaxHeads = 8;
  static constexpr int kPromptHeads = 6;
  __m512 v;

  static Vector Set(float x) { return {_mm512_set1_ps(x)}; }
  static Vector Zero() { return {_mm512_setzero_ps()}; }
  static Vector Load(const float* p) { return {_mm512_loadu_ps(p)}; }
  void Store(float* p) const { _mm512_storeu_ps(p, v); }
  static Vector LoadEight(const float* p) { return {_mm512_zextps256_ps512(_mm256_loadu_ps(p))}; }
  void StoreEight(float* p) const { _mm256_storeu_ps(p, _mm512_castps512_ps256(v)); }
  static Vector LoadHalfs(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Vector LoadEightHalfs(const uint8_t* p) {
    return {_mm512_zextps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  static void StoreEightHalfs(const float* x, uint16_t* y) {
    // The operand that may be NaN stands second: minimum and maximum return that one, so NaN stays NaN.
    __m256 h = _mm256_min_ps(_mm256_set1_ps(65504.f), _mm256_loadu_ps(x));
    h = _mm256_max_ps(_mm256_set1_ps(-65504.f), h);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm256_cvtps_ph(h, _MM_FROUND_TO_NEAREST_INT));
  }
  // Numbers behind fields of 16 words (attend_coded.h).
  static __m512i Field(const uint8_t* words, int shift) {
    return _mm512_srli_epi32(_mm512_loadu_si512(words), static_cast<unsigned>(shift));
  }
  template <int kBits>
  static Vector LookUp(const uint8_t* words, int shift, const float* table) {  // a permutation looks at four bits alone
    const __m512i field = kBits == 4 ? Field(words, shift) : _mm512_and_si512(Field(words, shift), _mm512_set1_epi32((1 << kBits) - 1));
    return {_mm512_permutexvar_ps(field, _mm512_load_ps(table))};
  }
  static Vector LookUpSigned(const uint8_t* words, int shift, const uint8_t* signs, int sign_shift, const float* table) {
    const __m512i low = _mm512_and_si512(Field(words, shift), _mm512_set1_epi32(3));
    const __m512i sign = _mm512_and_si512(Field(signs, sign_shift), _mm512_set1_epi32(1));
    return {_mm512_permutexvar_ps(_mm512_or_si512(low, _mm512_slli_epi32(sign, 2)), _mm512_load_ps(table))};
  }
  static Vector BytesLess128(const uint8_t* words, int shift) {
    const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(words), _mm512_set1_epi8(-128));
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, static_cast<unsigned>(24 - shift)), 24))};
  }
  static void Prepare(float* turned, int dim);
  static void PrefetchNear(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static void Prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
  static Vector Add(Vector x, Vector y) { return {_mm512_add_ps(x.v, y.v)}; }
  static Vector Sub(Vector x, Vector y) { return {_mm512_sub_ps(x.v, y.v)}; }
  static Vector Mul(Vector x, Vector y) { return {_mm512_mul_ps(x.v, y.v)}; }
  static Vector Fma(Vector x, Vector y, Vector z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
  static Vector Max(Vector x, Vector y) { return {_mm512_max_ps(x.v, y.v)}; }
  static Vector Round(Vector x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static Vector ScaleByPower(Vector p, Vector r, Vector x) {
    const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);
    return {_mm512_maskz_scalef_ps(keep, p.v, r.v)};
  }
  static Vector KeepRange(Vector x, int begin, int end) {
    const uint32_t below = begin <= 0 ? 0 : begin >= 16 ? 0xffffu : (1u << begin) - 1;
    const uint32_t upto = end <= 0 ? 0 : end >= 16 ? 0xffffu : (1u << end) - 1;
    return {_mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), static_cast<__mmask16>(upto & ~below), x.v)};
  }
  float ReduceMax() const { return _mm512_reduce_max_ps(v); }
  float ReduceAdd() const { return _mm512_reduce_add_ps(v); }
  float First() const { return _mm512_cvtss_f32(v); }
};

}  // namespace

#include "kernels/cpu/attend_coded_vnni.inc"

namespace {

void Vector::Prepare(float* turned, int dim) {
  const QueryBytes bytes(turned, dim);
  *bytes.scale = SplitBytes(turned, dim / 16, bytes.high, bytes.low, bytes.sums);
}

// ---- prompt rows on bf16 dot products
//
// A page is converted once a tile, into pairs along the reduced dimension: keys [D / 2][64][2], values [32][D][2]. A tile
// of 96 queries reads it from L1 sixteen times in groups of 6 queries, with all sums of a group in registers.

__m512i Broadcast(const uint16_t* pair) {
  int32_t bits;
  __builtin_memcpy(&bits, pair, sizeof bits);
  return _mm512_set1_epi32(bits);
}

// c[H][N] += a[H][2 * pairs] times b[pairs][16 * N][2]; strides in elements.
template <int H, int N>
[[gnu::always_inline]] inline void DotTile(const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_stride,
                                           int pairs, __m512 (&c)[H][N]) {
  for (int p = 0; p < pairs; ++p) {
    __m512i columns[N];
    LOUPE_ATTEND_UNROLL for (int j = 0; j < N; ++j) columns[j] = _mm512_loadu_si512(b + p * b_stride + j * 32);
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      const __m512i x = Broadcast(a + h * a_stride + p * 2);
      LOUPE_ATTEND_UNROLL for (int j = 0; j < N; ++j) {
        c[h][j] = _mm512_dpbf16_ps(c[h][j], (__m512bh)x, (__m512bh)columns[j]);
      }
    }
  }
}

// Two rows of 16 numbers to 16 pairs.
void StorePairs(Vector first, Vector second, uint16_t* out) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), rounded));
}

// Keys of dense or f32 pages, entries that do not exist as whatever the page holds there (their scores are masked) or zero.
template <class Element>
void ConvertKeys(const PageView& page, int dim, uint16_t* out) {
  for (int b = 0; b < 4; ++b) {
    const bool exists = b * 16 < page.count;
    const uint8_t* block = page.keys + int64_t{b} * dim * 16 * Element::kBytes;
    for (int d = 0; d < dim; d += 2) {
      const Vector first = exists ? Element::Load(block + d * 16 * Element::kBytes) : Vector::Zero();
      const Vector second = exists ? Element::Load(block + (d + 1) * 16 * Element::kBytes) : Vector::Zero();
      StorePairs(first, second, out + d * 64 + b * 32);
    }
  }
}

template <class Element>
void ConvertValues(const PageView& page, int dim, uint16_t* out) {
  const int padded = PaddedDim(dim);
  for (int e = 0; e < page.count; e += 2) {
    for (int d = 0; d < padded; d += 16) {
      const auto load = [&](int entry) {
        const uint8_t* at = page.values + (int64_t{entry} * dim + d) * Element::kBytes;
        return entry >= page.count ? Vector::Zero() : d + 16 <= dim ? Element::Load(at) : Element::LoadEight(at);
      };
      StorePairs(load(e), load(e + 1), out + int64_t{e} * padded + d * 2);
    }
  }
}

// Coded pages stay turned.
template <Codec kCodec>
void ConvertCodedKeys(const PageView& page, int dim, uint16_t* out) {
  using C = Codes<Vector, kCodec>;
  const int64_t block_bytes = PlaneBytes(kCodec, dim) * 16;
  for (int b = 0; b * 16 < page.count; ++b) {
    const uint8_t* block = page.keys + b * block_bytes;
    const Vector scale = Vector::LoadHalfs(reinterpret_cast<const uint8_t*>(page.key_scales + b * 16));
    for (int i = 0; i < dim / (4 * C::kFields); ++i) {
      LOUPE_ATTEND_UNROLL for (int f = 0; f < C::kFields; ++f) {
        const int d = i * 4 * C::kFields + f * 4;
        LOUPE_ATTEND_UNROLL for (int j = 0; j < 4; j += 2) {
          const uint8_t* signs = block + 4 * dim + d / 32 * 64;
          const Vector first = Vector::Mul(C::Load(block + i * 64, j, f, signs, i % 2 * 4 + f), scale);
          const Vector second = Vector::Mul(C::Load(block + i * 64, j + 1, f, signs, i % 2 * 4 + f), scale);
          StorePairs(first, second, out + (d + j) * 64 + b * 32);
        }
      }
    }
  }
  for (int b = (page.count + 15) / 16; b < 4; ++b) {
    for (int d = 0; d < dim; d += 2) StorePairs(Vector::Zero(), Vector::Zero(), out + d * 64 + b * 32);
  }
}

template <Codec kCodec>
void ConvertCodedValues(const PageView& page, int dim, uint16_t* out) {
  using C = Codes<Vector, kCodec>;
  alignas(64) float scales[64];
  for (int b = 0; b * 16 < page.count; ++b) {
    Vector::LoadHalfs(reinterpret_cast<const uint8_t*>(page.value_scales + b * 16)).Store(scales + b * 16);
  }
  if (page.count % 2 != 0) scales[page.count] = 0;  // the last one's partner does not exist
  for (int e = 0; e < page.count; e += 2) {
    const int quad = e / 4, plane = static_cast<int>(quad / 4 * PlaneBytes(kCodec, dim) * 16);
    const uint8_t* words = page.values + plane + quad % 4 * (4 * dim / C::kFields);
    const uint8_t* signs = page.values + plane + 4 * dim + quad % 4 / 2 * dim;
    const Vector scale = Vector::Set(scales[e]), next_scale = Vector::Set(scales[e + 1]);
    const auto load = [&](int row, int f, int j) { return C::Load(words + row * 64, j, f, signs + row * 64, quad % 2 * 4 + f); };
    for (int row = 0; row < dim / (16 * C::kFields); ++row) {
      LOUPE_ATTEND_UNROLL for (int f = 0; f < C::kFields; ++f) {
        const Vector first = Vector::Mul(load(row, f, e % 4), scale);
        const Vector second = Vector::Mul(load(row, f, e % 4 + 1), next_scale);
        StorePairs(first, second, out + int64_t{e} * dim + (row * C::kFields + f) * 32);
      }
    }
  }
}

// The codec switch of the bf16 path, as FindScores and FindValues are that of f32.
void ConvertPage(const PageView& page, int dim, uint16_t* keys, uint16_t* values) {
  switch (static_cast<Codec>(page.key_codec)) {
    case Codec::kS8: ConvertCodedKeys<Codec::kS8>(page, dim, keys); break;
    case Codec::kS4: ConvertCodedKeys<Codec::kS4>(page, dim, keys); break;
    case Codec::kS3: ConvertCodedKeys<Codec::kS3>(page, dim, keys); break;
    case Codec::kS2: ConvertCodedKeys<Codec::kS2>(page, dim, keys); break;
    case Codec::kF32: ConvertKeys<FloatElement<Vector>>(page, dim, keys); break;
    default: ConvertKeys<HalfElement<Vector>>(page, dim, keys);
  }
  switch (static_cast<Codec>(page.value_codec)) {
    case Codec::kS8: ConvertCodedValues<Codec::kS8>(page, dim, values); break;
    case Codec::kS4: ConvertCodedValues<Codec::kS4>(page, dim, values); break;
    case Codec::kS3: ConvertCodedValues<Codec::kS3>(page, dim, values); break;
    case Codec::kS2: ConvertCodedValues<Codec::kS2>(page, dim, values); break;
    case Codec::kF32: ConvertValues<FloatElement<Vector>>(page, dim, values); break;
    default: ConvertValues<HalfElement<Vector>>(page, dim, values);
  }
}

struct Bf16Page {
  PageView view;
  const uint16_t *keys, *values;
};

// N vectors of scores.
template <int H, int N>
void Bf16Scores(const PromptState<Vector>& w, const uint16_t* q, const uint16_t* keys, float* s) {
  __m512 c[H][N];
  LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
    LOUPE_ATTEND_UNROLL for (int j = 0; j < N; ++j) c[h][j] = _mm512_setzero_ps();
  }
  DotTile<H, N>(q, w.dim, keys, 128, w.dim / 2, c);
  LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
    LOUPE_ATTEND_UNROLL for (int j = 0; j < N; ++j) _mm512_store_ps(s + h * 64 + j * 16, c[h][j]);
  }
}

// N vectors of head dimensions from `first` on, over entries [begin, begin + 2 * pairs).
template <int H, int N>
void Bf16Values(const PromptState<Vector>& w, const uint16_t* p, const uint16_t* values, int pairs, float* o) {
  __m512 c[H][N];
  LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
    LOUPE_ATTEND_UNROLL for (int j = 0; j < N; ++j) c[h][j] = _mm512_loadu_ps(o + h * w.padded + j * 16);
  }
  DotTile<H, N>(p, 64, values, 2 * w.padded, pairs, c);
  LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
    LOUPE_ATTEND_UNROLL for (int j = 0; j < N; ++j) _mm512_storeu_ps(o + h * w.padded + j * 16, c[h][j]);
  }
}

// H queries from `query` on against a page.
template <int H>
void Bf16Group(const PromptState<Vector>& w, const Bf16Page& source, int query) {
  alignas(64) float s[H * 64];
  alignas(64) uint16_t p[H * 64];
  PageView page = source.view;
  const Bounds<Vector> any = BoundsOfGroup<Vector>(w, page, query, H);
  page.count = any.end;
  const uint16_t* q = reinterpret_cast<const uint16_t*>(HasCodedKeys(page) ? w.turned : w.q) + int64_t{query} * w.dim;
  if (page.count > 32) Bf16Scores<H, 4>(w, q, source.keys, s);
  else Bf16Scores<H, 2>(w, q, source.keys, s);
  for (int h = 0; h < H; ++h) {
    SoftmaxOfPage<Vector>(w, page, query + h, s + h * 64);
    LOUPE_ATTEND_UNROLL for (int b = 0; b < 4; b += 2) {
      const Vector low = Vector::Load(s + h * 64 + b * 16), high = Vector::Load(s + h * 64 + b * 16 + 16);
      _mm512_store_si512(p + h * 64 + b * 16, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
    }
  }
  const int begin = any.begin / 2 * 2, pairs = (any.end - begin + 1) / 2;
  const uint16_t* values = source.values + int64_t{begin} * w.padded;
  float* o = w.OutputOf(page, query);
  int d = 0;
  for (; d + 64 <= w.padded; d += 64) Bf16Values<H, 4>(w, p + begin, values + d * 2, pairs, o + d);
  for (; d < w.padded; d += 16) Bf16Values<H, 1>(w, p + begin, values + d * 2, pairs, o + d);
}

void RoundToBf16(const float* x, int n, float scale, uint16_t* out) {
  for (int i = 0; i < n; i += 8) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(Vector::Mul(Vector::LoadEight(x + i), Vector::Set(scale)).v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_castsi256_si128(rounded));
  }
}

void Bf16Queries(const PromptTile& t, const PromptState<Vector>& w) {
  const int heads = t.group.heads, width = heads * w.dim;
  for (int row = 0; row < t.rows; ++row) {
    const float* q = t.group.q + row * t.q_stride;
    RoundToBf16(q, width, t.group.scale_log2e, reinterpret_cast<uint16_t*>(w.q) + int64_t{row} * width);
    if (!t.coded) continue;
    alignas(64) float scaled[kMaxGroup * kMaxHeadDim], turned[kMaxGroup * TurnedFloats(kMaxHeadDim)];
    ScaleQueries<Vector>(q, width, t.group.scale_log2e, scaled);
    TurnScaled<Vector>(scaled, heads, w.dim, t.mean, turned, w.shift + row * heads);
    for (int h = 0; h < heads; ++h) {
      auto* rounded = reinterpret_cast<uint16_t*>(w.turned) + (int64_t{row} * heads + h) * w.dim;
      RoundToBf16(turned + h * TurnedFloats(w.dim), w.dim, 1, rounded);
    }
  }
}

void Bf16PromptTile(const PromptTile& t) {
  using GroupFunction = void (*)(const PromptState<Vector>&, const Bf16Page&, int);
  static constexpr GroupFunction kGroups[] = {Bf16Group<1>, Bf16Group<2>, Bf16Group<3>,
                                              Bf16Group<4>, Bf16Group<5>, Bf16Group<6>};
  const PromptState<Vector> w(t);
  Bf16Queries(t, w);
  auto* keys = reinterpret_cast<uint16_t*>(w.rest());
  uint16_t* values = keys + 64 * w.padded;
  for (int i = 0; i < t.num_pages; ++i) {
    const Bf16Page page{t.pages[i], keys, values};
    ConvertPage(page.view, w.dim, keys, values);
    for (int query = 0, n; (n = NextQueries<Vector>(w, page.view, 6, &query)) > 0; query += n) {
      kGroups[n - 1](w, page, query);
    }
  }
  FinishPrompt<Vector>(t, w);
}

constexpr Kernels MakeAvx512Kernels() {
  Kernels kernels = MakeKernels<Vector>();
  kernels.prompt_tile_fast = Bf16PromptTile;
  return kernels;
}

}  // namespace

const Kernels& Avx512Kernels() {
  static constexpr Kernels kKernels = MakeAvx512Kernels();
  return kKernels;
}

}  // namespace loupe::attend
