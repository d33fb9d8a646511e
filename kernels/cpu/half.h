// 16-bit floats to f32 in plain C++. `static`, not `inline`: files built for different instruction sets include this,
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
// subnormal numbers right; infinities and NaN keep the largest exponent.
static inline float HalfToFloat(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const uint32_t scale_bits = 0x77800000;  // 2^112
  float value, scale;
  std::memcpy(&value, &magnitude, sizeof(value));
  std::memcpy(&scale, &scale_bits, sizeof(scale));
  value *= scale;
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  if ((half & 0x7c00) == 0x7c00) word = 0x7f800000 | (magnitude & 0x7fffff);
  word |= static_cast<uint32_t>(half & 0x8000) << 16;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

}  // namespace loupe
