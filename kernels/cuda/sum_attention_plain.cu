// Column sums of attention in f32 arithmetic, for what the dense kernel does not take: exact mode with its f32 pages, head
// sizes other than 64 and 128. One block a query head, its rows one after the other: the slow version that stays.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pages.cuh"
#include "kernels/cuda/sum_inputs.cuh"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kNone = -INFINITY;

__device__ __forceinline__ float Element(const uint8_t* plane, int bytes, int index) {
  return bytes == 4 ? reinterpret_cast<const float*>(plane)[index] : ToFloat(reinterpret_cast<const __half*>(plane)[index]);
}

// Over the block, in every thread.
template <bool kMax>
__device__ float Reduce(float x) {
  __shared__ float parts[kThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(~0u, x, offset);
    x = kMax ? fmaxf(x, other) : x + other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
  for (int w = 1; w < kThreads / 32; ++w) x = kMax ? fmaxf(x, parts[w]) : x + parts[w];
  return x;
}

__global__ void SumKernel(const Sums p) {
  extern __shared__ float q[];
  GridWait();
  const int head = p.first_head + blockIdx.x, group = head / p.heads_per_group;
  float* columns = p.columns + int64_t{blockIdx.x} * p.max_pages * kPageEntries;
  float* logits = reinterpret_cast<float*>(p.partials + int64_t{blockIdx.x} * kSumRows * p.max_pages);
  const PageRef* pages = p.pages + p.list_begin[group];
  for (int row = 0; row < p.rows; ++row) {
    __syncthreads();
    for (int d = threadIdx.x; d < p.dim; d += kThreads) {
      const int64_t at = row * p.q_stride + head * p.dim + d;
      q[d] = p.q_half ? ToFloat(static_cast<const __half*>(p.q)[at]) : static_cast<const float*>(p.q)[at];
    }
    __syncthreads();
    const int begin = p.visible_begin[row * p.begin_stride + group], end = p.visible_end[row * p.end_stride + group];
    float max = kNone;
    for (int i = begin + threadIdx.x; i < end; i += kThreads) {
      const PageView page(pages[i / kPageEntries]);
      const int e = i % kPageEntries;
      float dot = 0;
      for (int d = 0; d < p.dim; ++d) {
        dot = fmaf(q[d], Element(p.arena + page.offset, page.key_bytes, ElementIndex(e, d, page.entries)), dot);
      }
      float x = dot * p.scale_log2e;
      if (page.log_weights) x += reinterpret_cast<const float*>(p.arena + page.LogWeightOffset(p.dim))[e] * kLog2e;
      logits[i] = x;
      max = fmaxf(max, x);
    }
    if (p.sinks) max = fmaxf(max, p.sinks[head] * kLog2e);
    max = Reduce<true>(max);
    if (max == kNone) continue;
    float sum = p.sinks && threadIdx.x == 0 ? exp2f(p.sinks[head] * kLog2e - max) : 0;
    for (int i = begin + threadIdx.x; i < end; i += kThreads) sum += exp2f(logits[i] - max);
    sum = Reduce<false>(sum);
    for (int i = begin + threadIdx.x; i < end; i += kThreads) columns[i] += exp2f(logits[i] - max) / sum;
  }
}

}  // namespace

void SumAttentionPlain(const Sums& p, int heads, cudaStream_t stream) {
  Launch(SumKernel, static_cast<unsigned>(heads), kThreads, static_cast<size_t>(p.dim) * 4, stream, p);
}

}  // namespace loupe::cuda
