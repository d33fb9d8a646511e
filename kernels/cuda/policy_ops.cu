// What policies ask of the GPU now and then: column sums of attention, the look of keys, weighted means of entries.
// Arrays come from the host and go back to it, so each call waits; none is part of a recorded step. Written for
// clarity: a repack is rare beside the steps.
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pages.cuh"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kNone = -INFINITY;

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
  // The tensor itself if the device can read it, else a copy.
  Tensor OnDevice(Tensor t) {
    cudaPointerAttributes attributes = {};
    if (!t.defined() || t.rows() == 0) return t;
    LOUPE_CUDA(cudaPointerGetAttributes(&attributes, t.data));
    if (attributes.type == cudaMemoryTypeDevice) return t;
    t.data = Copy(t.data, ((t.rows() - 1) * t.row_stride + t.row_elements()) * DTypeBytes(t.dtype));
    return t;
  }

 private:
  cudaStream_t stream_;
  std::vector<void*> taken_;
};

__device__ __forceinline__ float Element(const uint8_t* plane, int bytes, int index) {
  return bytes == 4 ? reinterpret_cast<const float*>(plane)[index]
                    : ToFloat(reinterpret_cast<const __nv_bfloat16*>(plane)[index]);
}
__device__ __forceinline__ void StoreElement(uint8_t* plane, int bytes, int index, float x) {
  if (bytes == 4) {
    reinterpret_cast<float*>(plane)[index] = x;
  } else {
    reinterpret_cast<__nv_bfloat16*>(plane)[index] = __float2bfloat16(x);
  }
}

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

struct Sums {
  const void* q;
  int64_t q_stride;
  bool q_bf16;
  int rows, groups, heads, dim;
  const PageRef* pages;
  const int32_t* list_begin;
  const int32_t *visible_begin, *visible_end;
  int64_t begin_stride, end_stride;
  const uint8_t* arena;
  const float* sinks;
  float scale_log2e;
  float* columns;  // [H, entries]
  float* logits;   // [H, entries]
  int64_t entries;
};

