// What a spherical code (kernels/spherical.h) makes of a vector, without a page: calibration measures by it what a list of
// some bits would cost, and no page has to be written for that. The arithmetic of the encoders, one vector at a time; a test
// holds it against real pages. Pure, any thread.
#pragma once

#include <span>

#include "kernels/page_layout.h"

namespace loupe {

// `x` becomes what its code stands for. Head sizes are multiples of spherical::kDimStep up to 256. `mean`: the list's mean
// key, empty for values. A codec that codes nothing changes nothing.
void RoundSpherical(Codec codec, std::span<const float> mean, std::span<float> x);

}  // namespace loupe
