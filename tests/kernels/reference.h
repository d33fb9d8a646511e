// Double-precision oracles of the ops and small helpers for kernel tests. Never optimised: the formulas as they are
// written in books, one element at a time. Everything is seeded; a test prints its seed when it fails.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/check.h"
#include "tests/kernels/target.h"

namespace loupe::testing {

inline std::vector<float> RandomFloats(int64_t n, std::mt19937& random, float deviation = 1) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = normal(random);
  return values;
}

inline double HalfValue(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int fraction = half & 1023;
  const double magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                           : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                          : std::ldexp(fraction, -24);
  return half & 0x8000 ? -magnitude : magnitude;
}
inline double Bf16Value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// The values that a matrix of a model file stands for, [rows, cols].
inline std::vector<double> Dequantise(const HostMatrix& m) {
  std::vector<double> values;
  const auto* data = static_cast<const uint8_t*>(m.data);
  const auto half_at = [&](int64_t offset) {
    uint16_t half;
    std::memcpy(&half, data + offset, 2);
    return half;
  };
  for (int64_t i = 0; i < m.rows * m.cols; ++i) {
    const int64_t block = i / 32;
    const int c = static_cast<int>(i % 32);
    const auto nibble = [&](int64_t codes) { return data[codes + c % 16] >> (c / 16 * 4) & 15; };
    switch (m.type) {
      case WeightType::kF32: {
        float value;
        std::memcpy(&value, data + i * 4, 4);
        values.push_back(value);
        break;
      }
      case WeightType::kF16:
        values.push_back(HalfValue(half_at(i * 2)));
        break;
      case WeightType::kBF16:
        values.push_back(Bf16Value(half_at(i * 2)));
        break;
      case WeightType::kQ8_0:
        values.push_back(HalfValue(half_at(block * 34)) * static_cast<int8_t>(data[block * 34 + 2 + c]));
        break;
      case WeightType::kQ4_0:
        values.push_back(HalfValue(half_at(block * 18)) * (nibble(block * 18 + 2) - 8));
        break;
      case WeightType::kQ4_1:
        values.push_back(HalfValue(half_at(block * 20)) * nibble(block * 20 + 4) + HalfValue(half_at(block * 20 + 2)));
        break;
    }
  }
  return values;
}

// A dot product and the sum of its terms' magnitudes, by which rounding errors are judged.
struct Dot {
  double value = 0;
  double magnitude = 0;
};
inline Dot ReferenceDot(const double* w, const float* x, int64_t n) {
  Dot dot;
  for (int64_t i = 0; i < n; ++i) {
    dot.value += w[i] * x[i];
    dot.magnitude += std::fabs(w[i] * x[i]);
  }
  return dot;
}

inline std::vector<double> ReferenceRmsNorm(const float* x, const float* weight, double eps, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double{x[i]} * x[i];
  const double scale = 1 / std::sqrt(sum / static_cast<double>(n) + eps);
  std::vector<double> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(x[i] * scale * weight[i]);
  return out;
}

inline double ReferenceSiluMul(double gate, double up) { return gate / (1 + std::exp(-gate)) * up; }

// Rotates one head in place.
inline void ReferenceRope(std::vector<double>& head, int position, const std::vector<float>& frequencies, double scale,
                          bool interleaved) {
  const size_t pairs = frequencies.size();
  for (size_t i = 0; i < pairs; ++i) {
    double& a = head[interleaved ? 2 * i : i];
    double& b = head[interleaved ? 2 * i + 1 : i + pairs];
    const double angle = position * double{frequencies[i]};
    const double a_before = a;
    a = scale * (a * std::cos(angle) - b * std::sin(angle));
    b = scale * (a_before * std::sin(angle) + b * std::cos(angle));
  }
}

}  // namespace loupe::testing
