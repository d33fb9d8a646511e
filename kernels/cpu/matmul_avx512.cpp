// Matrix kernels for AVX-512 with VNNI and BF16. Lane = output: 16 rows of a strip are the 16 lanes of a vector.
//
// Decode: activations are 16-bit integers split into two signed bytes, so two VPDPBUSD chains give exact integer sums
// of 4- and 8-bit codes against them; the rounding is 3e-7 (mean KL) and costs nothing, since memory is the limit.
// Prompt: weights are expanded to bf16 once per panel and used by all rows with VDPBF16PS.
#include "kernels/cpu/matmul_kernels.h"
#include "kernels/cpu/unroll.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#include <string.h>

namespace loupe {
namespace {

constexpr int kQuantisedTile = 16;
constexpr int kFloatTile = 8;
constexpr int kAhead = 8192;  // bytes: past the 4 KiB at which the hardware's prefetcher stops

inline __attribute__((always_inline)) void Prefetch(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}
inline __attribute__((always_inline)) __m512i Load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline __attribute__((always_inline)) __m512 LoadHalfs(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __attribute__((always_inline)) __m512i Broadcast(const void* p) {
  int word;
  memcpy(&word, p, sizeof(word));
  return _mm512_set1_epi32(word);
}

// Adds bias and residual to the sums of row r and writes them. One order everywhere: sum + bias, then + add.
inline __attribute__((always_inline)) void Store(const StripCall& c, int r, __m512 sum) {
  if (c.bias) sum = _mm512_add_ps(sum, _mm512_loadu_ps(c.bias));
  if (c.add) sum = _mm512_add_ps(sum, _mm512_loadu_ps(c.add + r * c.add_stride));
  _mm512_storeu_ps(c.out + r * c.out_stride, sum);
}

// ---- activations

void QuantiseBlock(__m512 x0, __m512 x1, ActivationBlock* out) {
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
  // Below 1e-30 the reciprocal would overflow; such a block counts as zero.
  const float inverse = largest > 1e-30f ? kActivationMax / largest : 0.0f;
  const __m512i q0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, _mm512_set1_ps(inverse)));
  const __m512i q1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, _mm512_set1_ps(inverse)));
  const __m512i half = _mm512_set1_epi32(128);  // rounds the high byte, so that the low one lies in -128..127
  __m128i* codes = reinterpret_cast<__m128i*>(out->codes);
  _mm_storeu_si128(codes, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(q0, half), 8)));
  _mm_storeu_si128(codes + 1, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(q1, half), 8)));
  _mm_storeu_si128(codes + 2, _mm512_cvtepi32_epi8(q0));
  _mm_storeu_si128(codes + 3, _mm512_cvtepi32_epi8(q1));
  out->total = _mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1));
  out->scale = largest / kActivationMax;
  out->sum = out->scale * static_cast<float>(out->total);
}

void QuantiseRow(const float* x, int64_t cols, ActivationBlock* out, int stride) {
  const int64_t blocks = cols / kQuantBlock;
  for (int64_t b = 0; b < blocks; ++b, x += kQuantBlock, out += stride) {
    QuantiseBlock(_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), out);
  }
  if (blocks % 2) memset(out, 0, sizeof(*out));
}

// ---- quantised strips

