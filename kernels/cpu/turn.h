// The turn of spherical codes, its signs included, over `Lanes` vectors that lie beside each other: [D][Lanes]. Templates
// for the files of one instruction set, to be included inside their anonymous namespaces' files; static, so that no copy is
// shared between sets.
#pragma once

#include <cstdint>

#include "kernels/spherical.h"

namespace loupe::spherical {

template <int Lanes>
[[gnu::always_inline]] static inline void Butterflies(float* x, int dim) {
  const int block = TurnBlock(dim);
  for (int h = 1; h < block; h *= 2) {
    for (int i = 0; i < dim; i += 2 * h) {
      for (int j = i; j < i + h; ++j) {
        float* a = x + j * Lanes;
        float* b = a + h * Lanes;
        for (int lane = 0; lane < Lanes; ++lane) {
          const float sum = a[lane] + b[lane], difference = a[lane] - b[lane];
          a[lane] = sum, b[lane] = difference;
        }
      }
    }
  }
}

template <int Lanes>
[[gnu::always_inline]] static inline void Turn(float* x, int dim) {
  for (int d = 0; d < dim; ++d) {
    if (!IsNegative(d)) continue;
    for (int lane = 0; lane < Lanes; ++lane) x[d * Lanes + lane] = -x[d * Lanes + lane];
  }
  Butterflies<Lanes>(x, dim);
  const float scale = TurnScale(TurnBlock(dim));
  for (int i = 0; i < dim * Lanes; ++i) x[i] *= scale;
}

template <int Lanes>
[[gnu::always_inline]] static inline void TurnBack(float* x, int dim) {
  Butterflies<Lanes>(x, dim);
  const float scale = TurnScale(TurnBlock(dim));
  for (int d = 0; d < dim; ++d) {
    const float signed_scale = IsNegative(d) ? -scale : scale;
    for (int lane = 0; lane < Lanes; ++lane) x[d * Lanes + lane] *= signed_scale;
  }
}

}  // namespace loupe::spherical
