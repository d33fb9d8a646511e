// Column sums of attention in f32 arithmetic, for what the dense kernel does not take: exact mode with its f32 pages, head
// sizes other than 64 and 128. One block a query head, its rows one after the other: the slow version that stays.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/plain_keys.cuh"
#include "kernels/cuda/sum_inputs.cuh"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kNone = -INFINITY;

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
    TurnQueries(q, 1, p.dim, p.mean_keys ? p.mean_keys + group * p.dim : nullptr);
    const PlainQuery query = PlainQueryAt(q, 1, p.dim, 0);
    const int begin = p.visible_begin[row * p.begin_stride + group], end = p.visible_end[row * p.end_stride + group];
    float max = kNone;
    for (int i = begin + threadIdx.x; i < end; i += kThreads) {
      const PageView page(pages[i / kPageEntries]);
      const int e = i % kPageEntries;
      if (e >= page.count) {  // a number without an entry
        logits[i] = kNone;
        continue;
      }
      const float x = PlainDot(query, page, e, p.dim, p.arena) * p.scale_log2e + LogWeight2(page, e, p.dim, p.arena);
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
  Launch(SumKernel, static_cast<unsigned>(heads), kThreads, sizeof(float) * static_cast<size_t>(PlainQueryFloats(1, p.dim)), stream, p);
}

}  // namespace loupe::cuda
