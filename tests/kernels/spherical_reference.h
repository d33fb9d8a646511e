// Spherical codes as kernels/spherical.h says, one vector at a time, in plain loops: codes and scale in f32 operation by
// operation, what they stand for in double precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/half.h"
#include "kernels/spherical.h"

namespace loupe::testing {

template <class T>
void Hadamard(std::vector<T>& x) {
  const size_t n = static_cast<size_t>(spherical::TurnBlock(static_cast<int>(x.size())));
  for (size_t first = 0; first < x.size(); first += n) {
    for (size_t h = 1; h < n; h *= 2) {
      for (size_t i = 0; i < n; ++i) {
        if (i & h) continue;
        const T a = x[first + i], b = x[first + i + h];
        x[first + i] = a + b, x[first + i + h] = a - b;
      }
    }
  }
}

struct SphericalCode {
  std::vector<int> twice;  // levels times two
  uint16_t scale = 0;
  bool fault = false;
};

inline SphericalCode EncodeSpherical(const std::vector<float>& x, const std::vector<float>& mean, Codec codec) {
  const size_t dim = x.size();
  std::vector<float> y = x;
  for (size_t d = 0; d < dim && !mean.empty(); ++d) y[d] = x[d] - mean[d];
  for (size_t d = 0; d < dim; ++d) y[d] = spherical::IsNegative(static_cast<int>(d)) ? -y[d] : y[d];
  Hadamard(y);
  for (float& z : y) z *= spherical::TurnScale(spherical::TurnBlock(static_cast<int>(dim)));
  size_t width = 1;
  while (width < dim) width *= 2;
  std::vector<float> s(width, 0.f);
  for (size_t d = 0; d < dim; ++d) s[d] = y[d] * y[d];
  for (size_t h = width / 2; h > 0; h /= 2) {
    for (size_t i = 0; i < h; ++i) s[i] = s[i] + s[i + h];
  }
  const float r = std::sqrt(s[0]);
  SphericalCode code;
  code.fault = !std::isfinite(r);
  int64_t sum = 0;
  if (codec == Codec::kS8) {
    float top = 0;
    for (const float z : y) top = std::max(top, std::fabs(z));
    const float factor = top > 0 ? 127.f / top : 0.f;
    for (const float z : y) code.twice.push_back(2 * static_cast<int>(std::isnan(z * factor) ? 0.f : std::nearbyint(z * factor)));
  } else {
    const spherical::Levels levels = spherical::LevelsOf(codec);
    const float factor = r > 0 ? std::sqrt(static_cast<float>(dim)) / r : 0.f;
    for (const float z : y) {
      const float u = z * factor;
      int index = 0;
      while (index + 1 < levels.count && std::fabs(u) >= spherical::Bound(levels, index)) ++index;
      code.twice.push_back((u < 0 ? -1 : 1) * (2 * levels.magnitudes[index] + 1));
    }
  }
  for (const int t : code.twice) sum += int64_t{t} * t;
  code.scale = code.fault ? 0x7e00 : r > 0 ? FloatToHalf(r / (std::sqrt(static_cast<float>(sum)) * 0.5f)) : 0;
  return code;
}

inline std::vector<double> DecodeSpherical(const SphericalCode& code, const std::vector<float>& mean) {
  const size_t dim = code.twice.size();
  const double scale = static_cast<double>(HalfToFloat(code.scale)) / 2;
  std::vector<double> y(dim);
  for (size_t d = 0; d < dim; ++d) y[d] = code.twice[d] * scale;
  Hadamard(y);
  for (size_t d = 0; d < dim; ++d) {
    y[d] /= std::sqrt(static_cast<double>(spherical::TurnBlock(static_cast<int>(dim))));
    if (spherical::IsNegative(static_cast<int>(d))) y[d] = -y[d];
    if (!mean.empty()) y[d] += static_cast<double>(mean[d]);
  }
  return y;
}

}  // namespace loupe::testing
