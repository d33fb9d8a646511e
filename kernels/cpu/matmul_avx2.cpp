// Matrix kernels for AVX2 with FMA and F16C: a strip's 16 lanes are two vectors of eight.
//
// Decode: activations are whole 16-bit integers here; codes are widened to 16 bits and VPMADDWD gives the same exact
// integer sums as the AVX-512 kernels. (VPMADDUBSW would saturate.) Prompt: the driver expands strips to f32 and the
// f32 kernel, which runs close to the peak of the units, multiplies them.
#include "kernels/cpu/matmul_kernels.h"
#include "kernels/cpu/unroll.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#include <string.h>

namespace loupe {
namespace {

constexpr int kQuantisedTile = 4;
constexpr int kFloatTile = 3;
constexpr int kAhead = 4096;

inline __attribute__((always_inline)) void Prefetch(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}
inline __attribute__((always_inline)) __m256i Load(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline __attribute__((always_inline)) __m256 LoadFloats(const uint8_t* p) {
  return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
}
inline __attribute__((always_inline)) __m256 LoadHalfs(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __attribute__((always_inline)) __m256i Broadcast(const void* p) {
  int word;
  memcpy(&word, p, sizeof(word));
  return _mm256_set1_epi32(word);
}

// Adds bias and residual to eight sums of row r and writes them. One order everywhere: sum + bias, then + add.
inline __attribute__((always_inline)) void Store(const StripCall& c, int r, int half, __m256 sum) {
  if (c.bias) sum = _mm256_add_ps(sum, _mm256_loadu_ps(c.bias + half * 8));
  if (c.add) sum = _mm256_add_ps(sum, _mm256_loadu_ps(c.add + r * c.add_stride + half * 8));
  _mm256_storeu_ps(c.out + r * c.out_stride + half * 8, sum);
}

// ---- activations

inline __attribute__((always_inline)) float Largest(__m256 v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline __attribute__((always_inline)) int32_t Total(__m256i v) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

// Columns 4j, 4j + 2 and 4j + 1, 4j + 3 become pairs, as a vector's even and odd bytes give them.
void QuantiseBlock(const float* x, ActivationBlock* out) {
  const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256 v[4];
  LOUPE_UNROLL for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(x + i * 8);
  const __m256 top = _mm256_max_ps(_mm256_max_ps(_mm256_and_ps(v[0], no_sign), _mm256_and_ps(v[1], no_sign)),
                                   _mm256_max_ps(_mm256_and_ps(v[2], no_sign), _mm256_and_ps(v[3], no_sign)));
  const float largest = Largest(top);
  // Below 1e-30 the reciprocal would overflow; such a block counts as zero.
  const __m256 inverse = _mm256_set1_ps(largest > 1e-30f ? kActivationMax / largest : 0.0f);
  __m256i total = _mm256_setzero_si256();
  LOUPE_UNROLL for (int i = 0; i < 4; ++i) {
    const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));  // two fours of columns
    total = _mm256_add_epi32(total, q);
    const __m256i order = _mm256_shuffle_epi32(q, 0xd8);  // 0 2 1 3 in each
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out->codes) + i, words);
  }
  out->total = Total(total);
  out->scale = largest / kActivationMax;
  out->sum = out->scale * static_cast<float>(out->total);
}

void QuantiseRow(const float* x, int64_t cols, ActivationBlock* out, int stride) {
  const int64_t blocks = cols / kQuantBlock;
  for (int64_t b = 0; b < blocks; ++b, x += kQuantBlock, out += stride) QuantiseBlock(x, out);
  if (blocks % 2) memset(out, 0, sizeof(*out));
}

// ---- quantised strips

// sum += four columns of eight rows times the rows' activations.
template <int R>
inline __attribute__((always_inline)) void MultiplyFour(__m256i codes, const ActivationBlock* a, int four,
                                                        __m256i (&sum)[R]) {
  const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(255));
  const __m256i odd = _mm256_srli_epi16(codes, 8);
  LOUPE_UNROLL for (int r = 0; r < R; ++r) {
    const int8_t* pairs = a[r].codes + four * 8;
    sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(even, Broadcast(pairs)));
    sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(odd, Broadcast(pairs + 4)));
  }
}

