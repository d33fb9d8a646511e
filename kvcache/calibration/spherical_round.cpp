#include "kvcache/calibration/spherical_round.h"

#include <algorithm>
#include <cmath>

#include "kernels/check.h"
#include "kernels/half.h"
#include "kernels/spherical.h"

namespace loupe {
namespace {

constexpr int kMaxDim = 256;

// Butterflies within blocks, scaled so that turning twice gives the same vector.
void Turn(std::span<float> x) {
  const int dim = static_cast<int>(x.size()), block = spherical::TurnBlock(dim);
  for (int distance = 1; distance < block; distance *= 2) {
    for (int i = 0; i < dim; ++i) {
      if (i & distance) continue;
      float &a = x[static_cast<size_t>(i)], &b = x[static_cast<size_t>(i + distance)];
      const float sum = a + b, difference = a - b;
      a = sum, b = difference;
    }
  }
  const float scale = spherical::TurnScale(block);
  for (float& v : x) v *= scale;
}

float Norm(std::span<const float> x) {
  float squares[kMaxDim] = {};
  for (size_t i = 0; i < x.size(); ++i) squares[i] = x[i] * x[i];
  int half = 1;
  while (2 * half < static_cast<int>(x.size())) half *= 2;
  for (; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) squares[i] += squares[i + half];
  }
  return std::sqrt(squares[0]);
}

// The level of the nearest magnitude, twice: an odd number.
int NearestTwiceLevel(const spherical::Levels& levels, float u) {
  int m = 0;
  while (m + 1 < levels.count && std::abs(u) >= spherical::Bound(levels, m)) ++m;
  const int twice = 2 * levels.magnitudes[m] + 1;
  return u < 0 ? -twice : twice;
}

}  // namespace

void RoundSpherical(Codec codec, std::span<const float> mean, std::span<float> x) {
  if (!IsCoded(codec)) return;
  const int dim = static_cast<int>(x.size());
  LOUPE_CHECK(dim > 0 && dim <= kMaxDim && dim % spherical::kDimStep == 0) << "head size " << dim;
  for (size_t d = 0; d < mean.size(); ++d) x[d] -= mean[d];
  for (int d = 0; d < dim; ++d) x[static_cast<size_t>(d)] *= spherical::IsNegative(d) ? -1.f : 1.f;
  Turn(x);
  const float norm = Norm(x);
  float levels[kMaxDim] = {};
  double squares = 0;
  if (norm > 0) {
    const float largest = std::abs(*std::max_element(x.begin(), x.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
    const float unit = codec == Codec::kS8 ? 127 / largest : std::sqrt(static_cast<float>(dim)) / norm;
    for (int d = 0; d < dim; ++d) {
      const float u = x[static_cast<size_t>(d)] * unit;
      levels[d] = codec == Codec::kS8 ? std::nearbyint(u)
                                      : 0.5f * static_cast<float>(NearestTwiceLevel(spherical::LevelsOf(codec), u));
      squares += double{levels[d]} * double{levels[d]};
    }
  }
  const float scale = squares > 0 ? HalfToFloat(FloatToHalf(norm / std::sqrt(static_cast<float>(squares)))) : 0.f;
  for (int d = 0; d < dim; ++d) x[static_cast<size_t>(d)] = scale * levels[d];
  Turn(x);
  for (int d = 0; d < dim; ++d) x[static_cast<size_t>(d)] *= spherical::IsNegative(d) ? -1.f : 1.f;
  for (size_t d = 0; d < mean.size(); ++d) x[d] += mean[d];
}

}  // namespace loupe
