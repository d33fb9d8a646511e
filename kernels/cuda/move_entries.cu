// Entries from page to page: as they are, or from format to format. Memory is the limit of a copy; a transcoded entry takes
// about two turns of a warp besides, half of what memory would allow.
#include <algorithm>
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/spherical.cuh"

namespace loupe::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxDim = 256;

// A warp copies the codes and the scale of one entry. `codes`: the warp's own [D] bytes.
__device__ void CopyCodes(const Side& from, const Side& to, int dim, uint8_t* codes) {
  const int lane = threadIdx.x % 32;
  const CodedEntry entry = from.Entry(dim);
  for (int d = lane; d < dim; d += 32) codes[d] = static_cast<uint8_t>(ReadCode(entry, d));
  __syncwarp();
  StoreCodes(to.Entry(dim), codes);
  if (lane == 0) to.scales[to.slot] = from.scales[from.slot];
  __syncwarp();
}

// Beta of a slot, 0 where its page has none; into a page without a plane only 0 may go.
__device__ void CopyLogWeight(const PageView& from, const PageView& to, int e, int dim, uint8_t* arena) {
  const float beta = from.log_weights ? reinterpret_cast<const float*>(arena + from.LogWeightOffset(dim))[from.count + e] : 0;
  if (to.log_weights) reinterpret_cast<float*>(arena + to.LogWeightOffset(dim))[to.count + e] = beta;
  if (!to.log_weights && beta != 0) asm volatile("trap;");  // it would be lost: our own bug, and the device's end
}

// Neighbours of one dense plane.
__device__ void CopyDense(const Side& from, const Side& to, int entries, int dim) {
  const int chunk_bytes = kChunkDims * (from.codec == Codec::kF32 ? 4 : 2);
  const int units = entries * chunk_bytes / 16;  // of neighbours in a chunk
  for (int j = threadIdx.x % 32; j < dim / kChunkDims * units; j += 32) {
    const int chunk = j / units, part = j % units;
    *reinterpret_cast<uint4*>(to.plane + (chunk * to.entries + to.slot) * chunk_bytes + part * 16) =
        *reinterpret_cast<const uint4*>(from.plane + (chunk * from.entries + from.slot) * chunk_bytes + part * 16);
  }
}

__device__ void CopyBlock(const Side& from, const Side& to, int dim) {
  const int lane = threadIdx.x % 32, units = dim * BitsOf(from.codec) / 8;
  const auto* x = reinterpret_cast<const uint4*>(from.Entry(dim).block);
  auto* y = reinterpret_cast<uint4*>(to.Entry(dim).block);
  for (int j = lane; j < units; j += 32) y[j] = x[j];
  if (lane < kBlockEntries) to.scales[to.slot + lane] = from.scales[from.slot + lane];
}

// A warp carries the copies of one run, in order.
__global__ void CopyKernel(const SlotCopy* copies, const int32_t* run_begin, int num_runs, int dim, uint8_t* arena) {
  __shared__ uint8_t codes[kWarps][kMaxDim];
  GridWait();
  GridLaunch();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int run = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (run >= num_runs) return;
  for (int i = run_begin[run]; i < run_begin[run + 1]; ++i) {
    const PageView from(copies[i].from), to(copies[i].to);
    const int entries = copies[i].entries;
    for (const bool key : {true, false}) {
      Side x(from, key, dim, arena), y(to, key, dim, arena);
      if (!IsCoded(x.codec)) {
        CopyDense(x, y, entries, dim);
        continue;
      }
      for (int e = 0; e < entries;) {
        const bool block = x.slot % kBlockEntries == 0 && y.slot % kBlockEntries == 0 && entries - e >= kBlockEntries;
        block ? CopyBlock(x, y, dim) : CopyCodes(x, y, dim, codes[warp]);
        const int done = block ? kBlockEntries : 1;
        x.slot += done, y.slot += done, e += done;
      }
    }
    for (int e = lane; e < entries; e += 32) CopyLogWeight(from, to, e, dim, arena);
    __syncwarp();
  }
}

// Entries that go into one block of 16, one after the other.
struct Group {
  int32_t first, count;
};

