// Prompt attention on Hopper: causal over pages, any chunk, any mix of sequences, by wgmma.
//
// A block takes a tile of consecutive prompt rows of one kv head, all query heads of the group packed into its 2 x 64
// product rows, so that a page is read once for all of them. A producer thread copies pages, each one contiguous, into
// a ring; two groups of four warps compute. While a group weighs one page, the product with the next page's keys runs.
// Where a tile holds rows of several sequences it goes over their lists one after the other, and writes only its own
// rows. A row's bits depend on its list alone: masked entries add zeros, and pages come in list order.
//
// Flops 4 D a (query head, entry in sight); compute is the limit. Tiles that see most start first.
#include "kernels/check.h"
#include "kernels/cuda/attend_inputs.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pages.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace loupe::cuda {
namespace {

constexpr int kGroups = 2;      // of four warps that compute
constexpr int kGroupRows = 64;  // rows of a product
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kStages = 4;
constexpr float kNone = -INFINITY;

struct Prompt : AttendInputs {
  int num_rows;
};

struct Stage {
  int start, count;  // number of the page's first entry in the list, and how many it holds; count -1 ends the list
  int extra;
  int64_t log_weights;  // offset of the plane, or -1
};

template <int kDim>
struct Shared {
  alignas(128) uint8_t pages[kStages][2][kPageEntries * kDim * 2];  // keys, values
  uint64_t full[kStages], empty[kStages];
  Stage stages[kStages];
};

// Rows [begin, end) of a tile that belong to one sequence.
struct Part {
  int begin, end, list;
  __device__ static Part At(const Prompt& p, int begin, int tile_end, int group) {
    Part part;
    part.begin = begin;
    const int sequence = p.row_sequence[begin];
    for (part.end = begin + 1; part.end < tile_end && p.row_sequence[part.end] == sequence;) ++part.end;
    part.list = sequence * p.groups + group;
    return part;
  }
};

// ---- the producer: one thread

template <int kDim>
__device__ void CopyPage(const Prompt& p, const PageView& page, uint8_t (&to)[2][kPageEntries * kDim * 2],
                         uint64_t* barrier) {
  const uint8_t* keys = p.arena + page.offset;
  const int plane = page.entries * kDim * 2;
  BarrierExpect(barrier, 2 * plane);
  if (page.entries == kPageEntries) {
    BulkCopy(to[0], keys, 2 * plane, barrier);  // values follow keys, here as there
    return;
  }
  // A small page's chunks of eight dimensions are spread to where those of a large one would lie.
  for (int side = 0; side < 2; ++side) {
    for (int chunk = 0; chunk < kDim / kChunkDims; ++chunk) {
      BulkCopy(to[side] + chunk * kPageEntries * 16, keys + side * plane + chunk * kSmallPageEntries * 16,
               kSmallPageEntries * 16, barrier);
    }
  }
}

template <int kDim>
__device__ void Produce(const Prompt& p, Shared<kDim>& s, int tile_begin, int tile_end, int group) {
  int filled = 0;
  const auto next = [&]() -> int {
    const int stage = filled % kStages;
    if (filled >= kStages) BarrierWait(&s.empty[stage], (filled / kStages + 1) & 1);
    ++filled;
    return stage;
  };
  for (int begin = tile_begin; begin < tile_end;) {
    const Part part = Part::At(p, begin, tile_end, group);
    begin = part.end;
    int first_seen = INT_MAX, last_seen = 0;
    for (int row = part.begin; row < part.end; ++row) {
      first_seen = min(first_seen, p.visible_begin[int64_t{row} * p.groups + group]);
      last_seen = max(last_seen, p.visible_end[int64_t{row} * p.groups + group]);
    }
    const int first = p.list_begin[part.list], in_list = p.PagesOf(part.list);
    const int pages = in_list + (p.extra_pages ? p.extra_counts[part.list] : 0);
    for (int i = 0; i < pages; ++i) {
      const bool extra = i >= in_list;
      const int start = i * kPageEntries;
      const PageView page(extra ? p.extra_pages[part.list * p.extra_stride + i - in_list] : p.pages[first + i]);
      const bool seen = extra || (start + page.count > first_seen && start < last_seen);
      if (seen && page.count > 0) {
        const int stage = next();
        s.stages[stage] = {start, page.count, extra, page.log_weights ? page.LogWeightOffset(kDim) : -1};
        CopyPage<kDim>(p, page, s.pages[stage], &s.full[stage]);
      }
    }
    const int stage = next();
    s.stages[stage].count = -1;
    BarrierArrive(&s.full[stage]);
  }
}

// ---- the groups that compute

// A thread's two rows of the product: (token, query head) pairs, packed head by head.
struct Rows {
  int token[2], head[2];
  int begin[2], end[2];  // entries in sight
  bool mine[2];          // belongs to the part
};

template <int kDim, class Q>
__device__ void LoadQueries(const Prompt& p, const Rows& rows, int group, uint32_t (&q)[kDim / 16][4]) {
  const int t = threadIdx.x % 4;
  const Q* at[2];
  for (int j = 0; j < 2; ++j) {
    at[j] = static_cast<const Q*>(p.q) + rows.token[j] * p.q_stride + (int64_t{group} * p.heads + rows.head[j]) * kDim +
            2 * t;
  }
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[k][i] = rows.mine[i % 2] ? LoadPair(at[i % 2] + 16 * k + i / 2 * 8) : 0;
  }
}

