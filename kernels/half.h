// 16-bit floats to f32 and back in plain C++. `static`, not `inline`: files built for different instruction sets include this,
// and a shared inline function could come from any of them. Stateless.
#pragma once

#include <cstdint>
#include <cstring>

namespace loupe {

static inline float Bf16ToFloat(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

// Shifts exponent and mantissa into place and repairs the exponent's bias by a multiplication, which also gets the
// subnormal numbers right; infinities and NaN keep the largest exponent. No branch, so that loops become vectors.
static inline float HalfToFloat(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const uint32_t scale_bits = 0x77800000;  // 2^112
  float value, scale;
  std::memcpy(&value, &magnitude, sizeof(value));
  std::memcpy(&scale, &scale_bits, sizeof(scale));
  value *= scale;
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  word |= (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
  word |= static_cast<uint32_t>(half & 0x8000) << 16;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

// To the nearest, of two the even one; what lies beyond becomes the largest number. Adding a power of two whose last bit is
// the wanted one's rounds in f32 itself.
static inline uint16_t FloatToHalf(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof(word));
  const auto sign = static_cast<uint16_t>(word >> 16 & 0x8000);
  word &= 0x7fffffff;
  if (word > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (word >= 0x477fe000) return static_cast<uint16_t>(sign | 0x7bff);
  if (word < 0x38800000) {  // subnormal
    float magnitude;
    std::memcpy(&magnitude, &word, sizeof(magnitude));
    magnitude += 0.5f;
    std::memcpy(&word, &magnitude, sizeof(word));
    return static_cast<uint16_t>(sign | (word - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((word + 0xfff + (word >> 13 & 1) - 0x38000000) >> 13));
}

}  // namespace loupe
