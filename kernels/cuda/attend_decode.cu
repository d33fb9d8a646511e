// Decode attention over ragged lists of dense pages, one launch for lists of any length (decode_tasks.cuh says how it is
// shared out). A block's four warps take the four 16-entry blocks of each page; copies run ahead of the arithmetic across the
// borders of tasks.
//
// Bytes: every visible page once, 4 D an entry; flops 4 R D an entry: memory is the limit.
// Products run on m16n8k16: entries (or head dimensions) are the 16 rows, the query heads of the group the 8 columns.
#include <algorithm>

#include "kernels/cuda/decode_tasks.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pages.cuh"

namespace loupe::cuda {
namespace {

constexpr int kWarps = 4;
template <int kHeadDim>
struct Shared : TaskTable {
  static constexpr int kDim = kHeadDim, kWarps = cuda::kWarps, kBuffers = 2;
  alignas(128) uint8_t stages[kWarps][Shape<kDim>::kStages][Shape<kDim>::kStage];
  float merge[kBuffers][kHeads][Shape<kDim>::kMergeRow];
  float merge_max[kWarps][kHeads], merge_sum[kWarps][kHeads];
  uint64_t refs[kWarps][Shape<kDim>::kStages];
};

// The warp's 16 entries of a page into a stage: keys, then values, as [D / 8][16][8].
template <int kDim>
__device__ __forceinline__ void IssueCopy(const Decode& p, const PageRef& ref, int warp, int lane, uint32_t stage) {
  const PageView page(ref);
  if (warp * kBlockEntries >= page.count) return;
  const uint8_t* keys =
      p.arena + page.offset + warp * kBlockEntries * 16 + lane % 16 * 16 + int64_t{lane / 16} * page.entries * 16;
  const uint8_t* values = keys + int64_t{page.entries} * kDim * 2;
  const int step = 2 * page.entries * 16;
#pragma unroll
  for (int i = 0; i < Shape<kDim>::kPlane / 512; ++i) CopyAsync16(stage + i * 512 + lane * 16, keys + i * step);
#pragma unroll
  for (int i = 0; i < Shape<kDim>::kPlane / 512; ++i)
    CopyAsync16(stage + Shape<kDim>::kPlane + i * 512 + lane * 16, values + i * step);
}

template <int kDim, class Q>
__device__ void LoadQuery(const Decode& p, const Task& task, uint32_t (&q)[Shape<kDim>::kSteps][2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Q* at = static_cast<const Q*>(p.q) + task.row * p.q_stride + (task.head + g) * kDim + 2 * t;
#pragma unroll
  for (int k = 0; k < Shape<kDim>::kSteps; ++k) {
    q[k][0] = g < task.num_heads ? LoadPair(at + 16 * k) : 0;
    q[k][1] = g < task.num_heads ? LoadPair(at + 16 * k + 8) : 0;
  }
}

// Adds the warps' triples up in a fixed order; the result lies in merge[0], merge_max[0], merge_sum[0].
template <int kDim>
__device__ void MergeWarps(Shared<kDim>& s, Running<kDim>& r) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) r.sum[j] += __shfl_xor_sync(~0u, r.sum[j], offset);
    if (g == 0) s.merge_max[warp][2 * t + j] = r.max[j], s.merge_sum[warp][2 * t + j] = r.sum[j];
  }
  __syncthreads();
  float factor[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float top = kNone;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, s.merge_max[w][2 * t + j]);
    factor[j] = top == kNone ? 0 : exp2f(r.max[j] - top);
  }
  // Warps 0 and 1 write, 2 and 3 add.
  for (int round = 0; round < 2; ++round) {
    if (warp / 2 == round) {
#pragma unroll
      for (int i = 0; i < Shape<kDim>::kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& at = s.merge[warp % 2][2 * t + j % 2][16 * i + g + j / 2 * 8];
          const float value = r.out[i][j] * factor[j % 2];
          at = round == 0 ? value : at + value;
        }
      }
    }
    __syncthreads();
  }
}

// In log2, of entries g and g + 8 from the page's entry `first` on, which has `count` more.
template <int kDim>
__device__ __forceinline__ float2 LogWeights(const Decode& p, const PageRef& ref, int first, int count) {
  if (!ref.log_weights) return {0, 0};
  const int g = threadIdx.x % 32 / 4;
  const float* betas = reinterpret_cast<const float*>(p.arena + PageView(ref).LogWeightOffset(kDim)) + first;
  return {g < count ? betas[g] * kLog2e : 0, g + 8 < count ? betas[g + 8] * kLog2e : 0};
}

