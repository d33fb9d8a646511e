// -log softmax at one token of each row. One block a row, which reads its logits twice; limited by memory.
#include <cmath>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 512;

struct Larger {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Plus {
  __device__ double operator()(double a, double b) const { return a + b; }
};

// The combination of all threads' values, in a fixed order, for all threads. `shared` is free afterwards.
template <class T, class Combine>
__device__ T OverBlock(T value, T* shared, Combine combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(~0u, value, offset));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[threadIdx.x % (kThreads / 32)];
#pragma unroll
  for (int offset = kThreads / 64; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(~0u, value, offset));
  __syncthreads();
  return value;
}

__global__ void SurprisalKernel(const float* logits, int64_t stride, const int32_t* ids, float* out, int vocab) {
  __shared__ float maxima[kThreads / 32];
  __shared__ double sums[kThreads / 32];
  GridWait();
  GridLaunch();
  const float* x = logits + int64_t{blockIdx.x} * stride;
  float top = -INFINITY;
  for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kThreads) top = fmaxf(top, x[i]);
  top = OverBlock(top, maxima, Larger{});
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kThreads) sum += static_cast<double>(expf(x[i] - top));
  sum = OverBlock(sum, sums, Plus{});
  if (threadIdx.x == 0) {
    out[blockIdx.x] = static_cast<float>(log(sum) + static_cast<double>(top - x[ids[blockIdx.x]]));
  }
}

}  // namespace

void SurprisalCuda(const SurprisalArgs& args, CudaContext context) {
  if (args.logits.rows() == 0) return;
  Launch(SurprisalKernel, static_cast<unsigned>(args.logits.rows()), kThreads, 0, context.stream,
         args.logits.as<float>(), args.logits.row_stride, args.ids.as<int32_t>(), args.out.as<float>(),
         static_cast<int>(args.logits.row_elements()));
}

}  // namespace loupe::cuda
