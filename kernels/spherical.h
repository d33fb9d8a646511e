// Spherical codes: what the bytes of a coded key or value mean and how they are made, the same bits on every backend. A
// vector is turned (random signs, then a Hadamard transform), so that its coordinates look alike, and its direction is
// rounded coordinate by coordinate; one scale an entry restores the length. After Zandieh et al., TurboQuant (arXiv
// 2504.19874), with the scale that preserves the norm; the levels are those of Lloyd-Max for N(0, 1) within 0.3 %, moved to
// half integers so that products with codes are integer.
//
//   x = key less the mean key of its (layer, kv head), or the value
//   y = H(sign * x) * TurnScale(n)  H: butterflies (a + b, a - b) at distance 1, 2, 4, ... n / 2; n = TurnBlock(D), block by
//                                   block
//   r = sqrt(sum y^2)               summed as a tree: s[i] += s[i + h] for h = D' / 2, ... 1, D' the next power of two, zeros
//                                   behind D
//   s2, s3, s4: u = y * (sqrt(D) / r); code = the index of the nearest magnitude (the number of Bounds that |u| reaches),
//               and the sign bit above it if u < 0; r = 0: u = 0
//   s8:         code = round(y * (127 / max |y|)), of halves the even one, in [-127, 127]; max = 0: 0
//   scale = r / (sqrt(4 * sum of squared levels) * 0.5), to fp16, saturating: the sum of squares of 2 * level is an exact integer
//   y' = scale * level,   x' = sign * H(y') * TurnScale(n)
//
// All in f32 with each operation rounded by itself (no fused multiply-add). A vector whose r is not finite gets the scale NaN
// (0x7e00), so whatever reads it fails visibly; encoders count it. r = 0: scale 0.
//
// Plain data and static functions, so that files built for different instruction sets may include it. Any thread.
#pragma once

#include <cstdint>

#include "kernels/page_layout.h"

namespace loupe::spherical {

// Head sizes that can be coded are multiples of this.
inline constexpr int kDimStep = 64;

// Levels of a codec of up to 4 bits: level = +-(magnitude + 1/2) in units in which N(0, 1) has `step`. bounds[i] is the
// u below which magnitude i is nearest; the last is never reached.
struct Levels {
  int bits;
  int count;  // of magnitudes: 2^(bits - 1)
  float step;
  uint8_t magnitudes[8];
};
inline constexpr Levels kLevels4 = {4, 8, 0.05112f, {2, 7, 12, 18, 24, 31, 40, 53}};
inline constexpr Levels kLevels3 = {3, 4, 0.0368f, {6, 20, 36, 58}};
inline constexpr Levels kLevels2 = {2, 2, 0.0258f, {17, 58}};

constexpr Levels LevelsOf(Codec codec) { return codec == Codec::kS4 ? kLevels4 : codec == Codec::kS3 ? kLevels3 : kLevels2; }

// Half way between magnitudes i and i + 1, as a u.
constexpr float Bound(const Levels& levels, int i) {
  return levels.step * (static_cast<float>(levels.magnitudes[i] + levels.magnitudes[i + 1] + 1) * 0.5f);
}

// A code of up to 4 bits as twice its level, an odd integer.
constexpr int TwiceLevel(const Levels& levels, int code) {
  const int twice = 2 * levels.magnitudes[code & (levels.count - 1)] + 1;
  return code & levels.count ? -twice : twice;
}

// How many coordinates are turned together: the largest power of two that divides the head size.
constexpr int TurnBlock(int head_dim) { return head_dim & -head_dim; }

// 1 / sqrt(n) of a power of two.
constexpr float TurnScale(int n) {
  float scale = 1;
  for (; n >= 4; n /= 4) scale *= 0.5f;
  return n == 2 ? scale * 0.70710678118654752440f : scale;
}

// The random signs, fixed for ever: bit d of a constant for coordinate d of up to 256. True: minus.
inline constexpr uint64_t kSigns[4] = {0x9e3779b97f4a7c15, 0xd1b54a32d192ed03, 0x8cb92ba72f3d8dd7, 0xaef17502108ef2d9};
constexpr bool IsNegative(int d) { return kSigns[d >> 6 & 3] >> (d & 63) & 1; }

}  // namespace loupe::spherical
