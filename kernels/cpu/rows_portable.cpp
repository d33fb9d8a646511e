// Row kernels built with the options that CMake gives this file.
#include <math.h>
#include <string.h>

#include "kernels/cpu/row_kernels.h"

namespace loupe {
namespace {
#include "kernels/cpu/row_kernels.inc"
}  // namespace

constinit const RowKernels kPortableRows = {RmsNorm, SiluMul, RotateInterleaved, RotateHalves};

}  // namespace loupe
