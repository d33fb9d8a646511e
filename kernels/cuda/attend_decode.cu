// Decode attention over ragged page lists, one launch for lists of any length.
//
// A task is (decode row, kv head, up to 8 of its query heads). The pages of all tasks form one line, which the blocks
// of a full machine share evenly: each block finds its part from the lists' lengths by itself, so there is no plan on
// the host and no second launch. A block's four warps take the four 16-entry blocks of each page; copies run ahead of
// the arithmetic across the borders of tasks. A task that several blocks share leaves one triple (max, sum, output) a
// block; the last to arrive merges them in list order.
//
// In deterministic mode a list is cut by its own length alone, so a row's bits do not depend on its company.
//
// Bytes: every visible page once, 4 D an entry; flops 4 R D an entry: memory is the limit.
// Products run on m16n8k16: entries (or head dimensions) are the 16 rows, the query heads of the group the 8 columns.
#include <algorithm>

#include "kernels/cuda/attend_inputs.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/decode_softmax.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pages.cuh"

namespace loupe::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kHeads = 8;       // query heads of a task: the columns of a product
constexpr int kMaxTasks = 512;  // of a launch: what a block keeps prefix sums of
constexpr int kMaxPieces = 32;  // of a list in deterministic mode
constexpr int kMinPiecePages = 4;

struct Decode : AttendInputs {
  float* partials;
  int32_t* counters;
  float* row_lse;
  int first_row, num_tasks;
  int parts;  // ceil(R / 8)
  bool deterministic;
  bool early;  // every sequence has this one row in the step: of its pages only the last has just been written
};

template <int kDim>
struct Shared {
  alignas(128) uint8_t stages[kWarps][Shape<kDim>::kStages][Shape<kDim>::kStage];
  float merge[2][kHeads][Shape<kDim>::kMergeRow];  // and a merge's factors
  float merge_max[kWarps][kHeads], merge_sum[kWarps][kHeads];
  uint64_t refs[kWarps][Shape<kDim>::kStages];
  int32_t prefix[kMaxTasks + 1];  // units before a task
  int32_t pages[kMaxTasks];       // of a task
  int32_t first_page[kMaxTasks];  // of its list, in the table
  int32_t scan[kWarps];
  int32_t last_arrived;
};

// Where a task's inputs lie.
struct Task {
  int row, group, head, num_heads, list;
  __device__ Task(const Decode& p, int task) {
    const int per_row = p.groups * p.parts;
    row = p.first_row + task / per_row;
    group = task % per_row / p.parts;
    const int part = task % p.parts;
    head = group * p.heads + part * kHeads;
    num_heads = min(kHeads, p.heads - part * kHeads);
    list = p.row_sequence[row] * p.groups + group;
  }
};

__device__ __forceinline__ int UnitPages(const Decode& p, int pages) {
  return p.deterministic ? max(kMinPiecePages, (pages + kMaxPieces - 1) / kMaxPieces) : 1;
}

// A run of pages of one task that goes into one triple.
struct Segment {
  int task, page, page_end;
  int unit, next_unit;
};

// Walks the segments of units [unit, end).
template <int kDim>
struct Walk {
  const Decode& p;
  const Shared<kDim>& s;
  int end;
  Segment at;

  __device__ Walk(const Decode& decode, const Shared<kDim>& shared, int unit, int unit_end)
      : p(decode), s(shared), end(unit_end) {
    int low = 0, high = p.num_tasks;  // the last task that begins at `unit` or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (s.prefix[middle] <= unit ? low : high) = middle;
    }
    at.task = low;
    Open(unit);
  }
  __device__ bool done() const { return at.unit >= end; }
  __device__ void Open(int unit) {
    at.unit = unit;
    if (unit >= end) return;
    while (s.prefix[at.task + 1] <= unit) ++at.task;
    const int begin = s.prefix[at.task], pages = s.pages[at.task];
    const int unit_pages = UnitPages(p, pages);
    const int last = p.deterministic ? unit + 1 : min(end, s.prefix[at.task + 1]);
    at.page = (unit - begin) * unit_pages;
    at.page_end = min((last - begin) * unit_pages, pages);
    at.next_unit = last;
  }
};