template <int kDim, class Q, class Out>
__global__ void __launch_bounds__(kWarps * 32, Shape<kDim>::kBlocksPerSm) DecodeKernel(const Decode p) {
  using S = Shape<kDim>;
  extern __shared__ uint8_t memory[];
  Shared<kDim>& s = *reinterpret_cast<Shared<kDim>*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Tables and all pages but the last of a list were written before the kernel before this one, which is the least that has
  // ended by now: every kernel waits for those before it, then lets the next one start.
  if (!p.early) GridWait();
  ScanTasks(p, s);
  const int total = s.prefix[p.num_tasks];
  const int per_block = (total + gridDim.x - 1) / gridDim.x;
  const int begin = min(total, per_block * static_cast<int>(blockIdx.x)), end = min(total, begin + per_block);
  if (begin >= end) {
    if (p.early) GridWait();
    WriteEmpty<Shared<kDim>, Out>(p, s);
    return;
  }

  Walk<Shared<kDim>> now(p, s, begin, end), ahead = now;
  int filled = 0;
  bool waited = !p.early;
  const auto issue = [&] {
    if (!ahead.done()) {
      if (!waited && ahead.at.page + 1 == s.pages[ahead.at.task]) GridWait(), waited = true;
      const PageRef ref = LoadRef(p, s, ahead.at.task, ahead.at.page);
      const int stage = filled++ % S::kStages;
      if (lane == 0) s.refs[warp][stage] = *reinterpret_cast<const uint64_t*>(&ref);
      IssueCopy<kDim>(p, ref, warp, lane, SharedAddress(s.stages[warp][stage]));
      if (++ahead.at.page == ahead.at.page_end) ahead.Open(ahead.at.next_unit);
    }
    CopyCommit();
  };
  for (int i = 0; i < S::kStages - 1; ++i) issue();
  if (!waited) GridWait(), waited = true;
  WriteEmpty<Shared<kDim>, Out>(p, s);

  int used = 0;
  Running<kDim> r;
  uint32_t q[S::kSteps][2];
  while (!now.done()) {
    const Task task(p, now.at.task);
    LoadQuery<kDim, Q>(p, task, q);
    r.Clear();
    const int in_list = InList(p, s, now.at.task);
    const int visible_begin = p.visible_begin[int64_t{task.row} * p.groups + task.group];
    const int visible_end = p.visible_end[int64_t{task.row} * p.groups + task.group];
    for (int page = now.at.page; page < now.at.page_end; ++page) {
      CopyWait<S::kStages - 2>();
      __syncwarp();
      const int stage = used++ % S::kStages;
      const PageRef ref = *reinterpret_cast<const PageRef*>(&s.refs[warp][stage]);
      int low = 0, high = ref.count;
      if (page < in_list) low = max(0, visible_begin - page * kPageEntries), high = min(high, visible_end - page * kPageEntries);
      low -= warp * kBlockEntries, high -= warp * kBlockEntries;
      if (high > max(low, 0) && low < kBlockEntries) {
        const float2 betas = LogWeights<kDim>(p, ref, warp * kBlockEntries, high);
        r.Add(q, SharedAddress(s.stages[warp][stage]), low, high, p.scale_log2e, betas.x, betas.y);
      }
      __syncwarp();
      issue();
    }
    if (now.at.next_unit >= end) GridLaunch();  // all pages of the block have been read
    MergeWarps(s, r);
    EndSegment<Shared<kDim>, Out>(p, s, now.at, per_block);
    now.Open(now.at.next_unit);
  }
}

template <int kDim, class Q, class Out>
void LaunchDecode(const Decode& p, const CudaContext& context) {
  constexpr int kBytes = sizeof(Shared<kDim>);
  static const bool ready = [] {
    LOUPE_CUDA(cudaFuncSetAttribute(DecodeKernel<kDim, Q, Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return true;
  }();
  (void)ready;
  const auto blocks = static_cast<unsigned>(std::min(Shape<kDim>::kBlocksPerSm * context.num_sms, Shape<kDim>::kMaxSegments));
  Launch(DecodeKernel<kDim, Q, Out>, blocks, kWarps * 32, kBytes, context.stream, p);
}

template <int kDim>
void DispatchTypes(const Decode& p, DType q, DType out, const CudaContext& context) {
  if (q == DType::kF16 && out == DType::kF16)
    return LaunchDecode<kDim, __half, __half>(p, context);
  LOUPE_CHECK(q == DType::kF32 && out == DType::kF32) << "queries and outputs are both f32 or both fp16";
  LaunchDecode<kDim, float, float>(p, context);
}

}  // namespace

int64_t DecodePartialFloats(int num_sms, bool deterministic) {
  const int64_t slots = deterministic ? int64_t{kMaxTasks} * kMaxPieces : int64_t{2} * kMaxBlocksPerSm * num_sms;
  return slots * PartialFloats<128>();
}
int64_t DecodeCounters() { return kMaxTasks; }

// FAILED_PRECONDITION: a device for which this build has no code, or whose blocks get too little shared memory.
absl::Status CheckDevice(const cudaDeviceProp& device) {
  cudaFuncAttributes kernel = {};
  if (const cudaError_t e = cudaFuncGetAttributes(&kernel, DecodeKernel<128, __half, __half>); e != cudaSuccess) {
    cudaGetLastError();
    return absl::FailedPreconditionError(absl::StrCat(
        "this build has no code for ", device.name, ", compute capability ", device.major, ".", device.minor, " (", cudaGetErrorName(e),
        "); build with -DCMAKE_CUDA_ARCHITECTURES=", device.major, device.minor, ", or use --device cpu"));
  }
  if (sizeof(Shared<128>) > device.sharedMemPerBlockOptin) {
    return absl::FailedPreconditionError(absl::StrCat(device.name, " has ", device.sharedMemPerBlockOptin,
                                                      " bytes of shared memory a block, attention needs ", sizeof(Shared<128>),
                                                      "; use --device cpu"));
  }
  return absl::OkStatus();
}

void AttendDecode(const AttendArgs& args, int64_t first, int64_t num, CudaContext context) {
  EachLaunch(MakeDecode(args, num, context), first, num, [&](const Decode& p) {
    if (p.dim == 128) return DispatchTypes<128>(p, args.q.dtype, args.out.dtype, context);
    LOUPE_CHECK_EQ(p.dim, 64);
    DispatchTypes<64>(p, args.q.dtype, args.out.dtype, context);
  });
}

}  // namespace loupe::cuda