template <int kDim>
__device__ __forceinline__ void ScoresAsync(float (&x)[32], const uint32_t (&q)[kDim / 16][4], const uint8_t* keys) {
  const uint64_t base = MatrixDescriptor(SharedAddress(keys), kPageEntries * 16, 128);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) WgmmaK64(x, q[k], base + (k * 2 * kPageEntries * 16 >> 4), k > 0);
  WgmmaCommit();
}

template <int kDim>
__device__ __forceinline__ void OutputAsync(float (&out)[kDim / 2], const uint32_t (&weights)[4][4],
                                            const uint8_t* values) {
  const uint64_t base = MatrixDescriptor(SharedAddress(values), 128, kPageEntries * 16);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (kDim == 128) {
      WgmmaV128(out, weights[k], base + (k * 256 >> 4), 1);
    } else {
      WgmmaV64(out, weights[k], base + (k * 256 >> 4), 1);
    }
  }
  WgmmaCommit();
}

// Masks what a row does not see and adds log-weights. x[4 j + 2 r + c]: row r, entry 8 j + 2 t + c.
__device__ __forceinline__ void MaskScores(const Prompt& p, const Stage& stage, const Rows& rows, float (&x)[32]) {
  const int t = threadIdx.x % 4;
  int low[2], high[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    low[r] = stage.extra ? 0 : rows.begin[r] - stage.start;
    high[r] = stage.extra ? stage.count : min(stage.count, rows.end[r] - stage.start);
  }
  const float* betas = stage.log_weights >= 0 ? reinterpret_cast<const float*>(p.arena + stage.log_weights) : nullptr;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int e = i / 4 * 8 + 2 * t + i % 2, r = i / 2 % 2;
    // Products are scaled where they are exponentiated, so a log-weight is divided by the scale here.
    if (betas && e < stage.count) x[i] = fmaf(betas[e], kLog2e / p.scale_log2e, x[i]);
    if (e < low[r] || e >= high[r]) x[i] = kNone;
  }
}

template <int kDim>
struct Running {
  float max[2], sum[2];  // of products before scaling; sums of this lane's columns
  float factor[2];       // what brings the output so far to the new maximum
  float out[kDim / 2];

  // Turns the scores of one page into exponentials.
  __device__ __forceinline__ void Exponentiate(float (&x)[32], float scale) {
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = max[r];
#pragma unroll
      for (int i = 0; i < 16; ++i) m = fmaxf(m, x[i / 2 * 4 + 2 * r + i % 2]);
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      base[r] = m == kNone ? 0 : m * scale - kHeadroom;
      factor[r] = m == kNone ? 1 : exp2f((max[r] - m) * scale);  // exactly 1 where the maximum stays
      max[r] = m;
      sum[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int r = i / 2 % 2;
      x[i] = exp2f(fmaf(x[i], scale, -base[r]));
      sum[r] += x[i];
    }
  }
  __device__ __forceinline__ void Rescale() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i] *= factor[i / 2 % 2];
  }
};

