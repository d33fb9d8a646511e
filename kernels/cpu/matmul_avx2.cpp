#include "kernels/cpu/matmul_kernels.h"
namespace loupe { constinit const MatMulKernels kAvx2MatMul = {}; }