// acc += one half (eight rows) of a block of weights * blocks of R rows.
template <WeightType Type, int R>
inline __attribute__((always_inline)) void MultiplyHalf(const uint8_t* codes, const uint8_t* scales,
                                                        const ActivationBlock* a, __m256 (&acc)[R]) {
  constexpr int kZero = LayoutOf(Type).zero;
  __m256i sum[R];
  LOUPE_UNROLL for (int r = 0; r < R; ++r) sum[r] = _mm256_set1_epi32(-kZero * a[r].total);
  if constexpr (Type == WeightType::kQ8_0) {
    LOUPE_UNROLL for (int j = 0; j < 8; ++j) MultiplyFour<R>(Load(codes + j * 64), a, j, sum);
  } else {
    const __m256i nibble = _mm256_set1_epi8(15);
    LOUPE_UNROLL for (int j = 0; j < 4; ++j) {
      const __m256i v = Load(codes + j * 64);
      MultiplyFour<R>(_mm256_and_si256(v, nibble), a, j, sum);
      MultiplyFour<R>(_mm256_and_si256(_mm256_srli_epi16(v, 4), nibble), a, j + 4, sum);
    }
  }
  const __m256 scale = LoadHalfs(scales);
  LOUPE_UNROLL for (int r = 0; r < R; ++r) {
    acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), _mm256_mul_ps(scale, _mm256_set1_ps(a[r].scale)), acc[r]);
    if constexpr (Type == WeightType::kQ4_1)
      acc[r] = _mm256_fmadd_ps(LoadHalfs(scales + 32), _mm256_set1_ps(a[r].sum), acc[r]);
  }
}

template <WeightType Type, int R>
void QuantisedTile(const StripCall& call) {
  const ActivationBlock* a = static_cast<const ActivationBlock*>(call.rows);
  __m256 acc[2][R];
  LOUPE_UNROLL for (int r = 0; r < R; ++r) acc[0][r] = acc[1][r] = _mm256_setzero_ps();
  const int64_t blocks = call.cols / kQuantBlock;
  for (int64_t b = 0; b < blocks; ++b, a += R) {
    const BlockPlace place = PlaceOf(Type, b);
    const uint8_t* codes = call.strip + place.codes;
    const uint8_t* scales = call.strip + place.scales;
    for (int i = 0; i < (Type == WeightType::kQ8_0 ? 576 : 320); i += 64) Prefetch(codes + kAhead + i);
    MultiplyHalf<Type, R>(codes, scales, a, acc[0]);
    MultiplyHalf<Type, R>(codes + 32, scales + 16, a, acc[1]);
  }
  LOUPE_UNROLL for (int r = 0; r < R; ++r) {
    Store(call, r, 0, acc[0][r]);
    Store(call, r, 1, acc[1][r]);
  }
}

using Kernel = void (*)(const StripCall&);
template <WeightType Type>
inline void QuantisedTiles(const StripCall& call) {
  static constexpr Kernel kTiles[kQuantisedTile] = {QuantisedTile<Type, 1>, QuantisedTile<Type, 2>,
                                                    QuantisedTile<Type, 3>, QuantisedTile<Type, 4>};
  kTiles[call.num_rows - 1](call);
}

void Quantised(WeightType type, const StripCall& call) {
  if (type == WeightType::kQ4_1) return QuantisedTiles<WeightType::kQ4_1>(call);
  if (type == WeightType::kQ4_0) return QuantisedTiles<WeightType::kQ4_0>(call);
  QuantisedTiles<WeightType::kQ8_0>(call);
}

// ---- unquantised strips: f32 arithmetic

