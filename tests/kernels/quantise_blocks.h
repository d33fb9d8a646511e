// Makes matrices of every element type of a model file out of f32 values, in GGUF's block layouts. For tests only:
// plain round to nearest, no search for better scales.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/ops.h"

namespace loupe::testing {

// Round to nearest even, subnormals included; values beyond the range become infinite.
inline uint16_t ToHalf(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 65520) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < std::ldexp(1, -14))
    return static_cast<uint16_t>(sign | static_cast<int>(std::nearbyint(std::ldexp(magnitude, 24))));
  int exponent = 0;
  const double fraction = std::frexp(magnitude, &exponent);  // [.5, 1)
  const int mantissa =
      static_cast<int>(std::nearbyint(std::ldexp(fraction, 11)));  // 1024..2048, a carry is right as it is
  return static_cast<uint16_t>(sign | (((exponent + 13) << 10) + mantissa));
}
inline uint16_t ToBf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

namespace internal {

inline void PutHalf(std::vector<uint8_t>& out, uint16_t half) {
  out.push_back(static_cast<uint8_t>(half & 255));
  out.push_back(static_cast<uint8_t>(half >> 8));
}

inline float HalfBack(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const float magnitude = exponent ? std::ldexp(static_cast<float>(1024 + (half & 1023)), exponent - 25)
                                   : std::ldexp(static_cast<float>(half & 1023), -24);
  return half & 0x8000 ? -magnitude : magnitude;
}

inline int Code(float value, float scale, int low, int high) {
  return scale == 0 ? std::clamp(0, low, high) : std::clamp(static_cast<int>(std::lround(value / scale)), low, high);
}

inline void PutNibbles(std::vector<uint8_t>& out, const int (&codes)[32]) {
  for (int c = 0; c < 16; ++c) out.push_back(static_cast<uint8_t>(codes[c] | codes[c + 16] << 4));
}

inline void PutBlock(WeightType type, const float* x, std::vector<uint8_t>& out) {
  const auto [low, high] = std::minmax_element(x, x + 32);
  const float top = std::max(std::fabs(*low), std::fabs(*high));
  int codes[32];
  if (type == WeightType::kQ8_0) {
    const uint16_t scale = ToHalf(top / 127);
    PutHalf(out, scale);
    for (int c = 0; c < 32; ++c) out.push_back(static_cast<uint8_t>(Code(x[c], HalfBack(scale), -127, 127)));
  } else if (type == WeightType::kQ4_0) {
    const uint16_t scale = ToHalf(top / 8);
    PutHalf(out, scale);
    for (int c = 0; c < 32; ++c) codes[c] = Code(x[c], HalfBack(scale), -8, 7) + 8;
    PutNibbles(out, codes);
  } else {
    const uint16_t scale = ToHalf((*high - *low) / 15);
    const uint16_t minimum = ToHalf(*low);
    PutHalf(out, scale);
    PutHalf(out, minimum);
    for (int c = 0; c < 32; ++c) codes[c] = Code(x[c] - HalfBack(minimum), HalfBack(scale), 0, 15);
    PutNibbles(out, codes);
  }
}

}  // namespace internal

inline constexpr WeightType kAllWeightTypes[] = {WeightType::kF32,  WeightType::kF16,  WeightType::kBF16,
                                                 WeightType::kQ8_0, WeightType::kQ4_0, WeightType::kQ4_1};
inline bool IsBlockType(WeightType type) {
  return type == WeightType::kQ8_0 || type == WeightType::kQ4_0 || type == WeightType::kQ4_1;
}

// A matrix with its memory. `cols` is a multiple of 32 for block types.
struct OwnedMatrix {
  std::vector<uint8_t> bytes;
  WeightType type = WeightType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  HostMatrix view() const { return {type, rows, cols, bytes.data()}; }
};

inline OwnedMatrix Quantise(WeightType type, const std::vector<float>& values, int64_t rows, int64_t cols) {
  OwnedMatrix m{{}, type, rows, cols};
  if (IsBlockType(type)) {
    for (int64_t i = 0; i < rows * cols; i += 32) internal::PutBlock(type, values.data() + i, m.bytes);
  } else if (type == WeightType::kF32) {
    m.bytes.resize(values.size() * 4);
    std::memcpy(m.bytes.data(), values.data(), m.bytes.size());
  } else {
    for (const float v : values) internal::PutHalf(m.bytes, type == WeightType::kF16 ? ToHalf(v) : ToBf16(v));
  }
  return m;
}

}  // namespace loupe::testing