// Exponentials as the A operand of the product with the values.
__device__ __forceinline__ void PackWeights(const float (&x)[32], uint32_t (&weights)[4][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) weights[j / 2][j % 2 * 2 + r] = PackHalf(x[4 * j + 2 * r], x[4 * j + 2 * r + 1]);
  }
}

// What lies in slots that are not in use may be anything, and zero times anything is not zero.
template <int kDim>
__device__ void ClearUnused(uint8_t* values, int count) {
  constexpr int kPieces = kDim / kChunkDims;
  for (int i = threadIdx.x % 128; i < kPieces * (kPageEntries - count); i += 128) {
    const int chunk = i % kPieces, e = count + i / kPieces;
    *reinterpret_cast<uint4*>(values + (chunk * kPageEntries + e) * 16) = uint4{0, 0, 0, 0};
  }
}

__device__ __forceinline__ void GroupsBarrier() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

template <int kDim, class Out>
__device__ void Store(const Prompt& p, const Rows& rows, int group, Running<kDim>& r) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float sum = r.sum[j];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    float factor = 1;
    if (p.sinks) {
      const float sink = p.sinks[group * p.heads + rows.head[j]] * kLog2e,
                  mine = r.max[j] * p.scale_log2e - kHeadroom, top = fmaxf(mine, sink);
      if (top != kNone) factor = exp2f(mine - top), sum = sum * factor + exp2f(sink - top);
    }
    factor = r.max[j] == kNone ? 0 : factor / sum;
    if (!rows.mine[j]) continue;
    Out* to = static_cast<Out*>(p.out) + rows.token[j] * p.out_stride +
              (int64_t{group} * p.heads + rows.head[j]) * kDim + 2 * t;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float a = r.out[4 * i + 2 * j] * factor, b = r.out[4 * i + 2 * j + 1] * factor;
      to[8 * i] = FromFloat<Out>(r.max[j] == kNone ? 0 : a);
      to[8 * i + 1] = FromFloat<Out>(r.max[j] == kNone ? 0 : b);
    }
  }
}

template <int kDim, class Q, class Out>
struct Consumer {
  const Prompt& p;
  Shared<kDim>& s;
  const int group;
  int used = 0;
  Rows rows;
  Running<kDim> r;
  uint32_t q[kDim / 16][4];
  int seen_begin, seen_end;  // what every row of the warp sees

  __device__ Consumer(const Prompt& prompt, Shared<kDim>& shared, int kv_head) : p(prompt), s(shared), group(kv_head) {}

  __device__ void Open(const Part& part, int tile_begin, int per_group) {
    const int compute = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
    seen_begin = 0, seen_end = INT_MAX;
    for (int j = 0; j < 2; ++j) {
      const int m = warp * 16 + g + 8 * j, token = tile_begin + compute * per_group + m / p.heads;
      rows.head[j] = m % p.heads;
      rows.mine[j] = m / p.heads < per_group && token >= part.begin && token < part.end;
      rows.token[j] = rows.mine[j] ? token : part.begin;
      const int64_t at = int64_t{rows.token[j]} * p.groups + group;
      rows.begin[j] = p.visible_begin[at], rows.end[j] = p.visible_end[at];
      seen_begin = max(seen_begin, rows.begin[j]), seen_end = min(seen_end, rows.end[j]);
    }
    LoadQueries<kDim, Q>(p, rows, group, q);
    r.max[0] = r.max[1] = kNone, r.sum[0] = r.sum[1] = 0;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) r.out[i] = 0;
  }

  // The next stage, filled; false at the end of the list.
  __device__ bool Next(int* stage) {
    *stage = used % kStages;
    BarrierWait(&s.full[*stage], used / kStages & 1);
    ++used;
    const int count = s.stages[*stage].count;
    if (count < 0) {
      Finished(*stage);
      return false;
    }
    if (count < kPageEntries) {
      if (threadIdx.x < 128) ClearUnused<kDim>(s.pages[*stage][1], count);
      SharedWritesToAsync();
      GroupsBarrier();
    }
    return true;
  }
  __device__ void Release(int stage) {
    __syncwarp();
    if (threadIdx.x % 128 == 0) BarrierArrive(&s.empty[stage]);
  }
  __device__ void Mask(int stage, float (&x)[32]) {
    const Stage& at = s.stages[stage];
    const bool whole = at.count == kPageEntries && at.log_weights < 0 &&
                       (at.extra || (at.start >= seen_begin && at.start + at.count <= seen_end));
    if (!__all_sync(~0u, whole)) MaskScores(p, at, rows, x);
  }

  // The values' product of one page runs while the next page's scores are computed and weighed.
  __device__ void Run() {
    float x[32];
    uint32_t weights[4][4];
    int stage, next;
    if (!Next(&stage)) return;
    ScoresAsync<kDim>(x, q, s.pages[stage][0]);
    WgmmaWait<0>();
    Mask(stage, x);
    r.Exponentiate(x, p.scale_log2e);
    PackWeights(x, weights);
    while (Next(&next)) {
      ScoresAsync<kDim>(x, q, s.pages[next][0]);
      OutputAsync<kDim>(r.out, weights, s.pages[stage][1]);
      WgmmaWait<1>();
      Mask(next, x);
      r.Exponentiate(x, p.scale_log2e);
      WgmmaWait<0>();
      Finished(stage);
      r.Rescale();
      PackWeights(x, weights);
      stage = next;
    }
    OutputAsync<kDim>(r.out, weights, s.pages[stage][1]);
    WgmmaWait<0>();
    Finished(stage);
  }
  // All warps of the group are done with a stage.
  __device__ __forceinline__ void Finished(int stage) {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + static_cast<int>(threadIdx.x) / 128) : "memory");
    Release(stage);
  }
};