// The 32 columns of a block as eight vectors of four columns each, and its scales.
template <WeightType Type>
inline __attribute__((always_inline)) void LoadCodes(const uint8_t* codes, __m512i (&c)[8]) {
  if constexpr (Type == WeightType::kQ8_0) {
    LOUPE_UNROLL for (int j = 0; j < 8; ++j) c[j] = Load(codes + j * 64);
  } else {
    const __m512i nibble = _mm512_set1_epi8(15);
    LOUPE_UNROLL for (int j = 0; j < 4; ++j) {
      const __m512i v = Load(codes + j * 64);
      c[j] = _mm512_and_si512(v, nibble);
      c[j + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
    }
  }
}

// acc += block of weights * blocks of R rows.
template <WeightType Type, int R>
inline __attribute__((always_inline)) void MultiplyBlock(const uint8_t* codes, const uint8_t* scales,
                                                         const ActivationBlock* a, __m512 (&acc)[R]) {
  constexpr int kZero = LayoutOf(Type).zero;
  __m512i c[8];
  LoadCodes<Type>(codes, c);
  const __m512 scale = LoadHalfs(scales);
  const __m512 minimum = Type == WeightType::kQ4_1 ? LoadHalfs(scales + 32) : _mm512_setzero_ps();
  LOUPE_UNROLL for (int r = 0; r < R; ++r) {
    __m512i high = _mm512_setzero_si512();
    __m512i low = kZero ? _mm512_set1_epi32(-kZero * a[r].total) : _mm512_setzero_si512();
    LOUPE_UNROLL for (int j = 0; j < 8; ++j) {
      high = _mm512_dpbusd_epi32(high, c[j], Broadcast(a[r].codes + 4 * j));
      low = _mm512_dpbusd_epi32(low, c[j], Broadcast(a[r].codes + 32 + 4 * j));
    }
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    acc[r] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, _mm512_set1_ps(a[r].scale)), acc[r]);
    if constexpr (Type == WeightType::kQ4_1) acc[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(a[r].sum), acc[r]);
  }
}

template <WeightType Type, int R>
void QuantisedTile(const StripCall& call) {
  constexpr StripLayout kLayout = LayoutOf(Type);
  const ActivationBlock* a = static_cast<const ActivationBlock*>(call.rows);
  const uint8_t* w = call.strip;
  const int64_t groups = (call.cols + kLayout.group_cols - 1) / kLayout.group_cols;
  __m512 acc[R];
  LOUPE_UNROLL for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, w += kLayout.group_bytes) {
    for (int i = 0; i < kLayout.group_bytes; i += 64) Prefetch(w + kAhead + i);
    if constexpr (kLayout.group_cols == 32) {
      MultiplyBlock<Type, R>(w, w + 256, a, acc);
      a += R;
    } else {
      constexpr int kCodes = (kLayout.group_bytes - 64) / 2;
      MultiplyBlock<Type, R>(w, w + 2 * kCodes, a, acc);
      MultiplyBlock<Type, R>(w + kCodes, w + 2 * kCodes + 32, a + R, acc);
      a += 2 * R;
    }
  }
  LOUPE_UNROLL for (int r = 0; r < R; ++r) Store(call, r, acc[r]);
}

using Kernel = void (*)(const StripCall&);
#define LOUPE_TILES(T) \
  T(1), T(2), T(3), T(4), T(5), T(6), T(7), T(8), T(9), T(10), T(11), T(12), T(13), T(14), T(15), T(16)
template <WeightType Type>
inline void QuantisedTiles(const StripCall& call) {
#define LOUPE_TILE(R) QuantisedTile<Type, R>
  static constexpr Kernel kTiles[kQuantisedTile] = {LOUPE_TILES(LOUPE_TILE)};
#undef LOUPE_TILE
  kTiles[call.num_rows - 1](call);
}
#undef LOUPE_TILES

void Quantised(WeightType type, const StripCall& call) {
  if (type == WeightType::kQ4_1) return QuantisedTiles<WeightType::kQ4_1>(call);
  if (type == WeightType::kQ4_0) return QuantisedTiles<WeightType::kQ4_0>(call);
  QuantisedTiles<WeightType::kQ8_0>(call);
}

// ---- unquantised strips: f32 arithmetic