// A block a group, a warp an entry and side at a time. Whole coded blocks are put together in shared memory.
template <int kPer>
__global__ void __launch_bounds__(32 * kWarps)
    TranscodeKernel(const EntryTranscode* entries, const Group* groups, int dim, uint8_t* arena, const float* mean_keys, int32_t* faults) {
  __shared__ uint8_t codes[kWarps][kPer * 32];
  __shared__ alignas(16) uint8_t blocks[2][kBlockEntries * kPer * 32];
  GridWait();
  GridLaunch();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Group group = groups[blockIdx.x];
  const bool whole = group.count == kBlockEntries;
  for (int i = warp; i < 2 * group.count; i += kWarps) {
    const EntryTranscode& entry = entries[group.first + i / 2];
    const bool key = i % 2 == 0;
    const PageView from(entry.from), to(entry.to);
    const Side x(from, key, dim, arena);
    Side y(to, key, dim, arena);
    if (whole && IsCoded(y.codec)) y.plane = blocks[key ? 0 : 1] - (y.Entry(dim).block - y.plane);
    if (x.codec == y.codec && IsCoded(x.codec)) {
      CopyCodes(x, y, dim, codes[warp]);
    } else {
      const float* mean = mean_keys ? mean_keys + int64_t{entry.list} * dim : nullptr;
      float values[kPer];
      LoadSide(x, dim, mean, values);
      const bool finite = StoreSide(y, dim, mean, codes[warp], values);
      if (!finite && faults && lane == 0) atomicAdd(faults, 1);
    }
    if (!key && lane == 0) CopyLogWeight(from, to, 0, dim, arena);
  }
  if (!whole) return;
  __syncthreads();
  for (const bool key : {true, false}) {
    const Side y(PageView(entries[group.first].to), key, dim, arena);
    if (!IsCoded(y.codec)) continue;
    const auto* from = reinterpret_cast<const uint4*>(blocks[key ? 0 : 1]);
    auto* to = reinterpret_cast<uint4*>(y.Entry(dim).block);
    for (int j = threadIdx.x; j < dim * BitsOf(y.codec) / 8; j += 32 * kWarps) to[j] = from[j];
  }
}

// Whether `next` moves the neighbour of what `copy` has moved last.
bool GoesOn(const SlotCopy& copy, const EntryCopy& next) {
  return copy.from.unit == next.from.unit && copy.to.unit == next.to.unit && copy.from.unit != copy.to.unit &&
         copy.from.count + copy.entries == next.from.count && copy.to.count + copy.entries == next.to.count;
}
bool SharesAPage(const SlotCopy& a, const EntryCopy& b) {
  return a.to.unit == b.to.unit || a.from.unit == b.from.unit || a.to.unit == b.from.unit || a.from.unit == b.to.unit;
}

// The entries as groups, whose numbers count from `first`.
std::vector<Group> GroupByBlock(const EntryTranscode* entries, int64_t num) {
  std::vector<Group> groups;
  for (int64_t i = 0; i < num; ++i) {
    const PageRef& to = entries[i].to;
    if (i > 0 && to.unit == entries[i - 1].to.unit && to.count == entries[i - 1].to.count + 1 && to.count % kBlockEntries != 0) {
      ++groups.back().count;
    } else {
      groups.push_back({static_cast<int32_t>(i), 1});
    }
  }
  return groups;
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
    Launch(CopyKernel, Blocks(num_runs, kWarps), 32 * kWarps, 0, context.stream, w.copies, w.run_begin, num_runs,
           args.head_dim, static_cast<uint8_t*>(args.arena));
  }
}

// Entries travel to the device 28 bytes each at most; its copy lives in scratch memory, in the stream's order.
void TranscodeEntriesCuda(const TranscodeEntriesArgs& args, CudaContext context) {
  const int dim = args.head_dim;
  LOUPE_CHECK(dim > 0 && dim % kChunkDims == 0 && dim <= kMaxDim) << "head size " << dim;
  const Workspace& w = *context.workspace;
  const int64_t room = w.scratch_bytes / static_cast<int64_t>(sizeof(EntryTranscode) + sizeof(Group)) - 256;
  for (int64_t done = 0; done < args.num_entries;) {
    const int64_t num = std::min(args.num_entries - done, room);
    const std::vector<Group> groups = GroupByBlock(args.entries + done, num);
    auto* entries = reinterpret_cast<EntryTranscode*>(w.scratch);
    const auto bytes = static_cast<size_t>(num) * sizeof(EntryTranscode);
    auto* there = reinterpret_cast<Group*>(w.scratch + (bytes + 255) / 256 * 256);
    LOUPE_CUDA(cudaMemcpyAsync(entries, args.entries + done, bytes, cudaMemcpyHostToDevice, context.stream));
    LOUPE_CUDA(cudaMemcpyAsync(there, groups.data(), groups.size() * sizeof(Group), cudaMemcpyHostToDevice, context.stream));
    const auto launch = [&](auto kernel) {
      Launch(kernel, static_cast<unsigned>(groups.size()), 32 * kWarps, 0, context.stream, entries, there, dim,
             static_cast<uint8_t*>(args.arena), args.mean_keys.defined() ? args.mean_keys.as<float>() : nullptr,
             args.faults.defined() ? args.faults.as<int32_t>() : nullptr);
    };
    const int per = CoordinatesOf(dim);
    per == 2 ? launch(TranscodeKernel<2>) : per == 4 ? launch(TranscodeKernel<4>) : launch(TranscodeKernel<8>);
    done += num;
  }
}

}  // namespace loupe::cuda
