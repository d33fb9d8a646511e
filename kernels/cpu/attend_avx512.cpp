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
  static void Prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
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

const Kernels& Avx512Kernels() {
  static constexpr Kernels kKernels = MakeKernels<Vector>();
  return kKernels;
}

}  // namespace loupe::attend
