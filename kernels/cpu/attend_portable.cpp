// Attention kernels for any CPU: 16 lanes as four vectors of four, which the compiler maps to whatever the machine has
// (SSE2, NEON). Also the yardstick that the other instruction sets are tested beside.
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend_body.h"

namespace loupe::attend {
namespace {

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInt __attribute__((vector_size(16)));
typedef uint32_t QuadBits __attribute__((vector_size(16)));
typedef uint16_t QuadHalf __attribute__((vector_size(8)));

// IEEE half to float: the exponent is moved by multiplying with 2^112, which is right for denormals too.
Quad HalfToFloat(QuadHalf h) {
  const QuadBits bits = __builtin_convertvector(h, QuadBits);
  const QuadBits magnitude = (bits & 0x7fff) << 13;
  const Quad scaled = reinterpret_cast<Quad>(magnitude) * 0x1p112f;
  const QuadBits special = reinterpret_cast<QuadBits>(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
  return reinterpret_cast<Quad>(reinterpret_cast<QuadBits>(scaled) | special | ((bits & 0x8000) << 16));
}

// Round to nearest even, saturating at the largest finite half. NaN stays NaN.
uint16_t FloatToHalf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477fe000) return static_cast<uint16_t>(sign | 0x7bff);  // 65504
  if (bits < 0x38800000) {  // below 2^-14: adding .5 leaves the denormal's bits at the end of the mantissa
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1) - (112u << 23);
  return static_cast<uint16_t>(sign | bits >> 13);
}

struct Vector {
  static constexpr int kAccumulators = 4;
  static constexpr int kMaxHeads = 4;
  static constexpr int kPromptHeads = 4;
  Quad q[4];

  static Vector Set(float x) {
    Vector v;
    for (Quad& part : v.q) part = Quad{x, x, x, x};
    return v;
  }
  static Vector Zero() { return Set(0); }
  static Vector Load(const float* p) {
    Vector v;
    std::memcpy(v.q, p, sizeof v.q);
    return v;
  }
  void Store(float* p) const { std::memcpy(p, q, sizeof q); }
  static Vector LoadEight(const float* p) {
    Vector v = Zero();
    std::memcpy(v.q, p, 32);
    return v;
  }
  void StoreEight(float* p) const { std::memcpy(p, q, 32); }
  static Vector LoadHalfs(const uint8_t* p) {
    QuadHalf h[4];
    std::memcpy(h, p, 32);
    return {{HalfToFloat(h[0]), HalfToFloat(h[1]), HalfToFloat(h[2]), HalfToFloat(h[3])}};
  }
  static Vector LoadEightHalfs(const uint8_t* p) {
    QuadHalf h[2];
    std::memcpy(h, p, 16);
    return {{HalfToFloat(h[0]), HalfToFloat(h[1]), Quad{}, Quad{}}};
  }
  static void StoreEightHalfs(const float* x, uint16_t* y) {
    for (int i = 0; i < 8; ++i) y[i] = FloatToHalf(x[i]);
  }
  // Numbers behind fields of 16 words (attend_coded.h).
  static uint32_t Word(const uint8_t* words, int i) {
    uint32_t word;
    std::memcpy(&word, words + 4 * i, 4);
    return word;
  }
  template <int kBits>
  static Vector LookUp(const uint8_t* words, int shift, const float* table) {
    Vector v;
    for (int i = 0; i < 16; ++i) v.q[i / 4][i % 4] = table[Word(words, i) >> shift & ((1u << kBits) - 1)];
    return v;
  }
  static Vector LookUpSigned(const uint8_t* words, int shift, const uint8_t* signs, int sign_shift, const float* table) {
    Vector v;
    for (int i = 0; i < 16; ++i) v.q[i / 4][i % 4] = table[(Word(words, i) >> shift & 3) | (Word(signs, i) >> sign_shift & 1) << 2];
    return v;
  }
  static Vector BytesLess128(const uint8_t* words, int shift) {
    Vector v;
    for (int i = 0; i < 16; ++i) v.q[i / 4][i % 4] = static_cast<float>(static_cast<int32_t>(Word(words, i) >> shift & 255) - 128);
    return v;
  }
  static void Prepare(float*, int) {}
  static void PrefetchNear(const void* p) { __builtin_prefetch(p, 0, 3); }
  static void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
  static Vector Add(Vector a, const Vector& b) {
    for (int i = 0; i < 4; ++i) a.q[i] += b.q[i];
    return a;
  }
  static Vector Sub(Vector a, const Vector& b) {
    for (int i = 0; i < 4; ++i) a.q[i] -= b.q[i];
    return a;
  }
  static Vector Mul(Vector a, const Vector& b) {
    for (int i = 0; i < 4; ++i) a.q[i] *= b.q[i];
    return a;
  }
  static Vector Fma(const Vector& a, const Vector& b, Vector c) {
#if defined(__FP_FAST_FMAF)
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) c.q[i][j] = __builtin_fmaf(a.q[i][j], b.q[i][j], c.q[i][j]);
    }
#else
    for (int i = 0; i < 4; ++i) c.q[i] += a.q[i] * b.q[i];
#endif
    return c;
  }
  static Vector Max(const Vector& a, const Vector& b) {
    Vector v;
    for (int i = 0; i < 4; ++i) v.q[i] = a.q[i] > b.q[i] ? a.q[i] : b.q[i];
    return v;
  }
  // To the nearest integer, for |x| < 2^22. Larger ones, infinite or not, stay far from where the result matters.
  static Vector Round(const Vector& x) {
    Vector v;
    for (int i = 0; i < 4; ++i) v.q[i] = (x.q[i] + 0x1.8p23f) - 0x1.8p23f;
    return v;
  }
  // p * 2^r for r in [-126, 127]; 0 where x is below -126.
  static Vector ScaleByPower(const Vector& p, const Vector& r, const Vector& x) {
    Vector v;
    for (int i = 0; i < 4; ++i) {
      const Quad clamped = r.q[i] > -127.f ? r.q[i] : Quad{-127, -127, -127, -127};
      const QuadInt exponent = (__builtin_convertvector(clamped, QuadInt) + 127) << 23;
      const Quad scaled = p.q[i] * reinterpret_cast<Quad>(exponent);
      v.q[i] = x.q[i] < -126.f ? Quad{} : scaled;
    }
    return v;
  }
  // Lanes in [begin, end), -inf elsewhere.
  static Vector KeepRange(Vector x, int begin, int end) {
    for (int i = 0; i < 16; ++i) {
      if (i < begin || i >= end) x.q[i / 4][i % 4] = kMinusInfinity;
    }
    return x;
  }
  float ReduceMax() const {
    const Quad a = q[0] > q[1] ? q[0] : q[1], b = q[2] > q[3] ? q[2] : q[3], c = a > b ? a : b;
    const float x = c[0] > c[1] ? c[0] : c[1], y = c[2] > c[3] ? c[2] : c[3];
    return x > y ? x : y;
  }
  float ReduceAdd() const {
    const Quad a = (q[0] + q[1]) + (q[2] + q[3]);
    return (a[0] + a[1]) + (a[2] + a[3]);
  }
  float First() const { return q[0][0]; }
};

}  // namespace

const Kernels& PortableKernels() {
  static constexpr Kernels kKernels = MakeKernels<Vector>();
  return kKernels;
}

}  // namespace loupe::attend
