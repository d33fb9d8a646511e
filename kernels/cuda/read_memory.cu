// The speed of memory: every other figure is held against it.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 512, kUnroll = 8;

__global__ void ReadKernel(const uint4* data, int64_t num, int32_t* sink) {
  GridWait();
  GridLaunch();
  uint32_t sum = 0;
  const int64_t step = int64_t{gridDim.x} * kThreads * kUnroll;
  for (int64_t i = int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x; i < num; i += step) {
    uint4 x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) x[u] = i + u * kThreads < num ? LoadOnce(data + i + u * kThreads) : uint4{};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum += x[u].x ^ x[u].y ^ x[u].z ^ x[u].w;
  }
  if (sum == 0x9e3779b9u) sink[0] = 0;  // so that the loads are not optimised away; the counter is zero between calls
}

}  // namespace

void ReadMemoryCuda(const void* data, int64_t bytes, CudaContext context) {
  Launch(ReadKernel, static_cast<unsigned>(4 * context.num_sms), kThreads, 0, context.stream,
         static_cast<const uint4*>(data), bytes / 16, context.workspace->counters);
}

}  // namespace loupe::cuda
