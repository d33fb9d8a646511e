// Column sums of attention: inputs to the device, columns there and back, and which kernel takes them. Columns are the host's,
// so the call waits; it is no part of a recorded step. Some heads and rows at a time, as the memory taken at start allows.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/sum_inputs.cuh"

namespace loupe::cuda {
namespace {

// Pieces of the workspace's scratch memory, for the length of a call.
class Scratch {
 public:
  Scratch(const Workspace& workspace, cudaStream_t stream) : at_(workspace.scratch), left_(workspace.scratch_bytes), stream_(stream) {}
  int64_t left() const { return left_; }
  void* Take(int64_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    LOUPE_CHECK_LE(bytes, left_) << "scratch memory of column sums";
    void* p = at_;
    at_ += bytes, left_ -= bytes;
    return p;
  }
  // The tensor itself if the device can read it, else a copy.
  Tensor OnDevice(Tensor t, int64_t element_bytes = 0) {
    if (!t.defined() || t.rows() == 0 || IsOnDevice(t.data)) return t;
    if (element_bytes == 0) element_bytes = DTypeBytes(t.dtype);
    const int64_t bytes = ((t.rows() - 1) * t.row_stride + t.row_elements()) * element_bytes;
    void* there = Take(bytes);
    LOUPE_CUDA(cudaMemcpyAsync(there, t.data, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_));
    t.data = there;
    return t;
  }
  static bool IsOnDevice(const void* p) {
    cudaPointerAttributes attributes = {};
    LOUPE_CUDA(cudaPointerGetAttributes(&attributes, p));
    return attributes.type == cudaMemoryTypeDevice;
  }