// Exclusive prefix sums of the tasks' units into shared memory.
template <int kDim>
__device__ void ScanTasks(const Decode& p, Shared<kDim>& s) {
  constexpr int kEach = kMaxTasks / (kWarps * 32);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int units[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int task = threadIdx.x * kEach + i;
    units[i] = 0;
    if (task >= p.num_tasks) continue;
    const Task t(p, task);
    const int first = p.list_begin[t.list];
    int pages = p.PagesOf(t.list);
    s.first_page[task] = first;
    if (p.extra_pages) pages += p.extra_counts[t.list];
    if (p.visible_end[int64_t{t.row} * p.groups + t.group] <= p.visible_begin[int64_t{t.row} * p.groups + t.group] &&
        !p.extra_pages)
      pages = 0;
    s.pages[task] = pages;
    const int unit_pages = UnitPages(p, pages);
    units[i] = (pages + unit_pages - 1) / unit_pages;
    sum += units[i];
  }
  int before = sum;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(~0u, before, offset);
    if (lane >= offset) before += other;
  }
  if (lane == 31) s.scan[warp] = before;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before += s.scan[w];
  before -= sum;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int task = threadIdx.x * kEach + i;
    if (task > p.num_tasks) break;
    s.prefix[task] = before;
    before += units[i];
  }
  if (threadIdx.x == kWarps * 32 - 1 && p.num_tasks == kMaxTasks) s.prefix[kMaxTasks] = before;
  __syncthreads();
}

// Pages of a task that belong to its list; extra pages follow them.
template <int kDim>
__device__ __forceinline__ int InList(const Decode& p, const Shared<kDim>& s, int task) {
  return s.pages[task] - (p.extra_pages ? p.extra_counts[Task(p, task).list] : 0);
}

template <int kDim>
__device__ __forceinline__ PageRef LoadRef(const Decode& p, const Shared<kDim>& s, int task, int page) {
  const PageRef* at = p.pages + s.first_page[task] + page;
  if (p.extra_pages) {
    const int in_list = InList(p, s, task);
    if (page >= in_list) at = p.extra_pages + Task(p, task).list * p.extra_stride + (page - in_list);
  }
  const uint64_t bits = *reinterpret_cast<const uint64_t*>(at);
  return *reinterpret_cast<const PageRef*>(&bits);
}

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

// Entries in the first `num` pages.
__device__ int CountEntries(const PageRef* pages, int num) {
  int count = 0;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < num; i += 32) count += pages[i].count;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) count += __shfl_xor_sync(~0u, count, offset);
  return count;
}

template <class Out>
__device__ __forceinline__ void StoreOut(const Decode& p, const Task& task, int head, int dim, int d, float value) {
  static_cast<Out*>(p.out)[task.row * p.out_stride + int64_t{task.head + head} * dim + d] = FromFloat<Out>(value);
}

