// Attention kernels for AVX2, FMA and F16C: 16 lanes as two registers. Compiled with these flags of its own; nothing but
// the table leaves this file.
#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/attend_body.h"

namespace loupe::attend {
namespace {

struct Vector {
  static constexpr int kAccumulators = 6;
  static constexpr int kMaxHeads = 4;
  static constexpr int kPromptHeads = 4;
  __m256 a, b;

  static Vector Set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vector Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vector Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  void Store(float* p) const { _mm256_storeu_ps(p, a), _mm256_storeu_ps(p + 8, b); }
  static Vector LoadEight(const float* p) { return {_mm256_loadu_ps(p), _mm256_setzero_ps()}; }
  void StoreEight(float* p) const { _mm256_storeu_ps(p, a); }
  static __m256 Halfs(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Vector LoadHalfs(const uint8_t* p) { return {Halfs(p), Halfs(p + 16)}; }
  static Vector LoadEightHalfs(const uint8_t* p) { return {Halfs(p), _mm256_setzero_ps()}; }
  static void StoreEightHalfs(const float* x, uint16_t* y) {
    // The operand that may be NaN stands second: minimum and maximum return that one, so NaN stays NaN.
    __m256 v = _mm256_min_ps(_mm256_set1_ps(65504.f), _mm256_loadu_ps(x));
    v = _mm256_max_ps(_mm256_set1_ps(-65504.f), v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  // Numbers behind fields of 16 words (attend_coded.h).
  static __m256i Words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  // The entry of the table of 16 that the low four bits say: a permutation looks at three, the fourth chooses.
  static __m256 LookUpHalf(__m256i field, const float* table) {
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), field);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), field);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(field, 28)));
  }
  template <int kBits>
  static Vector LookUp(const uint8_t* words, int shift, const float* table) {
    const __m256i x = _mm256_srli_epi32(Words(words), shift), y = _mm256_srli_epi32(Words(words + 32), shift);
    if constexpr (kBits == 4) return {LookUpHalf(x, table), LookUpHalf(y, table)};
    const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1);
    const __m256 levels = _mm256_load_ps(table);
    return {_mm256_permutevar8x32_ps(levels, _mm256_and_si256(x, mask)), _mm256_permutevar8x32_ps(levels, _mm256_and_si256(y, mask))};
  }
  static __m256 SignedHalf(__m256i words, int shift, __m256i signs, int sign_shift, const float* table) {
    const __m256i low = _mm256_and_si256(_mm256_srli_epi32(words, shift), _mm256_set1_epi32(3));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(signs, sign_shift), _mm256_set1_epi32(1));
    return _mm256_permutevar8x32_ps(_mm256_load_ps(table), _mm256_or_si256(low, _mm256_slli_epi32(sign, 2)));
  }
  static Vector LookUpSigned(const uint8_t* words, int shift, const uint8_t* signs, int sign_shift, const float* table) {
    return {SignedHalf(Words(words), shift, Words(signs), sign_shift, table),
            SignedHalf(Words(words + 32), shift, Words(signs + 32), sign_shift, table)};
  }
  static __m256 BytesHalf(__m256i words, int shift) {
    const __m256i moved = _mm256_slli_epi32(_mm256_xor_si256(words, _mm256_set1_epi8(-128)), 24 - shift);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(moved, 24));
  }
  static Vector BytesLess128(const uint8_t* words, int shift) {
    return {BytesHalf(Words(words), shift), BytesHalf(Words(words + 32), shift)};
  }
  static void Prepare(float*, int) {}
  static void PrefetchNear(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static void Prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
  static Vector Add(Vector x, Vector y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static Vector Sub(Vector x, Vector y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static Vector Mul(Vector x, Vector y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static Vector Fma(Vector x, Vector y, Vector z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  static Vector Max(Vector x, Vector y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static Vector Round(Vector x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
  }
  static __m256 ScaleHalf(__m256 p, __m256 r, __m256 x) {
    const __m256i exponent = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_max_ps(r, _mm256_set1_ps(-127.f))), _mm256_set1_epi32(127)), 23);
    const __m256 low = _mm256_cmp_ps(x, _mm256_set1_ps(-126.f), _CMP_LT_OQ);
    return _mm256_andnot_ps(low, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)));
  }
  static Vector ScaleByPower(Vector p, Vector r, Vector x) { return {ScaleHalf(p.a, r.a, x.a), ScaleHalf(p.b, r.b, x.b)}; }
  static __m256 KeepHalf(__m256 x, int begin, int end) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane),
                                        _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(end - 1)));
    return _mm256_blendv_ps(x, _mm256_set1_ps(kMinusInfinity), _mm256_castsi256_ps(out));
  }
  static Vector KeepRange(Vector x, int begin, int end) {
    return {KeepHalf(x.a, begin, end), KeepHalf(x.b, begin - 8, end - 8)};
  }
  float ReduceMax() const {
    const __m256 x = _mm256_max_ps(a, b);
    const __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 z = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
  }
  float ReduceAdd() const {
    const __m256 x = _mm256_add_ps(a, b);
    const __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 z = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
  }
  float First() const { return _mm256_cvtss_f32(a); }
};

}  // namespace

const Kernels& Avx2Kernels() {
  static constexpr Kernels kKernels = MakeKernels<Vector>();
  return kKernels;
}

}  // namespace loupe::attend