 private:
  char* at_;
  int64_t left_;
  cudaStream_t stream_;
};

// Where each list's pages begin, and one more.
std::vector<int32_t> BeginsOnHost(const Tensor& list_begin, cudaStream_t stream) {
  std::vector<int32_t> begins(static_cast<size_t>(list_begin.rows()));
  const size_t bytes = begins.size() * sizeof(int32_t);
  if (!Scratch::IsOnDevice(list_begin.data)) {
    std::memcpy(begins.data(), list_begin.data, bytes);
    return begins;
  }
  LOUPE_CUDA(cudaMemcpyAsync(begins.data(), list_begin.data, bytes, cudaMemcpyDeviceToHost, stream));
  LOUPE_CUDA(cudaStreamSynchronize(stream));
  return begins;
}

// The dense kernel reads no codes.
bool AnyCoded(const Tensor& pages, cudaStream_t stream) {
  std::vector<PageRef> refs(static_cast<size_t>(pages.rows()));
  if (refs.empty()) return false;
  LOUPE_CUDA(cudaMemcpyAsync(refs.data(), pages.data, refs.size() * sizeof(PageRef), cudaMemcpyDefault, stream));
  LOUPE_CUDA(cudaStreamSynchronize(stream));
  return std::any_of(refs.begin(), refs.end(), [](const PageRef& ref) {
    return IsCoded(static_cast<Codec>(ref.key_codec)) || IsCoded(static_cast<Codec>(ref.value_codec));
  });
}

// All rows for `heads` heads from p.first_head on, whose columns come and go through pinned memory.
void SumHeads(Sums p, const Tensor& q, int heads, bool dense, const SumAttentionArgs& args, const std::vector<int32_t>& begins,
              CudaContext context) {
  const Workspace& w = *context.workspace;
  const int64_t column = int64_t{p.max_pages} * kPageEntries;
  const auto bytes_of = [&](int head) {
    const size_t g = static_cast<size_t>((p.first_head + head) / p.heads_per_group);
    return static_cast<size_t>(begins[g + 1] - begins[g]) * kPageEntries * sizeof(float);
  };
  const auto total = static_cast<size_t>(heads * column) * sizeof(float);
  for (int h = 0; h < heads; ++h) std::memcpy(w.staging + h * column, args.columns[p.first_head + h], bytes_of(h));
  LOUPE_CUDA(cudaMemcpyAsync(p.columns, w.staging, total, cudaMemcpyHostToDevice, context.stream));
  for (int64_t row = 0; row < q.rows(); row += kSumRows) {
    Sums part = p;
    part.rows = static_cast<int>(std::min<int64_t>(kSumRows, q.rows() - row));
    part.q = q.as<char>() + row * q.row_stride * DTypeBytes(q.dtype);
    part.visible_begin += row * p.begin_stride, part.visible_end += row * p.end_stride;
    dense ? SumAttentionDense(part, heads, context.stream) : SumAttentionPlain(part, heads, context.stream);
  }
  LOUPE_CUDA(cudaMemcpyAsync(w.staging, p.columns, total, cudaMemcpyDeviceToHost, context.stream));
  LOUPE_CUDA(cudaStreamSynchronize(context.stream));
  for (int h = 0; h < heads; ++h) std::memcpy(args.columns[p.first_head + h], w.staging + h * column, bytes_of(h));
}

}  // namespace

void SumAttentionCuda(const SumAttentionArgs& args, CudaContext context) {
  if (args.q.rows() == 0) return;
  Sums p = {};
  const int heads = static_cast<int>(args.q.shape[1]), groups = static_cast<int>(args.visible_begin.shape[1]);
  LOUPE_CHECK(groups > 0 && heads % groups == 0) << heads << " query heads, " << groups << " kv heads";
  p.heads_per_group = heads / groups, p.dim = static_cast<int>(args.q.shape[2]);
  const std::vector<int32_t> begins = BeginsOnHost(args.list_begin, context.stream);
  for (int g = 0; g < groups; ++g) p.max_pages = std::max(p.max_pages, begins[static_cast<size_t>(g) + 1] - begins[static_cast<size_t>(g)]);
  if (p.max_pages == 0) return;
  Scratch scratch(*context.workspace, context.stream);
  const Tensor q = scratch.OnDevice(args.q), begin = scratch.OnDevice(args.visible_begin), end = scratch.OnDevice(args.visible_end);
  LOUPE_CHECK(reinterpret_cast<uintptr_t>(q.data) % 16 == 0 && q.row_stride * DTypeBytes(q.dtype) % 16 == 0)
      << "query rows must be 16-byte aligned";
  p.q_stride = q.row_stride, p.q_half = q.dtype == DType::kF16;
  p.visible_begin = begin.as<int32_t>(), p.begin_stride = begin.row_stride;
  p.visible_end = end.as<int32_t>(), p.end_stride = end.row_stride;
  p.pages = scratch.OnDevice(args.pages, sizeof(PageRef)).as<PageRef>();
  p.list_begin = scratch.OnDevice(args.list_begin).as<int32_t>();
  p.sinks = args.sinks.defined() ? scratch.OnDevice(args.sinks).as<float>() : nullptr;
  p.mean_keys = args.mean_keys.defined() ? scratch.OnDevice(args.mean_keys).as<float>() : nullptr;
  p.arena = static_cast<const uint8_t*>(args.arena);
  p.scale_log2e = args.scale * kLog2e;
  const int64_t column_bytes = int64_t{p.max_pages} * kPageEntries * 4;
  const int64_t head_bytes = column_bytes + kSumRows * (p.max_pages + 1) * int64_t{sizeof(float2)};
  const int64_t fit = std::min(scratch.left() / (head_bytes + 256), context.workspace->staging_bytes / column_bytes);
  LOUPE_CHECK_GE(fit, 1) << "scratch memory for lists of " << p.max_pages << " pages";
  const int at_a_time = static_cast<int>(std::min<int64_t>(fit, heads));
  p.columns = static_cast<float*>(scratch.Take(at_a_time * column_bytes));
  p.partials = static_cast<float2*>(scratch.Take(at_a_time * kSumRows * int64_t{p.max_pages} * int64_t{sizeof(float2)}));
  p.stats = static_cast<float2*>(scratch.Take(at_a_time * kSumRows * int64_t{sizeof(float2)}));
  const bool dense = !context.exact && (p.dim == 64 || p.dim == 128) && !AnyCoded(args.pages, context.stream);
  for (p.first_head = 0; p.first_head < heads; p.first_head += at_a_time)
    SumHeads(p, q, std::min(at_a_time, heads - p.first_head), dense, args, begins, context);
}

}  // namespace loupe::cuda
