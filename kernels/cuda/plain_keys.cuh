// Queries and keys in f32 arithmetic, whatever the page: what the plain kernels share. Codes are met by a turned query, so
// that no key is ever turned back.
#pragma once

#include "kernels/cuda/spherical.cuh"

namespace loupe::cuda {

// One query in shared memory: as it is, turned, and its product with the mean key that coded keys lack.
struct PlainQuery {
  const float *plain, *turned;
  float mean;
};

__device__ __forceinline__ float PlainElement(const uint8_t* plane, int bytes, int index) {
  return bytes == 4 ? reinterpret_cast<const float*>(plane)[index] : ToFloat(reinterpret_cast<const __half*>(plane)[index]);
}

// Floats of shared memory for `heads` queries.
__host__ __device__ constexpr int PlainQueryFloats(int heads, int dim) { return heads * (2 * dim + 1); }

__device__ __forceinline__ PlainQuery PlainQueryAt(const float* queries, int heads, int dim, int head) {
  return {queries + head * dim, queries + (heads + head) * dim, queries[2 * heads * dim + head]};
}

// Completes queries of one kv head whose plain form lies in shared memory. A block; begins and ends with a barrier.
__device__ inline void TurnQueries(float* queries, int heads, int dim, const float* mean_key) {
  __syncthreads();
  if (dim % spherical::kDimStep == 0) {
    for (int head = threadIdx.x / 32; head < heads; head += blockDim.x / 32) {
      const int lane = threadIdx.x % 32;
      const float* plain = queries + head * dim;
      float* turned = queries + (heads + head) * dim;
      float dot = 0;
      for (int d = lane; d < dim; d += 32) {
        turned[d] = plain[d];
        if (mean_key) dot = fmaf(plain[d], mean_key[d], dot);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_xor_sync(~0u, dot, offset);
      if (lane == 0) queries[2 * heads * dim + head] = dot;
      TurnShared(turned, dim, false);
    }
  }
  __syncthreads();
}

// Query times key of a page's entry `e`.
__device__ __forceinline__ float PlainDot(const PlainQuery& q, const PageView& page, int e, int dim, const uint8_t* arena) {
  float dot = 0;
  if (!IsCoded(page.key_codec)) {
    const uint8_t* keys = arena + page.offset;
    for (int d = 0; d < dim; ++d) dot = fmaf(q.plain[d], PlainElement(keys, page.key_bytes, ElementIndex(e, d, page.entries)), dot);
    return dot;
  }
  PageView at = page;
  at.count = e;
  const Side side(at, true, dim, const_cast<uint8_t*>(arena));  // only read
  const CodedEntry entry = side.Entry(dim);
  for (int d = 0; d < dim; ++d) dot = fmaf(q.turned[d], static_cast<float>(ReadTwice(entry, d)), dot);
  return fmaf(dot, 0.5f * ToFloat(side.scales[e]), q.mean);
}

__device__ __forceinline__ float LogWeight2(const PageView& page, int e, int dim, const uint8_t* arena) {
  return page.log_weights ? reinterpret_cast<const float*>(arena + page.LogWeightOffset(dim))[e] * kLog2e : 0;
}

}  // namespace loupe::cuda