template <int kDim, class Q, class Out>
__global__ void __launch_bounds__(kThreads, 1) PromptKernel(const __grid_constant__ Prompt p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t memory[];
  Shared<kDim>& s = *reinterpret_cast<Shared<kDim>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(&s.full[i], 1);
      BarrierInit(&s.empty[i], kGroups);
    }
    BarrierInitFence();
  }
  __syncthreads();
  GridWait();
  GridLaunch();
  const int group = blockIdx.x, per_group = kGroupRows / p.heads, per_tile = kGroups * per_group;
  const int tile = static_cast<int>(gridDim.y - 1 - blockIdx.y);
  const int tile_begin = tile * per_tile, tile_end = min(p.num_rows, tile_begin + per_tile);
  if (threadIdx.x >= 128 * kGroups) {
    GiveRegisters<24>();
    if (threadIdx.x == 128 * kGroups) Produce<kDim>(p, s, tile_begin, tile_end, group);
  } else {
    TakeRegisters<240>();
    Consumer<kDim, Q, Out> consumer(p, s, group);
    for (int begin = tile_begin; begin < tile_end;) {
      const Part part = Part::At(p, begin, tile_end, group);
      begin = part.end;
      consumer.Open(part, tile_begin, per_group);
      consumer.Run();
      Store<kDim, Out>(p, consumer.rows, group, consumer.r);
    }
  }
#endif
}

template <int kDim, class Q, class Out>
void LaunchPrompt(const Prompt& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<kDim>);
  static const bool ready = [] {
    LOUPE_CUDA(cudaFuncSetAttribute(PromptKernel<kDim, Q, Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return true;
  }();
  (void)ready;
  const int per_tile = kGroups * (kGroupRows / p.heads);
  Launch(PromptKernel<kDim, Q, Out>, dim3(static_cast<unsigned>(p.groups), Blocks(p.num_rows, per_tile)), kThreads,
         kBytes, stream, p);
}

}  // namespace

bool AttendPromptIsBuilt(int arch, int heads) { return arch == 90 && heads <= kGroupRows; }

void AttendPrompt(const AttendArgs& args, int64_t num, CudaContext context) {
  Prompt p = {};
  SetInputs(args, &p);
  p.num_rows = static_cast<int>(num);
  const bool half = args.q.dtype == DType::kF16;
  LOUPE_CHECK(half == (args.out.dtype == DType::kF16)) << "queries and outputs are both f32 or both fp16";
  if (args.q.shape[2] == 128) {
    return half ? LaunchPrompt<128, __half, __half>(p, context.stream)
                : LaunchPrompt<128, float, float>(p, context.stream);
  }
  half ? LaunchPrompt<64, __half, __half>(p, context.stream)
       : LaunchPrompt<64, float, float>(p, context.stream);
}

}  // namespace loupe::cuda