// Sum and output with the sink, from a finished triple.
template <int kDim, class Out>
__device__ __forceinline__ void Finish(const Decode& p, const Task& task, int head, int d, float max, float sum,
                                       float out) {
  float top = max;
  if (p.sinks) {
    const float sink = p.sinks[task.head + head] * kLog2e;
    top = fmaxf(max, sink);
    if (top != kNone) sum = sum * exp2f(max - top) + exp2f(sink - top), out *= exp2f(max - top);
  }
  StoreOut<Out>(p, task, head, kDim, d, max == kNone ? 0 : out / sum);
  if (p.row_lse && d == 0)
    p.row_lse[int64_t{task.row} * p.groups * p.heads + task.head + head] = top == kNone ? 0 : top + log2f(sum);
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

__device__ __forceinline__ void TotalOf(const float (&maxes)[kWarps][kHeads], const float (&sums)[kWarps][kHeads],
                                        int head, float* max, float* sum) {
  *max = kNone, *sum = 0;
  for (int w = 0; w < kWarps; ++w) *max = fmaxf(*max, maxes[w][head]);
  for (int w = 0; w < kWarps; ++w) *sum += *max == kNone ? 0 : sums[w][head] * exp2f(maxes[w][head] - *max);
}

template <int kDim>
constexpr int PartialFloats() {
  return kHeads * (kDim + 2);
}

// Where the triples of a task's segments are kept, in list order. A block shares at most its first and its last task
// with others, so it has two places; only the block in which a task begins may keep it in its second.
struct Places {
  float* first;
  float* second;  // of the segment after the first; the rest follow at `stride`
  int stride, segments;
  __device__ float* at(int n) const { return n == 0 ? first : second + int64_t{n - 1} * stride; }
};

template <int kDim>
__device__ Places PlacesOf(const Decode& p, const Shared<kDim>& s, int task, int per_block) {
  const int begin = s.prefix[task], end = s.prefix[task + 1];
  Places places;
  if (p.deterministic) {
    places.segments = end - begin;
    places.stride = PartialFloats<kDim>();
    places.first = p.partials + int64_t{task} * kMaxPieces * PartialFloats<kDim>();
    places.second = places.first + places.stride;
  } else {
    const int block = begin / per_block;
    places.segments = (end - 1) / per_block - block + 1;
    places.stride = 2 * PartialFloats<kDim>();
    places.first = p.partials + int64_t{2 * block + (begin > block * per_block ? 1 : 0)} * PartialFloats<kDim>();
    places.second = p.partials + int64_t{2 * (block + 1)} * PartialFloats<kDim>();
  }
  return places;
}

// Merges a task's triples in list order. Runs in the block that arrived last; `merge` holds the segments' factors.
template <int kDim, class Out>
__device__ void MergeSegments(const Decode& p, Shared<kDim>& s, const Task& task, const Places& places) {
  float* factors = &s.merge[0][0][0];  // [segments][heads]
  const int heads = task.num_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int head = warp; head < heads; head += kWarps) {
    float max = kNone;
    for (int n = lane; n < places.segments; n += 32) {
      const float m = __ldcg(places.at(n) + kHeads * kDim + head);
      factors[n * heads + head] = m;
      max = fmaxf(max, m);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, offset));
    float sum = 0;
    for (int n = lane; n < places.segments; n += 32) {
      const float factor = max == kNone ? 0 : exp2f(factors[n * heads + head] - max);
      factors[n * heads + head] = factor;
      sum += factor * __ldcg(places.at(n) + kHeads * kDim + kHeads + head);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) s.merge_max[0][head] = max, s.merge_sum[0][head] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x * 4; i < heads * kDim; i += kWarps * 32 * 4) {
    const int head = i / kDim;
    float4 out = {0, 0, 0, 0};
#pragma unroll 8
    for (int n = 0; n < places.segments; ++n) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(places.at(n) + i));
      const float factor = factors[n * heads + head];
      out.x = fmaf(factor, x.x, out.x), out.y = fmaf(factor, x.y, out.y), out.z = fmaf(factor, x.z, out.z),
      out.w = fmaf(factor, x.w, out.w);
    }
    const float values[4] = {out.x, out.y, out.z, out.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      Finish<kDim, Out>(p, task, head, i % kDim + j, s.merge_max[0][head], s.merge_sum[0][head], values[j]);
  }
}

// Ends a segment: the whole task is written out, a part of it is kept, and the last part merges all.
template <int kDim, class Out>
__device__ void EndSegment(const Decode& p, Shared<kDim>& s, const Segment& segment, int per_block, Running<kDim>& r) {
  MergeWarps(s, r);
  const Task task(p, segment.task);
  const Places places = PlacesOf(p, s, segment.task, per_block);
  const int values = task.num_heads * kDim, begin = s.prefix[segment.task];
  const int n = p.deterministic ? segment.unit - begin : segment.unit / per_block - begin / per_block;
  float* partial = places.at(n);
  for (int i = threadIdx.x; i < values; i += kWarps * 32) {
    const int head = i / kDim, d = i % kDim;
    const float out = s.merge[0][head][d] + s.merge[1][head][d];
    if (places.segments > 1) __stcg(partial + i, out);
    if (places.segments > 1 && d > 0) continue;
    float max, sum;
    TotalOf(s.merge_max, s.merge_sum, head, &max, &sum);
    if (places.segments == 1) {
      Finish<kDim, Out>(p, task, head, d, max, sum, out);
    } else {
      __stcg(partial + kHeads * kDim + head, max);
      __stcg(partial + kHeads * kDim + kHeads + head, sum);
    }
  }
  if (places.segments > 1) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) s.last_arrived = atomicAdd(p.counters + segment.task, 1) == places.segments - 1;
    __syncthreads();
    if (s.last_arrived) {
      __threadfence();
      if (threadIdx.x == 0) p.counters[segment.task] = 0;
      MergeSegments<kDim, Out>(p, s, task, places);
    }
  }
  __syncthreads();
}

