// out = x W^T in f32 arithmetic over f32 or fp16 weights: exact mode, and the slow version that stays. A block computes
// a tile of 32 rows of x by 32 outputs; 16 multiply-adds a pair of shared-memory reads, far from any limit of the
// machine.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"

namespace loupe::cuda {
namespace {

constexpr int kTile = 32, kDepth = 32, kThreads = 256;

struct Plain {
  const void *weight, *x;
  int64_t weight_stride, x_stride;
  int rows, cols, tokens;
  const float *bias, *add;
  int64_t add_stride;
  void* out;
  int64_t out_stride;
  bool weight_half, x_half, out_half;
};

__device__ __forceinline__ float At(const void* p, bool half, int64_t i) {
  return half ? ToFloat(static_cast<const __half*>(p)[i]) : static_cast<const float*>(p)[i];
}

__global__ void PlainKernel(const Plain p) {
  __shared__ float w[kDepth][kTile + 1], x[kDepth][kTile + 1];
  GridWait();
  GridLaunch();
  const int row0 = blockIdx.x * kTile, token0 = blockIdx.y * kTile;
  const int r = threadIdx.x % kTile, t = threadIdx.x / kTile;  // outputs r, tokens t, t + 8, t + 16, t + 24
  float sum[4] = {0, 0, 0, 0};
  for (int k0 = 0; k0 < p.cols; k0 += kDepth) {
    __syncthreads();
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
      const int line = i / kDepth, k = i % kDepth;
      const bool in = k0 + k < p.cols;
      w[k][line] =
          in && row0 + line < p.rows ? At(p.weight, p.weight_half, (row0 + line) * p.weight_stride + k0 + k) : 0;
      x[k][line] = in && token0 + line < p.tokens ? At(p.x, p.x_half, (token0 + line) * p.x_stride + k0 + k) : 0;
    }
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] = fmaf(w[k][r], x[k][t + 8 * j], sum[j]);
    }
  }
  for (int j = 0; j < 4; ++j) {
    const int row = row0 + r, token = token0 + t + 8 * j;
    if (row >= p.rows || token >= p.tokens) continue;
    float value = sum[j];
    if (p.bias) value += p.bias[row];
    if (p.add) value += p.add[token * p.add_stride + row];
    if (p.out_half) {
      static_cast<__half*>(p.out)[token * p.out_stride + row] = FromFloat<__half>(value);
    } else {
      static_cast<float*>(p.out)[token * p.out_stride + row] = value;
    }
  }
}

}  // namespace

void MatMulPlain(const MatMulArgs& args, CudaContext context) {
  const auto& weight = static_cast<const WeightCuda&>(*args.weight);
  Plain p = {};
  p.weight = weight.data(), p.weight_stride = weight.stride(), p.weight_half = weight.dtype() == DType::kF16;
  p.x = args.x.data, p.x_stride = args.x.row_stride, p.x_half = args.x.dtype == DType::kF16;
  p.rows = static_cast<int>(weight.rows()), p.cols = static_cast<int>(weight.cols()),
  p.tokens = static_cast<int>(args.x.rows());
  p.bias = args.bias.defined() ? args.bias.as<float>() : nullptr;
  p.add = args.add.defined() ? args.add.as<float>() : nullptr, p.add_stride = args.add.row_stride;
  p.out = args.out.data, p.out_stride = args.out.row_stride, p.out_half = args.out.dtype == DType::kF16;
  Launch(PlainKernel, dim3(Blocks(p.rows, kTile), Blocks(p.tokens, kTile)), kThreads, 0, context.stream, p);
}

}  // namespace loupe::cuda
