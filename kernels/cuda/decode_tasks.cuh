// How decode attention shares its work out, whatever the pages' formats (attend_decode.cu, attend_coded.cu).
//
// A task is (decode row, kv head, up to 8 of its query heads). The pages of all tasks form one line, which the blocks
// of a full machine share evenly: each block finds its part from the lists' lengths by itself, so there is no plan on
// the host and no second launch. A task that several blocks share leaves one triple (max, sum, output) a block; the last to
// arrive merges them in list order.
//
// In deterministic mode a list is cut by its own length alone, so a row's bits do not depend on its company.
//
// Functions are templates over a kernel's shared memory S: a TaskTable with S::kDim, S::kWarps and
//   float merge[kBuffers][8][kMergeRow]         the block's output, as the sum of the buffers; a merge's factors
//   float merge_max[kWarps][8], merge_sum[kWarps][8]
#pragma once

#include <algorithm>

#include "kernels/cuda/attend_inputs.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/decode_softmax.cuh"

namespace loupe::cuda {

inline constexpr int kMaxTasks = 512;  // of a launch: what a block keeps prefix sums of
inline constexpr int kMaxPieces = 32;  // of a list in deterministic mode
inline constexpr int kMinPiecePages = 4;

struct Decode : AttendInputs {
  float* partials;
  int32_t* counters;
  float* row_lse;
  int first_row, num_tasks;
  int parts;  // ceil(R / 8)
  bool deterministic;
  bool early;  // every sequence has this one row in the step: of its pages only the last has just been written
};

// What a block knows of a launch's tasks.
struct TaskTable {
  int32_t prefix[kMaxTasks + 1];  // units before a task
  int32_t pages[kMaxTasks];       // of a task
  int32_t first_page[kMaxTasks];  // of its list, in the table
  int32_t scan[8];
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
template <class S>
struct Walk {
  const Decode& p;
  const S& s;
  int end;
  Segment at;

  __device__ Walk(const Decode& decode, const S& shared, int unit, int unit_end)
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
template <class S>
__device__ void ScanTasks(const Decode& p, S& s) {
  constexpr int kWarps = S::kWarps, kEach = (kMaxTasks + kWarps * 32 - 1) / (kWarps * 32);
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
  if (kEach * kWarps * 32 == kMaxTasks && threadIdx.x == kWarps * 32 - 1 && p.num_tasks == kMaxTasks) s.prefix[kMaxTasks] = before;
  __syncthreads();
}

// Pages of a task that belong to its list; extra pages follow them.
template <class S>
__device__ __forceinline__ int InList(const Decode& p, const S& s, int task) {
  return s.pages[task] - (p.extra_pages ? p.extra_counts[Task(p, task).list] : 0);
}

template <class S>
__device__ __forceinline__ PageRef LoadRef(const Decode& p, const S& s, int task, int page) {
  const PageRef* at = p.pages + s.first_page[task] + page;
  if (p.extra_pages) {
    const int in_list = InList(p, s, task);
    if (page >= in_list) at = p.extra_pages + Task(p, task).list * p.extra_stride + (page - in_list);
  }
  const uint64_t bits = *reinterpret_cast<const uint64_t*>(at);
  return *reinterpret_cast<const PageRef*>(&bits);
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

template <int kWarps>
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

template <class S>
__device__ Places PlacesOf(const Decode& p, const S& s, int task, int per_block) {
  const int begin = s.prefix[task], end = s.prefix[task + 1];
  Places places;
  if (p.deterministic) {
    places.segments = end - begin;
    places.stride = PartialFloats<S::kDim>();
    places.first = p.partials + int64_t{task} * kMaxPieces * PartialFloats<S::kDim>();
    places.second = places.first + places.stride;
  } else {
    const int block = begin / per_block;
    places.segments = (end - 1) / per_block - block + 1;
    places.stride = 2 * PartialFloats<S::kDim>();
    places.first = p.partials + int64_t{2 * block + (begin > block * per_block ? 1 : 0)} * PartialFloats<S::kDim>();
    places.second = p.partials + int64_t{2 * (block + 1)} * PartialFloats<S::kDim>();
  }
  return places;
}

// Merges a task's triples in list order. Runs in the block that arrived last; `merge` holds the segments' factors.
template <class S, class Out>
__device__ void MergeSegments(const Decode& p, S& s, const Task& task, const Places& places) {
  float* factors = &s.merge[0][0][0];  // [segments][heads]
  constexpr int kDim = S::kDim, kWarps = S::kWarps;
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

// Ends a segment, whose warps' triples have been merged: the whole task is written out, a part of it is kept, and the last part merges all.
template <class S, class Out>
__device__ void EndSegment(const Decode& p, S& s, const Segment& segment, int per_block) {
  constexpr int kDim = S::kDim, kWarps = S::kWarps;
  const Task task(p, segment.task);
  const Places places = PlacesOf(p, s, segment.task, per_block);
  const int values = task.num_heads * kDim, begin = s.prefix[segment.task];
  const int n = p.deterministic ? segment.unit - begin : segment.unit / per_block - begin / per_block;
  float* partial = places.at(n);
  for (int i = threadIdx.x; i < values; i += kWarps * 32) {
    const int head = i / kDim, d = i % kDim;
    float out = s.merge[0][head][d];
    if constexpr (S::kBuffers == 2) out += s.merge[1][head][d];
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
      MergeSegments<S, Out>(p, s, task, places);
    }
  }
  __syncthreads();
}

// Tasks without a page give zeros.
template <class S, class Out>
__device__ void WriteEmpty(const Decode& p, const S& s) {
  constexpr int kDim = S::kDim, kWarps = S::kWarps;
  for (int i = blockIdx.x; i < p.num_tasks; i += gridDim.x) {
    if (s.pages[i] > 0) continue;
    const Task task(p, i);
    for (int j = threadIdx.x; j < task.num_heads * kDim; j += kWarps * 32)
      Finish<kDim, Out>(p, task, j / kDim, j % kDim, kNone, 0, 0);
  }
}

inline Decode MakeDecode(const AttendArgs& args, int64_t num, const CudaContext& context) {
  Decode p = {};
  SetInputs(args, &p);
  p.parts = (p.heads + kHeads - 1) / kHeads;
  p.partials = context.workspace->partials;
  p.counters = context.workspace->counters;
  const bool probabilities = args.page_mass.defined() || args.entry_probability.defined();
  p.row_lse = probabilities ? context.workspace->row_lse : nullptr;
  p.deterministic = context.deterministic;
  p.early = num == args.q.rows() && num * p.groups == args.list_begin.rows() - 1 && !args.extra_pages.defined();
  return p;
}

// Calls launch(p) for as many rows at a time as a launch takes.
template <class LaunchRows>
void EachLaunch(Decode p, int64_t first, int64_t num, const LaunchRows& launch) {
  const int per_row = p.groups * p.parts;
  LOUPE_CHECK_LE(per_row, kMaxTasks) << "kv heads times parts of a group";
  const int64_t rows_per_launch = kMaxTasks / per_row;
  for (int64_t row = first; row < first + num; row += rows_per_launch) {
    p.first_row = static_cast<int>(row);
    p.num_tasks = static_cast<int>(std::min(rows_per_launch, first + num - row)) * per_row;
    launch(p);
  }
}

}  // namespace loupe::cuda
