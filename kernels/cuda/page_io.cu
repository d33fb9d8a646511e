// Writing pages: new keys and values into their slots, and entries from page to page. Memory is the limit: an appended
// entry reads 4 D or 8 D bytes and writes 4 D, a copied one reads and writes 4 D; both are small beside the products.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pages.cuh"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ void Store(uint8_t* plane, int bytes, int index, float x) {
  if (bytes == 4) {
    reinterpret_cast<float*>(plane)[index] = x;
  } else {
    reinterpret_cast<__half*>(plane)[index] = FromFloat<__half>(x);
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

// Queries and keys are rotated, keys and values stored: a thread a pair of dimensions of one head, query heads first, then
// keys, then values. The angle is reduced in double: at position 131,072 a float's last bit is a hundredth of a turn.
template <class T>
struct RotateAppend {
  T *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  int heads, groups, dim, pairs;
  const int32_t* positions;
  const float* frequencies;
  float scale;
  bool interleaved;
  const PageRef* slots;
  int64_t slot_stride;
  uint8_t* arena;
};

template <class T>
__global__ void RotateAppendKernel(const RotateAppend<T> p) {
  const int i = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x), half = p.dim / 2;
  const int head = i / half, pair = i % half;
  if (head >= p.heads + 2 * p.groups) return;
  const bool is_query = head < p.heads, is_value = head >= p.heads + p.groups;
  const bool rotates = !is_value && pair < p.pairs;
  const double frequency = rotates ? static_cast<double>(p.frequencies[pair]) : 0;
  GridWait();
  GridLaunch();
  if (is_query && !rotates) return;
  const int64_t row = blockIdx.x;
  const int g = is_value ? head - p.heads - p.groups : head - p.heads;
  T* x = is_query   ? p.q + row * p.q_stride + head * p.dim
         : is_value ? p.v + row * p.v_stride + g * p.dim
                    : p.k + row * p.k_stride + g * p.dim;
  const bool apart = rotates && !p.interleaved;
  const int first = apart ? pair : 2 * pair, second = apart ? pair + p.pairs : 2 * pair + 1;
  float a = ToFinite(x[first]), b = ToFinite(x[second]);
  if (rotates) {
    constexpr double kTurn = 6.283185307179586476925286766559;
    const double angle = p.positions[row] * frequency;
    float sine, cosine;
    sincosf(static_cast<float>(angle - kTurn * rint(angle * (1 / kTurn))), &sine, &cosine);
    const float turned = p.scale * (a * cosine - b * sine);
    b = p.scale * (a * sine + b * cosine), a = turned;
  }
  if (is_query) {
    x[first] = FromFloat<T>(a), x[second] = FromFloat<T>(b);
    return;
  }
  const PageView page(p.slots[row * p.slot_stride + g]);
  uint8_t* plane = p.arena + (is_value ? page.ValueOffset(p.dim) : page.offset);
  const int bytes = is_value ? page.value_bytes : page.key_bytes;
  Store(plane, bytes, ElementIndex(page.count, first, page.entries), a);
  Store(plane, bytes, ElementIndex(page.count, second, page.entries), b);
  if (page.log_weights && is_value && pair == 0) reinterpret_cast<float*>(p.arena + page.LogWeightOffset(p.dim))[page.count] = 0;
}