// Columns c and c + 1 of a strip as f32.
template <WeightType Type>
inline __attribute__((always_inline)) void LoadPair(const uint8_t* w, __m512& even, __m512& odd) {
  if constexpr (Type == WeightType::kF32) {
    even = _mm512_loadu_ps(w), odd = _mm512_loadu_ps(w + 64);
  } else if constexpr (Type == WeightType::kF16) {
    even = LoadHalfs(w), odd = LoadHalfs(w + 32);
  } else {
    const __m512i both = Load(w);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
}

// Two sums a row, of even and of odd columns: enough to hide the latency of a multiplication at one row.
template <WeightType Type, int R>
void FloatTile(const StripCall& call) {
  constexpr int kPairBytes = Type == WeightType::kF32 ? 128 : 64;
  const float* x = static_cast<const float*>(call.rows);
  const uint8_t* w = call.strip;
  __m512 even[R], odd[R];
  LOUPE_UNROLL for (int r = 0; r < R; ++r) even[r] = odd[r] = _mm512_setzero_ps();
  int64_t col = 0;
  for (; col + 2 <= call.cols; col += 2, w += kPairBytes) {
    for (int i = 0; i < kPairBytes; i += 64) Prefetch(w + kAhead + i);
    __m512 w0, w1;
    LoadPair<Type>(w, w0, w1);
    LOUPE_UNROLL for (int r = 0; r < R; ++r) {
      const float* pair = x + r * call.row_stride + col;
      even[r] = _mm512_fmadd_ps(w0, _mm512_set1_ps(pair[0]), even[r]);
      odd[r] = _mm512_fmadd_ps(w1, _mm512_set1_ps(pair[1]), odd[r]);
    }
  }
  if (col < call.cols) {  // F32 strips end here; those of 16 bits have a column of zeros more
    const __m512 last = Type == WeightType::kF32   ? _mm512_loadu_ps(w)
                        : Type == WeightType::kF16 ? LoadHalfs(w)
                                                   : _mm512_castsi512_ps(_mm512_slli_epi32(Load(w), 16));
    LOUPE_UNROLL for (int r = 0; r < R; ++r) even[r] =
        _mm512_fmadd_ps(last, _mm512_set1_ps(x[r * call.row_stride + col]), even[r]);
  }
  LOUPE_UNROLL for (int r = 0; r < R; ++r) Store(call, r, _mm512_add_ps(even[r], odd[r]));
}

template <WeightType Type>
void FloatTiles(const StripCall& call) {
  static constexpr Kernel kTiles[kFloatTile] = {FloatTile<Type, 1>, FloatTile<Type, 2>, FloatTile<Type, 3>,
                                                FloatTile<Type, 4>, FloatTile<Type, 5>, FloatTile<Type, 6>,
                                                FloatTile<Type, 7>, FloatTile<Type, 8>};
  kTiles[call.num_rows - 1](call);
}

// ---- expansion

// The code of N bits at bit Low of each lane as the float 1 + code / 2^N: a rotation and one operation, no conversion.
template <int N, int Low>
inline __attribute__((always_inline)) __m512 OnePlusCode(__m512i v) {
  constexpr int kMask = ((1 << N) - 1) << (23 - N);
  const __m512i turned = _mm512_rol_epi32(v, (23 - N - Low + 32) % 32);
  const __m512i one = _mm512_set1_epi32(0x3f800000);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(turned, _mm512_set1_epi32(kMask), one, 0xea));  // (a & b) | c
}

// Calls put(first column, values of four columns) for the eight fours of a block. A value is code * scale + minimum,
// computed as (1 + code / 2^N) * 2^N scale + (minimum - 2^N scale): the product is exact in f32.
template <WeightType Type, class Put>
inline __attribute__((always_inline)) void ExpandBlock(const uint8_t* codes, const uint8_t* scales, const Put& put) {
  constexpr int kBits = Type == WeightType::kQ8_0 ? 8 : 4;
  const __m512 stored = LoadHalfs(scales);
  const __m512 scale = _mm512_mul_ps(stored, _mm512_set1_ps(1 << kBits));
  const __m512 minimum = Type == WeightType::kQ4_1 ? LoadHalfs(scales + 32)
                                                   : _mm512_mul_ps(stored, _mm512_set1_ps(-LayoutOf(Type).zero));
  const __m512 offset = _mm512_sub_ps(minimum, scale);
  const auto four = [&]<int Shift>(int first, __m512i v) {
    const __m512 value[4] = {_mm512_fmadd_ps(OnePlusCode<kBits, Shift>(v), scale, offset),
                             _mm512_fmadd_ps(OnePlusCode<kBits, Shift + 8>(v), scale, offset),
                             _mm512_fmadd_ps(OnePlusCode<kBits, Shift + 16>(v), scale, offset),
                             _mm512_fmadd_ps(OnePlusCode<kBits, Shift + 24>(v), scale, offset)};
    put(first, value);
  };
  for (int j = 0; j < (kBits == 8 ? 8 : 4); ++j) {
    const __m512i v = Load(codes + j * 64);
    four.template operator()<0>(j * 4, v);
    if constexpr (kBits == 4) four.template operator()<4>(16 + j * 4, v);
  }
}

