// Column sums of attention over dense pages, on tensor cores.
//
// Two passes over the scores, since a row's denominator is only known when the row is complete. In both a block has one page
// of one query head, its four warps 16 entries each, whose keys stay in registers; tiles of rows come through shared memory.
// The first pass leaves a maximum and a sum a (row, page), a small kernel merges them in the order of the pages, the second
// pass adds probabilities to the columns, row by row. So a row's bits depend on its list alone, and rows may be cut into
// calls in any way. f32 queries are split into two fp16 numbers, which keeps 22 bits of them.
//
// Flops 4 D a (row, head, entry in sight); compute is the limit.
#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pages.cuh"
#include "kernels/cuda/sum_inputs.cuh"

namespace loupe::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileRows = 32;
constexpr float kNone = -INFINITY;

template <int kDim, class Q>
struct Shared {
  static constexpr int kParts = sizeof(Q) == 2 ? 1 : 2;  // of a query: what fp16 holds, and the rest
  static constexpr int kStride = kDim + 8;               // so that rows use different banks
  alignas(16) __half q[kParts][kTileRows][kStride];
  int begin[kTileRows], end[kTileRows];  // in sight, counted from the page's first entry
  float2 stats[kTileRows];               // second pass: maximum and 1 / sum
  float2 parts[kTileRows][kWarps];       // first pass: maximum and sum
};

// The page of a block.
struct Page {
  int number, count;
  PageView view;
  __device__ Page(const Sums& p, int group) : number(blockIdx.x), count(0) {
    const int first = p.list_begin[group];
    if (number >= p.list_begin[group + 1] - first) return;
    view = PageView(p.pages[first + number]);
    count = view.count;
  }
};

// Bounds of a tile's rows; false if none of them sees the page.
template <int kDim, class Q>
__device__ bool LoadBounds(const Sums& p, const Page& page, int group, int tile, Shared<kDim, Q>& s) {
  bool sees = false;
  if (threadIdx.x < kTileRows) {
    const int row = tile + threadIdx.x, start = page.number * kPageEntries;
    const bool in = row < p.rows;
    const int begin = in ? max(p.visible_begin[row * p.begin_stride + group] - start, 0) : 0;
    const int end = in ? min(p.visible_end[row * p.end_stride + group] - start, page.count) : 0;
    s.begin[threadIdx.x] = begin, s.end[threadIdx.x] = end;
    sees = begin < end;
  }
  return __syncthreads_or(sees);
}

template <int kDim, class Q>
__device__ void LoadTile(const Sums& p, int head, int tile, Shared<kDim, Q>& s) {
  constexpr int kEach = 8 / Shared<kDim, Q>::kParts, kPieces = kDim / kEach;  // 16 bytes at a time
  const int rows = min(kTileRows, p.rows - tile);
#pragma unroll 4
  for (int i = threadIdx.x; i < kTileRows * kPieces; i += kThreads) {
    const int row = i / kPieces, d = i % kPieces * kEach;
    const Q* from = static_cast<const Q*>(p.q) + (tile + row) * p.q_stride + head * kDim + d;
    const uint4 x = row < rows ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    if constexpr (Shared<kDim, Q>::kParts == 1) {
      *reinterpret_cast<uint4*>(&s.q[0][row][d]) = x;
    } else {
      const float a[4] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
      const uint2 high = {PackHalf(a[0], a[1]), PackHalf(a[2], a[3])};
      *reinterpret_cast<uint2*>(&s.q[0][row][d]) = high;
      *reinterpret_cast<uint2*>(&s.q[1][row][d]) = {PackHalf(a[0] - LowHalf(high.x), a[1] - HighHalf(high.x)),
                                                    PackHalf(a[2] - LowHalf(high.y), a[3] - HighHalf(high.y))};
    }
  }
}

// The warp's 16 keys as the A operand of a product, and their log-weights.
template <int kDim>
struct Keys {
  uint32_t a[kDim / 16][4];
  float beta[2];

  __device__ void Load(const Sums& p, const Page& page) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kBlockEntries + lane / 4;
    const bool in = first < page.view.entries;  // a small page has 16
    const uint8_t* from = p.arena + page.view.offset + first * 16 + lane % 4 * 4;
    const int chunk = page.view.entries * 16;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[k][i] = in ? *reinterpret_cast<const uint32_t*>(from + (2 * k + i / 2) * chunk + i % 2 * 128) : 0;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int e = first + 8 * i;
      beta[i] = page.view.log_weights && e < page.count
                    ? reinterpret_cast<const float*>(p.arena + page.view.LogWeightOffset(kDim))[e] * kLog2e
                    : 0;
    }
  }

  // x[2 i + j]: entry g + 8 i against row `rows` + 2 t + j, in log2; -inf where it is not in sight.
  template <class Q>
  __device__ void Scores(const Sums& p, const Shared<kDim, Q>& s, int rows, float (&x)[4]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    x[0] = x[1] = x[2] = x[3] = 0;
#pragma unroll
    for (int part = 0; part < Shared<kDim, Q>::kParts; ++part) {
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        const __half* q = &s.q[part][rows + g][16 * k + 2 * t];
        Mma(x, a[k], *reinterpret_cast<const uint32_t*>(q), *reinterpret_cast<const uint32_t*>(q + 8));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = rows + 2 * t + i % 2, e = static_cast<int>(threadIdx.x) / 32 * kBlockEntries + g + i / 2 * 8;
      x[i] = e >= s.begin[row] && e < s.end[row] ? fmaf(x[i], p.scale_log2e, beta[i / 2]) : kNone;
    }
  }
};

__device__ __forceinline__ float ExpDifference(float x, float top) { return top == kNone ? 0 : exp2f(x - top); }

