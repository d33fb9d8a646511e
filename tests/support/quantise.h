// Encodes f32 values as GGUF stores them, and keeps the values that the encoding stands for, in double precision: the
// truth that kernels and the forward pass are compared with.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace loupe::testing {

inline double HalfValue(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double value = exponent ? std::ldexp(fraction + 1024, exponent - 25) : std::ldexp(fraction, -24);
  return bits & 0x8000 ? -value : value;
}

// Round to nearest, ties to even. For finite values within the range of half precision.
inline uint16_t HalfBits(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(value);
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), -14);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // 0 to 2048
  return static_cast<uint16_t>(sign + (exponent + 14) * 1024 + steps);
}

inline uint16_t Bf16Bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct Encoded {
  std::string bytes;
  std::vector<double> values;
};

namespace internal {

inline void AppendBits(std::string* out, uint16_t bits) { out->append(reinterpret_cast<const char*>(&bits), 2); }

inline void EncodeBlock(const float* x, WeightType type, Encoded* out) {
  const auto [low, high] = std::minmax_element(x, x + 32);
  const float peak = std::abs(*low) > std::abs(*high) ? *low : *high;
  const double wanted = type == WeightType::kQ8_0   ? std::abs(peak) / 127.0
                        : type == WeightType::kQ4_0 ? peak / -8.0
                                                    : (*high - *low) / 15.0;
  const uint16_t scale_bits = HalfBits(wanted);
  const double scale = HalfValue(scale_bits);
  const double minimum = type == WeightType::kQ4_1 ? HalfValue(HalfBits(*low)) : 0;
  const int centre = type == WeightType::kQ4_0 ? 8 : 0;
  AppendBits(&out->bytes, scale_bits);
  if (type == WeightType::kQ4_1) AppendBits(&out->bytes, HalfBits(*low));
  int codes[32];
  for (int i = 0; i < 32; ++i) {
    const double steps = scale == 0 ? 0 : std::nearbyint((x[i] - minimum) / scale) + centre;
    codes[i] =
        static_cast<int>(type == WeightType::kQ8_0 ? std::clamp(steps, -127.0, 127.0) : std::clamp(steps, 0.0, 15.0));
    out->values.push_back((codes[i] - centre) * scale + minimum);
  }
  if (type == WeightType::kQ8_0) {
    for (int code : codes) out->bytes.push_back(static_cast<char>(code));
  } else {
    for (int i = 0; i < 16; ++i) out->bytes.push_back(static_cast<char>(codes[i] | codes[i + 16] << 4));
  }
}

}  // namespace internal

// For block types the number of values is a multiple of 32.
inline Encoded Encode(const std::vector<float>& x, WeightType type) {
  Encoded out;
  out.values.reserve(x.size());
  if (type == WeightType::kQ8_0 || type == WeightType::kQ4_0 || type == WeightType::kQ4_1) {
    for (size_t i = 0; i + 32 <= x.size(); i += 32) internal::EncodeBlock(x.data() + i, type, &out);
    return out;
  }
  for (float v : x) {
    if (type == WeightType::kF32) {
      out.bytes.append(reinterpret_cast<const char*>(&v), sizeof(v));
      out.values.push_back(static_cast<double>(v));
      continue;
    }
    const uint16_t bits = type == WeightType::kF16 ? HalfBits(static_cast<double>(v)) : Bf16Bits(v);
    internal::AppendBits(&out.bytes, bits);
    out.values.push_back(type == WeightType::kF16 ? HalfValue(bits)
                                                  : static_cast<double>(std::bit_cast<float>(uint32_t{bits} << 16)));
  }
  return out;
}

inline uint32_t GgufTypeNumber(WeightType type) {
  switch (type) {
    case WeightType::kF32:
      return 0;
    case WeightType::kF16:
      return 1;
    case WeightType::kQ4_0:
      return 2;
    case WeightType::kQ4_1:
      return 3;
    case WeightType::kQ8_0:
      return 8;
    case WeightType::kBF16:
      return 30;
  }
  return 0;
}

}  // namespace loupe::testing