// A warp carries the copies of one run, in order.
__global__ void CopyKernel(const SlotCopy* copies, const int32_t* run_begin, int num_runs, int dim, uint8_t* arena) {
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
      const int units = copies[i].entries * chunk_bytes / 16;  // of neighbours in a chunk
      for (int j = lane; j < dim / kChunkDims * units; j += 32) {
        const int chunk = j / units, part = j % units;
        *reinterpret_cast<uint4*>(y + (chunk * to.entries + to.count) * chunk_bytes + part * 16) =
            *reinterpret_cast<const uint4*>(x + (chunk * from.entries + from.count) * chunk_bytes + part * 16);
      }
    }
    for (int e = lane; e < copies[i].entries; e += 32) {
      const float beta =
          from.log_weights ? reinterpret_cast<const float*>(arena + from.LogWeightOffset(dim))[from.count + e] : 0;
      if (to.log_weights) reinterpret_cast<float*>(arena + to.LogWeightOffset(dim))[to.count + e] = beta;
      if (!to.log_weights && beta != 0) asm volatile("trap;");  // it would be lost: our own bug, and the device's end
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
  const Rotation& r = args.rotation;
  const auto launch = [&](auto type) {
    using In = decltype(type);
    if (r.q.defined()) {
      const int heads = static_cast<int>(r.q.shape[1]);
      const RotateAppend<In> p{r.q.as<In>(), args.k.as<In>(), args.v.as<In>(), r.q.row_stride, args.k.row_stride, args.v.row_stride,
                               heads, groups, dim, static_cast<int>(r.frequencies.rows()), r.positions.as<int32_t>(),
                               r.frequencies.as<float>(), r.scale, r.interleaved, args.slots.as<PageRef>(), args.slots.row_stride,
                               static_cast<uint8_t*>(args.arena)};
      const dim3 grid(static_cast<unsigned>(args.k.rows()), Blocks((heads + 2 * groups) * dim / 2, kThreads));
      Launch(RotateAppendKernel<In>, grid, kThreads, 0, context.stream, p);
      return;
    }
    Launch(AppendKernel<In>, Blocks(total, kThreads), kThreads, 0, context.stream, args.k.as<In>(), args.k.row_stride,
           args.v.as<In>(), args.v.row_stride, args.slots.as<PageRef>(), args.slots.row_stride, groups, dim, total,
           static_cast<uint8_t*>(args.arena));
  };
  args.k.dtype == DType::kF16 ? launch(__half{}) : launch(float{});
}

namespace {

// Whether `next` moves the neighbour of what `copy` has moved last.
bool GoesOn(const SlotCopy& copy, const EntryCopy& next) {
  return copy.from.unit == next.from.unit && copy.to.unit == next.to.unit && copy.from.unit != copy.to.unit &&
         copy.from.count + copy.entries == next.from.count && copy.to.count + copy.entries == next.to.count;
}
bool SharesAPage(const SlotCopy& a, const EntryCopy& b) {
  return a.to.unit == b.to.unit || a.from.unit == b.from.unit || a.to.unit == b.from.unit || a.from.unit == b.to.unit;
}

}  // namespace

// Copies happen in the order given where they can meet: those that follow each other and share a page with the run
// before them belong to it. Runs are different lists, whose pages nobody else writes; they go side by side.
void CopyEntriesCuda(const CopyEntriesArgs& args, CudaContext context) {
  Workspace& w = *context.workspace;
  for (int64_t done = 0; done < args.num_copies;) {
    LOUPE_CUDA(cudaEventSynchronize(w.copies_taken));  // the staging area may be in use still
    int num = 0, num_runs = 0;
    for (; done < args.num_copies; ++done) {
      const EntryCopy& copy = args.copies[done];
      SlotCopy* before = num > 0 ? &w.copies_host[num - 1] : nullptr;
      if (before && GoesOn(*before, copy)) {
        ++before->entries;
        continue;
      }
      if (num == w.num_copies) break;
      if (!before || !SharesAPage(*before, copy)) w.run_begin_host[num_runs++] = num;
      w.copies_host[num++] = {copy.from, copy.to, 1};
    }
    w.run_begin_host[num_runs] = num;
    LOUPE_CUDA(cudaMemcpyAsync(w.copies, w.copies_host, static_cast<size_t>(num) * sizeof(SlotCopy), cudaMemcpyHostToDevice,
                               context.stream));
    LOUPE_CUDA(cudaMemcpyAsync(w.run_begin, w.run_begin_host, static_cast<size_t>(num_runs + 1) * 4,
                               cudaMemcpyHostToDevice, context.stream));
    LOUPE_CUDA(cudaEventRecord(w.copies_taken, context.stream));
    Launch(CopyKernel, Blocks(num_runs, kThreads / 32), kThreads, 0, context.stream, w.copies, w.run_begin, num_runs,
           args.head_dim, static_cast<uint8_t*>(args.arena));
  }
}

}  // namespace loupe::cuda