// Column 0 and 1 of a pair, eight rows of it. An F32 strip may end after column 0.
template <WeightType Type>
inline __attribute__((always_inline)) __m256 LoadEven(const uint8_t* w, int half) {
  if constexpr (Type == WeightType::kF32) return LoadFloats(w + half * 32);
  if constexpr (Type == WeightType::kF16) return LoadHalfs(w + half * 16);
  return _mm256_castsi256_ps(_mm256_slli_epi32(Load(w + half * 32), 16));
}
template <WeightType Type>
inline __attribute__((always_inline)) __m256 LoadOdd(const uint8_t* w, int half) {
  if constexpr (Type == WeightType::kF32) return LoadFloats(w + 64 + half * 32);
  if constexpr (Type == WeightType::kF16) return LoadHalfs(w + 32 + half * 16);
  return _mm256_castsi256_ps(_mm256_and_si256(Load(w + half * 32), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Two sums a row and half, of even and of odd columns, hide the latency of a multiplication at one row.
template <WeightType Type, int R>
void FloatTile(const StripCall& call) {
  constexpr int kPairBytes = Type == WeightType::kF32 ? 128 : 64;
  const float* x = static_cast<const float*>(call.rows);
  const uint8_t* w = call.strip;
  __m256 even[R][2], odd[R][2];
  LOUPE_UNROLL for (int r = 0; r < R; ++r) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = _mm256_setzero_ps();
  int64_t col = 0;
  for (; col + 2 <= call.cols; col += 2, w += kPairBytes) {
    for (int i = 0; i < kPairBytes; i += 64) Prefetch(w + kAhead + i);
    __m256 w0 = LoadEven<Type>(w, 0), w1 = LoadEven<Type>(w, 1);
    LOUPE_UNROLL for (int r = 0; r < R; ++r) {
      const __m256 value = _mm256_set1_ps(x[r * call.row_stride + col]);
      even[r][0] = _mm256_fmadd_ps(w0, value, even[r][0]);
      even[r][1] = _mm256_fmadd_ps(w1, value, even[r][1]);
    }
    w0 = LoadOdd<Type>(w, 0), w1 = LoadOdd<Type>(w, 1);
    LOUPE_UNROLL for (int r = 0; r < R; ++r) {
      const __m256 value = _mm256_set1_ps(x[r * call.row_stride + col + 1]);
      odd[r][0] = _mm256_fmadd_ps(w0, value, odd[r][0]);
      odd[r][1] = _mm256_fmadd_ps(w1, value, odd[r][1]);
    }
  }
  if (col < call.cols) {
    LOUPE_UNROLL for (int r = 0; r < R; ++r) {
      const __m256 value = _mm256_set1_ps(x[r * call.row_stride + col]);
      even[r][0] = _mm256_fmadd_ps(LoadEven<Type>(w, 0), value, even[r][0]);
      even[r][1] = _mm256_fmadd_ps(LoadEven<Type>(w, 1), value, even[r][1]);
    }
  }
  LOUPE_UNROLL for (int r = 0; r < R; ++r) {
    Store(call, r, 0, _mm256_add_ps(even[r][0], odd[r][0]));
    Store(call, r, 1, _mm256_add_ps(even[r][1], odd[r][1]));
  }
}

template <WeightType Type>
void FloatTiles(const StripCall& call) {
  static constexpr Kernel kTiles[kFloatTile] = {FloatTile<Type, 1>, FloatTile<Type, 2>, FloatTile<Type, 3>};
  kTiles[call.num_rows - 1](call);
}

// ---- expansion

void ExpandHalf(WeightType type, const uint8_t* codes, const uint8_t* scales, float* out) {
  const bool bytes = type == WeightType::kQ8_0;
  const __m256 scale = LoadHalfs(scales);
  const __m256 minimum = type == WeightType::kQ4_1 ? LoadHalfs(scales + 32) : _mm256_setzero_ps();
  const __m256i mask = _mm256_set1_epi32(bytes ? 255 : 15);
  const __m256i zero = _mm256_set1_epi32(LayoutOf(type).zero);
  for (int j = 0; j < 8; ++j) {
    const __m256i v = bytes ? Load(codes + j * 64) : _mm256_srli_epi32(Load(codes + j % 4 * 64), j / 4 * 4);
    for (int i = 0; i < 4; ++i, out += kStripRows) {
      const __m256i code = _mm256_sub_epi32(_mm256_and_si256(_mm256_srli_epi32(v, 8 * i), mask), zero);
      _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), scale, minimum));  // the product is exact in f32
    }
  }
}

void Expand(WeightType type, const uint8_t* strip, int64_t cols, float* out) {
  if (!IsQuantised(type)) {
    for (int64_t c = 0; c < cols; ++c) {
      for (int half = 0; half < 2; ++half) {
        __m256 value = LoadFloats(strip + (type == WeightType::kF32 ? c * 64 + half * 32 : 0));
        if (type == WeightType::kF16) value = LoadHalfs(strip + c * 32 + half * 16);
        if (type == WeightType::kBF16) {
          const uint8_t* pair = strip + c / 2 * 64;
          value = c % 2 ? LoadOdd<WeightType::kBF16>(pair, half) : LoadEven<WeightType::kBF16>(pair, half);
        }
        _mm256_storeu_ps(out + c * kStripRows + half * 8, value);
      }
    }
    return;
  }
  for (int64_t b = 0; b < cols / kQuantBlock; ++b, out += kQuantBlock * kStripRows) {
    const BlockPlace place = PlaceOf(type, b);
    ExpandHalf(type, strip + place.codes, strip + place.scales, out);
    ExpandHalf(type, strip + place.codes + 32, strip + place.scales + 16, out + 8);
  }
}

constexpr MatMulKernels Make() {
  MatMulKernels k;
  k.float_tile = kFloatTile;
  k.f32 = FloatTiles<WeightType::kF32>;
  k.f16 = FloatTiles<WeightType::kF16>;
  k.bf16 = FloatTiles<WeightType::kBF16>;
  k.expand = Expand;
  k.quantised_tile = kQuantisedTile;
  k.quantise = QuantiseRow;
  k.quantised = Quantised;
  k.expand_prompts = true;
  return k;
}

}  // namespace

constinit const MatMulKernels kAvx2MatMul = Make();

}  // namespace loupe
#else
namespace loupe {
constinit const MatMulKernels kAvx2MatMul = {};
}  // namespace loupe
#endif