// One block a query head: its rows one after the other.
__global__ void SumKernel(const Sums p) {
  extern __shared__ float q[];
  const int head = blockIdx.x, group = head / (p.heads / p.groups);
  float* columns = p.columns + head * p.entries;
  float* logits = p.logits + head * p.entries;
  const PageRef* pages = p.pages + p.list_begin[group];
  for (int row = 0; row < p.rows; ++row) {
    __syncthreads();
    for (int d = threadIdx.x; d < p.dim; d += kThreads) {
      const int64_t at = row * p.q_stride + head * p.dim + d;
      q[d] = p.q_bf16 ? ToFloat(static_cast<const __nv_bfloat16*>(p.q)[at]) : static_cast<const float*>(p.q)[at];
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

// One block: norms, then the mean of the keys at length 1, then cosines with it.
__global__ void KeysKernel(const PageRef* pages, int num_pages, int dim, const uint8_t* arena, float* norms,
                           float* alignment, float* mean) {
  const PageRef last = pages[num_pages - 1];
  const int entries = (num_pages - 1) * kPageEntries + last.count;
  const auto key = [&](int i, int d) {
    const PageView page(pages[i / kPageEntries]);
    return Element(arena + page.offset, page.key_bytes, ElementIndex(i % kPageEntries, d, page.entries));
  };
  for (int i = threadIdx.x; i < entries; i += kThreads) {
    float square = 0;
    for (int d = 0; d < dim; ++d) square += key(i, d) * key(i, d);
    norms[i] = sqrtf(square);
  }
  if (!alignment) return;
  __syncthreads();
  float square = 0;
  for (int d = threadIdx.x; d < dim; d += kThreads) {
    float sum = 0;
    for (int i = 0; i < entries; ++i) sum += norms[i] > 0 ? key(i, d) / norms[i] : 0;
    mean[d] = sum;
    square += sum * sum;
  }
  const float length = sqrtf(Reduce<false>(square));
  for (int i = threadIdx.x; i < entries; i += kThreads) {
    float dot = 0;
    for (int d = 0; d < dim; ++d) dot += key(i, d) * mean[d];
    alignment[i] = norms[i] > 0 && length > 0 ? dot / (norms[i] * length) : 0;
  }
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

void SumAttentionCuda(const SumAttentionArgs& args, CudaContext context) {
  if (args.q.rows() == 0) return;
  Sums p = {};
  p.rows = static_cast<int>(args.q.rows()), p.heads = static_cast<int>(args.q.shape[1]),
  p.dim = static_cast<int>(args.q.shape[2]);
  p.groups = static_cast<int>(args.visible_begin.shape[1]);
  std::vector<int32_t> list_begin(static_cast<size_t>(p.groups) + 1);
  Download(list_begin.data(), args.list_begin.data, static_cast<int64_t>(list_begin.size() * 4), context.stream);
  Wait(context.stream);
  const int32_t first = list_begin[0];
  std::vector<PageRef> pages(static_cast<size_t>(list_begin.back() - first));
  const auto page_bytes = static_cast<int64_t>(pages.size() * sizeof(PageRef));
  Download(pages.data(), args.pages.as<PageRef>() + first, page_bytes, context.stream);
  Wait(context.stream);
  std::vector<int64_t> entries;
  for (int g = 0; g < p.groups; ++g) {
    const size_t begin = static_cast<size_t>(list_begin[static_cast<size_t>(g)] - first);
    const size_t end = static_cast<size_t>(list_begin[static_cast<size_t>(g) + 1] - first);
    entries.push_back(begin == end ? 0 : static_cast<int64_t>(end - begin - 1) * kPageEntries + pages[end - 1].count);
    p.entries = std::max(p.entries, entries.back());
  }
  if (p.entries == 0) return;
  for (int32_t& begin : list_begin) begin -= first;
  Temporary memory(context.stream);
  const Tensor q = memory.OnDevice(args.q), begin = memory.OnDevice(args.visible_begin),
               end = memory.OnDevice(args.visible_end);
  p.q = q.data, p.q_stride = q.row_stride, p.q_bf16 = q.dtype == DType::kBF16;
  p.visible_begin = begin.as<int32_t>(), p.begin_stride = begin.row_stride;
  p.visible_end = end.as<int32_t>(), p.end_stride = end.row_stride;
  p.sinks = args.sinks.defined() ? memory.OnDevice(args.sinks).as<float>() : nullptr;
  p.pages = static_cast<const PageRef*>(memory.Copy(pages.data(), page_bytes));
  p.list_begin =
      static_cast<const int32_t*>(memory.Copy(list_begin.data(), static_cast<int64_t>(list_begin.size() * 4)));
  p.arena = static_cast<const uint8_t*>(args.arena);
  p.scale_log2e = args.scale * kLog2e;
  p.columns = static_cast<float*>(memory.Take(p.heads * p.entries * 4));
  p.logits = static_cast<float*>(memory.Take(p.heads * p.entries * 4));
  const auto column = [&](int head) { return entries[static_cast<size_t>(head / (p.heads / p.groups))] * 4; };
  for (int h = 0; h < p.heads; ++h) Download(p.columns + h * p.entries, args.columns[h], column(h), context.stream);
  SumKernel<<<static_cast<unsigned>(p.heads), kThreads, static_cast<size_t>(p.dim) * 4, context.stream>>>(p);
  for (int h = 0; h < p.heads; ++h) Download(args.columns[h], p.columns + h * p.entries, column(h), context.stream);
  Wait(context.stream);
}

void SummariseKeysCuda(const SummariseKeysArgs& args, CudaContext context) {
  if (args.num_pages == 0) return;
  const int64_t entries = int64_t{args.num_pages - 1} * kPageEntries + args.pages[args.num_pages - 1].count;
  Temporary memory(context.stream);
  const auto* pages = static_cast<const PageRef*>(memory.Copy(args.pages, args.num_pages * int64_t{sizeof(PageRef)}));
  auto* norms = static_cast<float*>(memory.Take(entries * 4));
  auto* alignment = args.alignment ? static_cast<float*>(memory.Take(entries * 4)) : nullptr;
  auto* mean = static_cast<float*>(memory.Take(args.head_dim * int64_t{4}));
  KeysKernel<<<1, kThreads, 0, context.stream>>>(pages, args.num_pages, args.head_dim,
                                                 static_cast<const uint8_t*>(args.arena), norms, alignment, mean);
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
