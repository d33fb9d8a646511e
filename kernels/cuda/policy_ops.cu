// What policies ask of the GPU now and then: the look of keys, weighted means of entries.
// Arrays come from the host and go back to it, so each call waits; none is part of a recorded step. Written for
// clarity: a repack is rare beside the steps.
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/spherical.cuh"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 256;

// Device memory for the length of a call.
class Temporary {
 public:
  explicit Temporary(cudaStream_t stream) : stream_(stream) {}
  ~Temporary() {
    for (void* p : taken_) LOUPE_CUDA(cudaFreeAsync(p, stream_));
  }
  void* Take(int64_t bytes) {
    void* p = nullptr;
    LOUPE_CUDA(cudaMallocAsync(&p, static_cast<size_t>(bytes > 0 ? bytes : 1), stream_));
    taken_.push_back(p);
    return p;
  }
  void* Copy(const void* from, int64_t bytes) {
    void* p = Take(bytes);
    if (bytes > 0) LOUPE_CUDA(cudaMemcpyAsync(p, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_));
    return p;
  }

 private:
  cudaStream_t stream_;
  std::vector<void*> taken_;
};

__device__ __forceinline__ float Element(const uint8_t* plane, int bytes, int index) {
  return bytes == 4 ? reinterpret_cast<const float*>(plane)[index]
                    : ToFloat(reinterpret_cast<const __half*>(plane)[index]);
}
__device__ __forceinline__ void StoreElement(uint8_t* plane, int bytes, int index, float x) {
  if (bytes == 4) {
    reinterpret_cast<float*>(plane)[index] = x;
  } else {
    reinterpret_cast<__half*>(plane)[index] = FromFloat<__half>(x);
  }
}

// One block, a warp an entry: norms and the sum of the keys at length 1, then cosines with it.
template <int kPer>
__global__ void KeysKernel(const PageRef* pages, int num_pages, int dim, const uint8_t* arena, const float* mean_key, float* norms,
                           float* alignment) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float sums[kWarps][32 * kPer];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float x[kPer], sum[kPer] = {};
  const auto each = [&](auto visit) {
    int first = 0;
    for (int i = 0; i < num_pages; ++i) {
      PageView page(pages[i]);
      const int count = page.count;
      for (int e = warp; e < count; e += kWarps) {
        page.count = e;
        LoadSide(Side(page, true, dim, const_cast<uint8_t*>(arena)), dim, mean_key, x);  // only read
        visit(first + e);
      }
      first += count;
    }
  };
  each([&](int entry) {
    const float norm = sqrtf(SumOfSquares(x));
    if (lane == 0) norms[entry] = norm;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum[i] += norm > 0 ? x[i] / norm : 0;
  });
  if (!alignment) return;
#pragma unroll
  for (int i = 0; i < kPer; ++i) sums[warp][lane * kPer + i] = sum[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    sum[i] = 0;
    for (int w = 0; w < kWarps; ++w) sum[i] += sums[w][lane * kPer + i];
  }
  const float length = sqrtf(SumOfSquares(sum));
  each([&](int entry) {
    const float norm = sqrtf(SumOfSquares(x));
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) dot = fmaf(x[i], sum[i], dot);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_xor_sync(~0u, dot, offset);
    if (lane == 0) alignment[entry] = norm > 0 && length > 0 ? dot / (norm * length) : 0;
  });
}

// One block a merge.
__global__ void MergeKernel(const MergeSource* sources, const EntryMerge* merges, int dim, uint8_t* arena) {
  const EntryMerge merge = merges[blockIdx.x];
  const PageView to(merge.to);
  for (int d = threadIdx.x; d < dim; d += kThreads) {
    float key = 0, value = 0;
    for (int s = 0; s < merge.count; ++s) {
      const MergeSource source = sources[merge.first + s];
      const PageView from(source.entry);
      const int at = ElementIndex(from.count, d, from.entries);
      key = fmaf(source.weight, Element(arena + from.offset, from.key_bytes, at), key);
      value = fmaf(source.weight, Element(arena + from.ValueOffset(dim), from.value_bytes, at), value);
    }
    const int at = ElementIndex(to.count, d, to.entries);
    StoreElement(arena + to.offset, to.key_bytes, at, key);
    StoreElement(arena + to.ValueOffset(dim), to.value_bytes, at, value);
  }
  if (threadIdx.x == 0) reinterpret_cast<float*>(arena + to.LogWeightOffset(dim))[to.count] = merge.log_weight;
}

void Download(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (bytes > 0) LOUPE_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream));
}
void Wait(cudaStream_t stream) { LOUPE_CUDA(cudaStreamSynchronize(stream)); }

}  // namespace

void SummariseKeysCuda(const SummariseKeysArgs& args, CudaContext context) {
  LOUPE_CHECK(args.head_dim > 0 && args.head_dim <= 256) << "head size " << args.head_dim;
  int64_t entries = 0;
  for (int i = 0; i < args.num_pages; ++i) entries += args.pages[i].count;
  if (entries == 0) return;
  Temporary memory(context.stream);
  const auto* pages = static_cast<const PageRef*>(memory.Copy(args.pages, args.num_pages * int64_t{sizeof(PageRef)}));
  auto* norms = static_cast<float*>(memory.Take(entries * 4));
  auto* alignment = args.alignment ? static_cast<float*>(memory.Take(entries * 4)) : nullptr;
  const int per = CoordinatesOf(args.head_dim);
  (per == 2 ? KeysKernel<2> : per == 4 ? KeysKernel<4> : KeysKernel<8>)<<<1, kThreads, 0, context.stream>>>(
      pages, args.num_pages, args.head_dim, static_cast<const uint8_t*>(args.arena), args.mean_key, norms, alignment);
  Download(args.norms, norms, entries * 4, context.stream);
  if (alignment) Download(args.alignment, alignment, entries * 4, context.stream);
  Wait(context.stream);
}

void MergeEntriesCuda(const MergeEntriesArgs& args, CudaContext context) {
  if (args.num_merges == 0) return;
  int64_t num_sources = 0;
  for (int64_t i = 0; i < args.num_merges; ++i) {
    num_sources = std::max<int64_t>(num_sources, args.merges[i].first + args.merges[i].count);
    LOUPE_CHECK(args.merges[i].to.log_weights)
        << "the log-weight of merge " << i << " would be lost: its page has none";
  }
  Temporary memory(context.stream);
  const auto* sources =
      static_cast<const MergeSource*>(memory.Copy(args.sources, num_sources * int64_t{sizeof(MergeSource)}));
  const auto* merges =
      static_cast<const EntryMerge*>(memory.Copy(args.merges, args.num_merges * int64_t{sizeof(EntryMerge)}));
  MergeKernel<<<static_cast<unsigned>(args.num_merges), kThreads, 0, context.stream>>>(
      sources, merges, args.head_dim, static_cast<uint8_t*>(args.arena));
  Wait(context.stream);
}

}  // namespace loupe::cuda
