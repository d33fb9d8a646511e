// Writing pages: new keys and values into their slots, and entries from page to page. Memory is the limit: an appended
// entry reads 4 D or 8 D bytes and writes 4 D, a copied one reads and writes 4 D; both are small beside the products.
#include <cstring>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pages.cuh"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 128;

// bf16 that never becomes infinite: f32 values just below its end would round up to it.
__device__ __forceinline__ __nv_bfloat16 ToStored(float x) {
  const float limit = 3.3895313892515355e38f;  // the largest bf16
  return __float2bfloat16(x > limit ? limit : x < -limit ? -limit : x);
}

__device__ __forceinline__ void Store(uint8_t* plane, int bytes, int index, float x) {
  if (bytes == 4) {
    reinterpret_cast<float*>(plane)[index] = x;
  } else {
    reinterpret_cast<__nv_bfloat16*>(plane)[index] = ToStored(x);
  }
}

template <class In>
__global__ void AppendKernel(const In* k, int64_t k_stride, const In* v, int64_t v_stride, const PageRef* slots,
                             int64_t slot_stride, int groups, int dim, int64_t total, uint8_t* arena) {
  GridWait();
  GridLaunch();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= total) return;
  const int d = static_cast<int>(i % dim), g = static_cast<int>(i / dim % groups);
  const int64_t row = i / dim / groups;
  const PageRef ref = slots[row * slot_stride + g];
  const PageView page(ref);
  const int at = ElementIndex(page.count, d, page.entries);
  Store(arena + page.offset, page.key_bytes, at, ToFloat(k[row * k_stride + g * dim + d]));
  Store(arena + page.ValueOffset(dim), page.value_bytes, at, ToFloat(v[row * v_stride + g * dim + d]));
  if (page.log_weights && d == 0) reinterpret_cast<float*>(arena + page.LogWeightOffset(dim))[page.count] = 0;
}

// A warp carries the copies of one run, in order.
__global__ void CopyKernel(const EntryCopy* copies, const int32_t* run_begin, int num_runs, int dim, uint8_t* arena) {
  GridWait();
  GridLaunch();
  const int lane = threadIdx.x % 32;
  const int run = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (run >= num_runs) return;
  for (int i = run_begin[run]; i < run_begin[run + 1]; ++i) {
    const PageView from(copies[i].from), to(copies[i].to);
    for (int side = 0; side < 2; ++side) {
      const uint8_t* x = arena + (side == 0 ? from.offset : from.ValueOffset(dim));
      uint8_t* y = arena + (side == 0 ? to.offset : to.ValueOffset(dim));
      const int chunk_bytes = kChunkDims * (side == 0 ? from.key_bytes : from.value_bytes);
      const int units = chunk_bytes / 16;
      for (int j = lane; j < dim / kChunkDims * units; j += 32) {
        const int chunk = j / units, part = j % units;
        *reinterpret_cast<uint4*>(y + (chunk * to.entries + to.count) * chunk_bytes + part * 16) =
            *reinterpret_cast<const uint4*>(x + (chunk * from.entries + from.count) * chunk_bytes + part * 16);
      }
    }
    if (lane == 0 && to.log_weights) {
      const float beta =
          from.log_weights ? reinterpret_cast<const float*>(arena + from.LogWeightOffset(dim))[from.count] : 0;
      reinterpret_cast<float*>(arena + to.LogWeightOffset(dim))[to.count] = beta;
    }
    if (lane == 0 && !to.log_weights && from.log_weights &&
        reinterpret_cast<const float*>(arena + from.LogWeightOffset(dim))[from.count] != 0) {
      asm volatile("trap;");  // a log-weight would be lost: our own bug, and the device's end
    }
    __syncwarp();
  }
}

}  // namespace

void AppendKvCuda(const AppendKvArgs& args, CudaContext context) {
  const int groups = static_cast<int>(args.k.shape[1]), dim = static_cast<int>(args.k.shape[2]);
  LOUPE_CHECK(dim > 0 && dim % kChunkDims == 0) << "head size " << dim << " is not a multiple of " << kChunkDims;
  const int64_t total = args.k.rows() * groups * dim;
  if (total == 0) return;
  const auto launch = [&](auto type) {
    using In = decltype(type);
    Launch(AppendKernel<In>, Blocks(total, kThreads), kThreads, 0, context.stream, args.k.as<In>(), args.k.row_stride,
           args.v.as<In>(), args.v.row_stride, args.slots.as<PageRef>(), args.slots.row_stride, groups, dim, total,
           static_cast<uint8_t*>(args.arena));
  };
  args.k.dtype == DType::kBF16 ? launch(__nv_bfloat16{}) : launch(float{});
}

// Copies happen in the order given where they can meet: those that follow each other and share a page with the run
// before them belong to it. Runs are different lists, whose pages nobody else writes; they go side by side.
void CopyEntriesCuda(const CopyEntriesArgs& args, CudaContext context) {
  Workspace& w = *context.workspace;
  for (int64_t done = 0; done < args.num_copies;) {
    LOUPE_CUDA(cudaStreamSynchronize(context.stream));  // the staging area may be in use still
    const int64_t num = std::min(args.num_copies - done, w.num_copies);
    int num_runs = 0;
    for (int64_t i = 0; i < num; ++i) {
      const EntryCopy& copy = args.copies[done + i];
      const EntryCopy* before = i > 0 ? &args.copies[done + i - 1] : nullptr;
      const bool follows = before && (copy.to.unit == before->to.unit || copy.from.unit == before->from.unit ||
                                      copy.to.unit == before->from.unit || copy.from.unit == before->to.unit);
      if (!follows) w.run_begin_host[num_runs++] = static_cast<int32_t>(i);
    }
    w.run_begin_host[num_runs] = static_cast<int32_t>(num);
    std::memcpy(w.copies_host, args.copies + done, static_cast<size_t>(num) * sizeof(EntryCopy));
    LOUPE_CUDA(cudaMemcpyAsync(w.copies, w.copies_host, static_cast<size_t>(num) * sizeof(EntryCopy),
                               cudaMemcpyHostToDevice, context.stream));
    LOUPE_CUDA(cudaMemcpyAsync(w.run_begin, w.run_begin_host, static_cast<size_t>(num_runs + 1) * 4,
                               cudaMemcpyHostToDevice, context.stream));
    Launch(CopyKernel, Blocks(num_runs, kThreads / 32), kThreads, 0, context.stream, w.copies, w.run_begin, num_runs,
           args.head_dim, static_cast<uint8_t*>(args.arena));
    done += num;
  }
}

}  // namespace loupe::cuda