template <int kDim, class Q>
__global__ void __launch_bounds__(kThreads) RowSumsKernel(const Sums p) {
  __shared__ Shared<kDim, Q> s;
  GridWait();
  const int head = p.first_head + blockIdx.y, group = head / p.heads_per_group;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Page page(p, group);
  if (page.count == 0) return;
  Keys<kDim> keys;
  keys.Load(p, page);
  for (int tile = 0; tile < p.rows; tile += kTileRows) {
    __syncthreads();
    if (!LoadBounds(p, page, group, tile, s)) continue;
    LoadTile(p, head, tile, s);
    __syncthreads();
    for (int rows = 0; rows < kTileRows; rows += 8) {
      float x[4];
      keys.Scores(p, s, rows, x);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float top = fmaxf(x[j], x[2 + j]);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
        float sum = ExpDifference(x[j], top) + ExpDifference(x[2 + j], top);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        if (lane < 4) s.parts[rows + 2 * lane + j][warp] = {top, sum};
      }
    }
    __syncthreads();
    const int row = tile + threadIdx.x;
    if (threadIdx.x >= kTileRows || row >= p.rows) continue;
    const float2* parts = s.parts[threadIdx.x];
    float top = kNone, sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, parts[w].x);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += parts[w].y * ExpDifference(parts[w].x, top);
    p.partials[(int64_t{blockIdx.y} * p.rows + row) * p.max_pages + page.number] = {top, sum};
  }
}

// A warp a (row, head): the pages that the row sees.
__global__ void __launch_bounds__(kThreads) RowStatsKernel(const Sums p) {
  GridWait();
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const int head = p.first_head + blockIdx.y, group = head / p.heads_per_group;
  const int begin = p.visible_begin[row * p.begin_stride + group], end = p.visible_end[row * p.end_stride + group];
  const float2* parts = p.partials + (int64_t{blockIdx.y} * p.rows + row) * p.max_pages;
  float top = kNone, sum = 0;
  if (begin < end) {
    for (int page = begin / kPageEntries + lane; page <= (end - 1) / kPageEntries; page += 32) {
      const float2 part = parts[page];
      const float both = fmaxf(top, part.x);
      sum = sum * ExpDifference(top, both) + part.y * ExpDifference(part.x, both);
      top = both;
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_down_sync(~0u, top, offset), other_sum = __shfl_down_sync(~0u, sum, offset);
    const float both = fmaxf(top, other);
    sum = sum * ExpDifference(top, both) + other_sum * ExpDifference(other, both);
    top = both;
  }
  if (lane != 0) return;
  if (p.sinks) {
    const float sink = p.sinks[head] * kLog2e, both = fmaxf(top, sink);
    sum = sum * ExpDifference(top, both) + ExpDifference(sink, both);
    top = both;
  }
  p.stats[int64_t{blockIdx.y} * p.rows + row] = top == kNone ? float2{0, 0} : float2{top, 1 / sum};
}

template <int kDim, class Q>
__global__ void __launch_bounds__(kThreads) ColumnsKernel(const Sums p) {
  __shared__ Shared<kDim, Q> s;
  GridWait();
  const int head = p.first_head + blockIdx.y, group = head / p.heads_per_group;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Page page(p, group);
  if (page.count == 0) return;
  Keys<kDim> keys;
  keys.Load(p, page);
  float* column = p.columns + (int64_t{blockIdx.y} * p.max_pages + page.number) * kPageEntries +
                  threadIdx.x / 32 * kBlockEntries + g;
  float sums[2] = {column[0], column[8]};
  for (int tile = 0; tile < p.rows; tile += kTileRows) {
    __syncthreads();
    if (!LoadBounds(p, page, group, tile, s)) continue;
    LoadTile(p, head, tile, s);
    if (threadIdx.x < kTileRows)
      s.stats[threadIdx.x] = tile + threadIdx.x < p.rows ? p.stats[int64_t{blockIdx.y} * p.rows + tile + threadIdx.x] : float2{0, 0};
    __syncthreads();
    for (int rows = 0; rows < kTileRows; rows += 8) {
      float x[4];
      keys.Scores(p, s, rows, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 stats = s.stats[rows + 2 * t + i % 2];
        x[i] = x[i] == kNone ? 0 : exp2f(x[i] - stats.x) * stats.y;
      }
      // Rows in their order, though four lanes have two each: every lane adds its own, the turn's one is right.
#pragma unroll
      for (int turn = 0; turn < 4; ++turn) {
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[i] = __shfl_sync(~0u, sums[i] + x[2 * i] + x[2 * i + 1], turn, 4);
      }
    }
  }
  if (t == 0) column[0] = sums[0], column[8] = sums[1];
}

template <int kDim, class Q>
void LaunchSums(const Sums& p, int heads, cudaStream_t stream) {
  const dim3 pages(static_cast<unsigned>(p.max_pages), static_cast<unsigned>(heads));
  Launch(RowSumsKernel<kDim, Q>, pages, kThreads, 0, stream, p);
  Launch(RowStatsKernel, dim3(Blocks(p.rows, kWarps), static_cast<unsigned>(heads)), kThreads, 0, stream, p);
  Launch(ColumnsKernel<kDim, Q>, pages, kThreads, 0, stream, p);
}

}  // namespace

void SumAttentionDense(const Sums& p, int heads, cudaStream_t stream) {
  if (p.dim == 128) {
    p.q_half ? LaunchSums<128, __half>(p, heads, stream) : LaunchSums<128, float>(p, heads, stream);
  } else {
    LOUPE_CHECK_EQ(p.dim, 64);
    p.q_half ? LaunchSums<64, __half>(p, heads, stream) : LaunchSums<64, float>(p, heads, stream);
  }
}

}  // namespace loupe::cuda
