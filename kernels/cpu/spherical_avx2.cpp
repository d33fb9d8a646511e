// Spherical codes built with the options that CMake gives this file.
#include <math.h>
#include <string.h>

#include "kernels/cpu/spherical_kernels.h"
#include "kernels/cpu/turn.h"
#include "kernels/half.h"

namespace loupe {
namespace {
#include "kernels/cpu/spherical_kernels.inc"
}  // namespace

constinit const SphericalKernels kAvx2Spherical = {Encode, Decode, PutKeyBlock, PutValueBlock, GetKeyBlock, GetValueBlock};

}  // namespace loupe