template <WeightType Type>
void ExpandQuantised(const uint8_t* strip, int64_t cols, float* out) {
  for (int64_t b = 0; b < cols / kQuantBlock; ++b, out += kQuantBlock * kStripRows) {
    const BlockPlace place = PlaceOf(Type, b);
    ExpandBlock<Type>(strip + place.codes, strip + place.scales, [out](int first, const __m512(&value)[4]) {
      for (int i = 0; i < 4; ++i) _mm512_storeu_ps(out + (first + i) * kStripRows, value[i]);
    });
  }
}

void Expand(WeightType type, const uint8_t* strip, int64_t cols, float* out) {
  if (!IsQuantised(type)) {
    for (int64_t c = 0; c < cols; ++c) {
      const __m512 value =
          type == WeightType::kF32 ? _mm512_loadu_ps(strip + c * 64)
          : type == WeightType::kF16
              ? LoadHalfs(strip + c * 32)
              : _mm512_castsi512_ps(_mm512_sllv_epi32(
                    _mm512_srlv_epi32(Load(strip + c / 2 * 64), _mm512_set1_epi32(c % 2 * 16)), _mm512_set1_epi32(16)));
      _mm512_storeu_ps(out + c * kStripRows, value);
    }
    return;
  }
  if (type == WeightType::kQ4_1) return ExpandQuantised<WeightType::kQ4_1>(strip, cols, out);
  if (type == WeightType::kQ4_0) return ExpandQuantised<WeightType::kQ4_0>(strip, cols, out);
  ExpandQuantised<WeightType::kQ8_0>(strip, cols, out);
}

// ---- the prompt phase: bf16 panels

inline __attribute__((always_inline)) __m512i ToBf16(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

void RoundRow(const float* x, int64_t cols, uint16_t* out) {
  int64_t i = 0;
  for (; i + 32 <= cols; i += 32)
    _mm512_storeu_si512(out + i, ToBf16(_mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i + 16)));
  if (i == cols) return;
  const uint32_t mask = (1u << (cols - i)) - 1;
  const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x + i);
  const __m512 high =
      mask >> 16 ? _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + i + 16) : _mm512_setzero_ps();
  _mm512_storeu_si512(out + i, ToBf16(low, high));  // zeros up to a multiple of 32
}

// One order for pairs of columns: 16 evens and 16 odds become 16 pairs.
alignas(64) constexpr uint16_t kPairUp[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

template <WeightType Type>
void FillQuantised(const uint8_t* strip, int64_t begin, int64_t end, uint16_t* out) {
  const __m512i pair_up = _mm512_load_si512(kPairUp);
  for (int64_t b = begin / kQuantBlock; b < end / kQuantBlock; ++b) {
    const BlockPlace place = PlaceOf(Type, b);
    for (int i = 0; i < 576; i += 64) Prefetch(strip + place.codes + kAhead / 2 + i);
    ExpandBlock<Type>(strip + place.codes, strip + place.scales, [&](int first, const __m512(&value)[4]) {
      uint16_t* to = out + first / 2 * kPanelOutputs * 2;
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(pair_up, ToBf16(value[0], value[1])));
      _mm512_storeu_si512(to + kPanelOutputs * 2, _mm512_permutexvar_epi16(pair_up, ToBf16(value[2], value[3])));
    });
    out += kQuantBlock * kPanelOutputs;
  }
}