// Tasks without a page give zeros.
template <int kDim, class Out>
__device__ void WriteEmpty(const Decode& p, const Shared<kDim>& s) {
  for (int i = blockIdx.x; i < p.num_tasks; i += gridDim.x) {
    if (s.pages[i] > 0) continue;
    const Task task(p, i);
    for (int j = threadIdx.x; j < task.num_heads * kDim; j += kWarps * 32)
      Finish<kDim, Out>(p, task, j / kDim, j % kDim, kNone, 0, 0);
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
    WriteEmpty<kDim, Out>(p, s);
    return;
  }

  Walk<kDim> now(p, s, begin, end), ahead = now;
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
  WriteEmpty<kDim, Out>(p, s);

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
    // Whether entries are in sight is known without counting where even full pages could not reach the bounds.
    const bool counted = visible_begin > 0 || int64_t{kPageEntries} * min(now.at.page_end, in_list) > visible_end;
    int start = counted ? CountEntries(p.pages + s.first_page[now.at.task], min(now.at.page, in_list)) : 0;
    for (int page = now.at.page; page < now.at.page_end; ++page) {
      CopyWait<S::kStages - 2>();
      __syncwarp();
      const int stage = used++ % S::kStages;
      const PageRef ref = *reinterpret_cast<const PageRef*>(&s.refs[warp][stage]);
      int low = 0, high = ref.count;
      if (counted && page < in_list) low = max(0, visible_begin - start), high = min(high, visible_end - start);
      start += ref.count;
      low -= warp * kBlockEntries, high -= warp * kBlockEntries;
      if (high > max(low, 0) && low < kBlockEntries) {
        const float2 betas = LogWeights<kDim>(p, ref, warp * kBlockEntries, high);
        r.Add(q, SharedAddress(s.stages[warp][stage]), low, high, p.scale_log2e, betas.x, betas.y);
      }
      __syncwarp();
      issue();
    }
    if (now.at.next_unit >= end) GridLaunch();  // all pages of the block have been read
    EndSegment<kDim, Out>(p, s, now.at, per_block, r);
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
  Decode p = {};
  SetInputs(args, &p);
  p.parts = (p.heads + kHeads - 1) / kHeads;
  p.partials = context.workspace->partials;
  p.counters = context.workspace->counters;
  const bool probabilities = args.page_mass.defined() || args.entry_probability.defined();
  p.row_lse = probabilities ? context.workspace->row_lse : nullptr;
  p.deterministic = context.deterministic;
  p.early = num == args.q.rows() && num * p.groups == args.list_begin.rows() - 1 && !args.extra_pages.defined();
  const int per_row = p.groups * p.parts;
  LOUPE_CHECK_LE(per_row, kMaxTasks) << "kv heads times parts of a group";
  const int64_t rows_per_launch = kMaxTasks / per_row;
  for (int64_t row = first; row < first + num; row += rows_per_launch) {
    p.first_row = static_cast<int>(row);
    p.num_tasks = static_cast<int>(std::min(rows_per_launch, first + num - row)) * per_row;
    if (p.dim == 128) {
      DispatchTypes<128>(p, args.q.dtype, args.out.dtype, context);
    } else {
      LOUPE_CHECK_EQ(p.dim, 64);
      DispatchTypes<64>(p, args.q.dtype, args.out.dtype, context);
    }
  }
}

}  // namespace loupe::cuda