void FillPanel(WeightType type, const uint8_t* strip, int64_t begin, int64_t end, uint16_t* out) {
  if (type == WeightType::kQ4_1) return FillQuantised<WeightType::kQ4_1>(strip, begin, end, out);
  if (type == WeightType::kQ4_0) return FillQuantised<WeightType::kQ4_0>(strip, begin, end, out);
  if (type == WeightType::kQ8_0) return FillQuantised<WeightType::kQ8_0>(strip, begin, end, out);
  for (int64_t c = begin; c < end; c += 2, out += kPanelOutputs * 2) {  // BF16 strips hold pairs already
    _mm512_storeu_si512(out, Load(strip + c / 2 * 64));
  }
}

inline __attribute__((always_inline)) void StoreRow(const PanelStore& s, int r, const __m512 (&sum)[kPanelStrips]) {
  LOUPE_UNROLL for (int j = 0; j < kPanelStrips; ++j) {
    const int first = j * kStripRows, valid = s.num_outputs - first;
    if (valid <= 0) return;
    const __mmask16 mask = static_cast<__mmask16>(valid >= kStripRows ? 0xffff : (1 << valid) - 1);
    __m512 value = sum[j];
    if (s.bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, s.bias + first));
    if (s.add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, s.add + r * s.add_stride + first));
    _mm512_mask_storeu_ps(s.out + r * s.out_stride + first, mask, value);
  }
}

// 24 sums hide the latency of 6; a pair of columns loads 4 vectors and 6 broadcasts for 24 VDPBF16PS.
template <int kRows>
void PanelOf(const PanelCall& call) {
  __m512 sum[kRows][kPanelStrips];
  LOUPE_UNROLL for (int r = 0; r < kRows; ++r) {
    LOUPE_UNROLL for (int j = 0; j < kPanelStrips; ++j) {
      sum[r][j] = call.first ? _mm512_setzero_ps() : _mm512_loadu_ps(call.sums + r * kPanelOutputs + j * kStripRows);
    }
  }
  const uint16_t* w = call.panel;
  const uint16_t* a = call.rows;
  const int64_t stride = call.row_stride;
  for (int p = 0; p < call.pairs; ++p, w += kPanelOutputs * 2, a += 2) {
    __m512bh v[kPanelStrips];
    LOUPE_UNROLL for (int j = 0; j < kPanelStrips; ++j) v[j] = (__m512bh)_mm512_load_si512(w + j * 32);
    LOUPE_UNROLL for (int r = 0; r < kRows; ++r) {
      const __m512bh x = (__m512bh)Broadcast(a + r * stride);
      LOUPE_UNROLL for (int j = 0; j < kPanelStrips; ++j) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], x, v[j]);
    }
  }
  LOUPE_UNROLL for (int r = 0; r < kRows; ++r) {
    if (call.store != nullptr) {
      if (r < call.num_rows) StoreRow(*call.store, r, sum[r]);
      continue;
    }
    LOUPE_UNROLL for (int j = 0; j < kPanelStrips; ++j)
        _mm512_storeu_ps(call.sums + r * kPanelOutputs + j * kStripRows, sum[r][j]);
  }
}

// The last tile of a prompt is often not full: 128 rows leave 2 of 6.
void Panel(const PanelCall& call) {
  if (call.num_rows > 4) return PanelOf<kPanelRows>(call);
  return call.num_rows > 2 ? PanelOf<4>(call) : PanelOf<2>(call);
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
  k.panels = true;
  k.round_rows = RoundRow;
  k.fill_panel = FillPanel;
  k.panel = Panel;
  return k;
}

}  // namespace

constinit const MatMulKernels kAvx512MatMul = Make();

}  // namespace loupe
#else
namespace loupe {
constinit const MatMulKernels kAvx512MatMul = {};
}  // namespace loupe
#endif
