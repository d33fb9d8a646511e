// Decode attention over ragged lists whose pages are dense, coded or both, one launch for lists of any length
// (decode_tasks.cuh says how it is shared out, coded_softmax.cuh how codes become attention).
//
// A warp takes whole pages, every sixth one of its block's run, in pieces of up to 64 entries that fit a slot of shared memory;
// the copy engine brings the next one meanwhile. The query is turned once a segment, what coded values add is turned back once at its end.
// Slots hold codes as they lie in the page: nothing is decoded there.
//
// Bytes: every visible page once; flops 4 R D an entry: memory is the limit, and below 8 bits table look-ups come close to it.
#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/coded_softmax.cuh"
#include "kernels/cuda/decode_tasks.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/spherical.cuh"

namespace loupe::cuda {
namespace {

template <int kHeadDim>
struct Shared : TaskTable {
  using Cut = CodedShape<kHeadDim>;
  static constexpr int kDim = kHeadDim, kWarps = Cut::kWarps, kBuffers = 1;
  alignas(128) uint8_t slots[kWarps][Cut::kSlots][Cut::kSlotBytes];
  union {  // while a segment runs, and when it ends
    Queries<kDim> queries;
    float merge[kBuffers][kHeads][Cut::kMergeRow];
  };
  float merge_max[kWarps][kHeads], merge_sum[kWarps][kHeads];
  uint64_t refs[kWarps][Cut::kSlots];
  uint64_t full[kWarps][Cut::kSlots];
  int32_t largest;  // units of a task

  static constexpr int kMaxSegments = Cut::kMergeRow;  // of a task: whose factors fit `merge`
};

// Turns and rounds the queries of a task. The whole block.
template <int kDim, class Q>
__device__ void PrepareQueries(const Decode& p, const Task& task, Shared<kDim>& s) {
  constexpr int kPer = kDim / 32;
  const int lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < kHeads; head += Shared<kDim>::kWarps) {
    float x[kPer] = {}, mean = 0;
    if (head < task.num_heads) {
      const Q* at = static_cast<const Q*>(p.q) + task.row * p.q_stride + int64_t{task.head + head} * kDim + lane * kPer;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        x[i] = ToFloat(at[i]);
        if (p.mean_keys) mean = fmaf(x[i], p.mean_keys[task.group * kDim + lane * kPer + i], mean);
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; i += 2) {
      const int d = lane * kPer + i;
      s.queries.plain[d / 16][head * 4 + d % 8 / 2][d % 16 / 8] = PackHalf(x[i], x[i + 1]);
    }
    Turn(x, kDim);
    float top = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) top = fmaxf(top, fabsf(x[i]));
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
      mean += __shfl_xor_sync(~0u, mean, offset);
    }
    const float unit = top / 127, inverse = top > 0 ? 127 / top : 0;
    uint32_t high_bytes = 0, low_bytes = 0;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const float y = x[i] * inverse, high = rintf(y);
      const int h = static_cast<int>(high), l = min(static_cast<int>(rintf((y - high) * 256)), 127);
      high_bytes |= (h & 0xff) << 8 * i, low_bytes |= (l & 0xff) << 8 * i;
      sum += 256 * h + l;
    }
    sum = __reduce_add_sync(~0u, sum);
    // Lane l holds dimensions kPer l..: bytes of step d / 32 of lane (head, d % 16 / 4), half d % 32 / 16.
    const int d = lane * kPer;
    auto* operand = reinterpret_cast<uint8_t*>(&s.queries.turned[d / 32][head * 4 + d % 16 / 4][d % 32 / 16]) + d % 4;
    if constexpr (kPer == 4) {
      *reinterpret_cast<uint32_t*>(operand) = high_bytes;
      *reinterpret_cast<uint32_t*>(operand + 8) = low_bytes;
    } else {
      *reinterpret_cast<uint16_t*>(operand) = static_cast<uint16_t>(high_bytes);
      *reinterpret_cast<uint16_t*>(operand + 8) = static_cast<uint16_t>(low_bytes);
    }
    if (lane == 0) {
      s.queries.unit[head] = unit * p.scale_log2e * 0x1p-8f;
      s.queries.shift[head] = 63.5f * static_cast<float>(sum);
      s.queries.mean[head] = mean * p.scale_log2e;
    }
  }
  __syncthreads();
}

// The piece of a page that begins at entry `first` into a slot, blocks as they lie. Lanes 0 to 15 have the keys, the others the
// values: a lane a chunk of eight dense dimensions, or one the codes and one the scales.
template <int kDim>
__device__ __forceinline__ void IssuePiece(const Decode& p, const PageRef& ref, int first, uint8_t* slot, uint64_t* full) {
  const int lane = threadIdx.x % 32, unit = lane % 16, all = PieceBlocks(ref), entries = ref.small ? kSmallPageEntries : kPageEntries;
  const auto key_codec = static_cast<Codec>(ref.key_codec), value_codec = static_cast<Codec>(ref.value_codec);
  // Bytes of 16 entries, and of a plane.
  const int key_block = 2 * kDim * BitsOf(key_codec), value_block = 2 * kDim * BitsOf(value_codec);
  const uint8_t* page = p.arena + int64_t{ref.unit} * kPageAlignment;
  if (all == 4 && !ref.small) {  // such a page lies in its slot as it lies in the arena
    if (lane != 0) return;
    const int bytes = 4 * (key_block + value_block) + 4 * kPageEntries;
    BarrierExpect(full, bytes);
    BulkCopy(slot, page, bytes, full);
    return;
  }
  const int blocks = max(0, min(all, (ref.count - first + kBlockEntries - 1) / kBlockEntries));
  const auto aligned = [](int bytes) { return (bytes + 127) & -128; };
  const int values = aligned(entries / kBlockEntries * key_block), scales = values + aligned(entries / kBlockEntries * value_block);
  const bool is_key = lane < 16;
  const Codec codec = is_key ? key_codec : value_codec;
  const int block = is_key ? key_block : value_block;
  int from = is_key ? 0 : values, to = is_key ? 0 : SlotBytes(key_codec, all, kDim), bytes = 0;
  if (codec == Codec::kDense) {
    from += (unit * entries + first) * 16, to += unit * 256;
    bytes = unit < kDim / kChunkDims ? 256 : 0;
  } else if (codec != Codec::kF32 && unit == 0) {
    from += first / kBlockEntries * block, bytes = blocks * block;
  } else if (codec != Codec::kF32 && unit == 1) {
    from = scales + (!is_key && IsCoded(key_codec) ? 2 * entries : 0) + 2 * first;
    to = SlotScales(ref, kDim) + (is_key ? 0 : 2 * kPageEntries), bytes = 2 * kBlockEntries * blocks;
  }
  const auto total = [&](Codec c, int bytes_of_block) {
    return c == Codec::kF32 ? 0 : bytes_of_block + (IsCoded(c) ? 2 * kBlockEntries : 0);
  };
  if (lane == 0) BarrierExpect(full, blocks * (total(key_codec, key_block) + total(value_codec, value_block)));
  if (bytes > 0 && blocks > 0) BulkCopy(slot + to, page + from, bytes, full);
}

// Sixteen dense keys.
template <int kDim, Codec kCodec>
__device__ __forceinline__ void DenseLogits(const uint8_t* plane, int entries, int first, uint32_t keys, const Queries<kDim>& queries,
                                            float scale, float (&x)[4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  x[0] = x[1] = x[2] = x[3] = 0;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    if constexpr (kCodec == Codec::kDense) {
      LoadMatrices(a, keys + k * 512 + lane * 16);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = LoadPair(reinterpret_cast<const float*>(plane) + ElementIndex(first + g + i % 2 * 8, 16 * k + i / 2 * 8 + 2 * t, entries));
    }
    const uint2 q = *reinterpret_cast<const uint2*>(queries.plain[k][lane]);
    Mma(x, a, q.x, q.y);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] *= scale;
}

// Sixteen f32 values, read where they lie; never in a cache that the engine fills.
template <int kDim>
__device__ __forceinline__ void AddF32(CodedRunning<kDim>& r, const uint8_t* plane, int entries, int first, const uint32_t (&b)[2],
                                       int low, int high) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto* x = reinterpret_cast<const float*>(plane);
  const auto value = [&](int e, int d) { return e >= low && e < high ? x[ElementIndex(first + e, d, entries)] : 0; };
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    uint32_t a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int d = 16 * i + g + j % 2 * 8, e = 2 * t + j / 2 * 8;
      a[j] = PackHalf(value(e, d), value(e + 1, d));
    }
    Mma(r.out[i], a, b[0], b[1]);
  }
}

// Logits of two blocks of keys of 8 bits, or of one block that is not coded.
template <int kDim>
__device__ __forceinline__ void HeavyLogits(const Decode& p, const PageRef& ref, int first, uint32_t keys, uint32_t scales,
                                            const Queries<kDim>& queries, float (&x)[2][4]) {
  const auto codec = static_cast<Codec>(ref.key_codec);
  if (codec == Codec::kS8) {
    CodedLogits<kDim, Codec::kS8>(keys, scales, queries, x);
  } else if (codec == Codec::kDense) {
    DenseLogits<kDim, Codec::kDense>(nullptr, 0, 0, keys, queries, p.scale_log2e, x[0]);
  } else {
    const PageView page(ref);
    DenseLogits<kDim, Codec::kF32>(p.arena + page.offset, page.entries, first, 0, queries, p.scale_log2e, x[0]);
  }
}

// So many blocks of a piece that lies in a slot that one hides another's latency. They begin at block `block` of the piece and
// entry `first` of the page, from where entries [low, high) are in sight.
template <int kDim, int kAtOnce>
__device__ __forceinline__ void AddBlocks(const Decode& p, const PageRef& ref, int block, int first, int low, int high, uint32_t slot,
                                          const Queries<kDim>& queries, CodedRunning<kDim>& r) {
  constexpr bool kLight = kAtOnce == 4;  // of at most 8 bits, keys and values together
  const int g = threadIdx.x % 32 / 4, blocks = PieceBlocks(ref);
  const auto key_codec = static_cast<Codec>(ref.key_codec), value_codec = static_cast<Codec>(ref.value_codec);
  const uint32_t keys = slot + SlotBytes(key_codec, block, kDim);
  const uint32_t key_scales = slot + SlotScales(ref, kDim) + 2 * kBlockEntries * block, value_scales = key_scales + 2 * kPageEntries;
  float x[kAtOnce][4];
  switch (key_codec) {
    case Codec::kS4: CodedLogits<kDim, Codec::kS4>(keys, key_scales, queries, x); break;
    case Codec::kS3: CodedLogits<kDim, Codec::kS3>(keys, key_scales, queries, x); break;
    case Codec::kS2: CodedLogits<kDim, Codec::kS2>(keys, key_scales, queries, x); break;
    default:
      if constexpr (!kLight) HeavyLogits<kDim>(p, ref, first, keys, key_scales, queries, x);
  }
  const bool coded = kLight || IsCoded(value_codec);
  coded ? r.MakeTurned() : r.MakePlain();
  high = min(high, kBlockEntries * (blocks - block));  // what follows the piece is none of it
  const float unit = value_codec == Codec::kS8 ? 1.0f : 0.5f;
  float scales[kAtOnce][2];
#pragma unroll
  for (int b = 0; b < kAtOnce; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) scales[b][i] = coded ? LoadSharedHalf(value_scales + (16 * b + g + 8 * i) * 2) * unit : 1.0f;
  }
  if (ref.log_weights || low > 0 || high < kBlockEntries * kAtOnce) {
    const float* betas = reinterpret_cast<const float*>(p.arena + PageView(ref).LogWeightOffset(kDim)) + first;
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int e = 16 * b + g + 8 * i;
        const bool seen = e >= low && e < high;
        const float beta = seen && ref.log_weights ? betas[e] * kLog2e : 0;
        x[b][2 * i] = seen ? x[b][2 * i] + beta : kNone;
        x[b][2 * i + 1] = seen ? x[b][2 * i + 1] + beta : kNone;
        if (!seen) scales[b][i] = 0;  // a free slot's scale may be anything
      }
    }
  }
  uint32_t weights[kAtOnce][2];
  r.Weigh(x, scales, weights);
  const uint32_t values = slot + SlotBytes(key_codec, blocks, kDim) + SlotBytes(value_codec, block, kDim);
  const auto each = [&](auto add) {
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) add(values + b * 2 * kDim * BitsOf(value_codec), weights[b]);
  };
  switch (value_codec) {
    case Codec::kS4: each([&](uint32_t at, const uint32_t (&b)[2]) { r.Add4(at, b); }); break;
    case Codec::kS3: each([&](uint32_t at, const uint32_t (&b)[2]) { r.template AddPairs<Codec::kS3>(at, b); }); break;
    case Codec::kS2: each([&](uint32_t at, const uint32_t (&b)[2]) { r.template AddPairs<Codec::kS2>(at, b); }); break;
    default:
      if constexpr (!kLight) {
        if (value_codec == Codec::kS8) {
          each([&](uint32_t at, const uint32_t (&b)[2]) { r.Add8(at, b); });
        } else if (value_codec == Codec::kDense) {
          r.AddDense(values, weights[0], low, high);
        } else {
          const PageView page(ref);
          AddF32<kDim>(r, p.arena + page.ValueOffset(kDim), page.entries, first, weights[0], low, high);
        }
      }
  }
}

// The piece that begins at entry `first` of a page, of which [low, high) are in sight, counted from there.
template <int kDim>
__device__ __forceinline__ void AddPiece(const Decode& p, const PageRef& ref, int first, int low, int high, uint32_t slot,
                                         const Queries<kDim>& queries, CodedRunning<kDim>& r) {
  if (PieceBlocks(ref) == 4) {
    if (high > max(low, 0)) AddBlocks<kDim, 4>(p, ref, 0, first, low, high, slot, queries, r);
    return;
  }
  constexpr int kEntries = 2 * kBlockEntries;
#pragma unroll 1
  for (int begin = 0; begin < PieceBlocks(ref) * kBlockEntries; begin += kEntries) {
    if (high <= max(low, begin) || low >= begin + kEntries) continue;
    AddBlocks<kDim, 2>(p, ref, begin / kBlockEntries, first + begin, low - begin, high - begin, slot, queries, r);
  }
}

// Adds the warps' triples up in a fixed order, what coded values gave turned back; the result lies in `merge`.
template <int kDim>
__device__ void MergeWarps(Shared<kDim>& s, CodedRunning<kDim>& r) {
  constexpr int kWarps = Shared<kDim>::kWarps, kPer = kDim / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) r.sum[j] += __shfl_xor_sync(~0u, r.sum[j], offset);
    if (g != 0) continue;
    s.merge_max[warp][2 * t + j] = r.base[j] == kLowest && r.sum[j] == 0 ? kNone : r.base[j];
    s.merge_sum[warp][2 * t + j] = r.sum[j];
  }
  __syncthreads();
  float factor[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float top = kNone;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, s.merge_max[w][2 * t + j]);
    factor[j] = top == kNone ? 0 : Exp2(s.merge_max[warp][2 * t + j] - top);
  }
  r.MakeTurned();
  r.TakeShiftsOff();
  // In each round a warp adds other tiles of 16 dimensions than the others; its own come first in the first.
  for (int round = 0; round < kWarps; ++round) {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      if (i % kWarps != (warp + round) % kWarps) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& at = s.merge[0][2 * t + j % 2][16 * i + g + j / 2 * 8];
        const float value = r.out[i][j] * factor[j % 2];
        at = round == 0 ? value : at + value;
      }
    }
    __syncthreads();
  }
  for (int head = warp; head < kHeads; head += kWarps) {
    float x[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[i] = s.merge[0][head][lane * kPer + i];
    TurnBack(x, kDim);
#pragma unroll
    for (int i = 0; i < kPer; ++i) s.merge[0][head][lane * kPer + i] = x[i];
  }
  __syncthreads();
}

// Units of a block, at least so many that the triples of a task can be merged.
template <int kDim>
__device__ int UnitsOfBlock(const Decode& p, Shared<kDim>& s, int total) {
  if (p.deterministic) return (total + gridDim.x - 1) / gridDim.x;
  int largest = 0;
  for (int i = threadIdx.x; i < p.num_tasks; i += blockDim.x) largest = max(largest, s.prefix[i + 1] - s.prefix[i]);
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x == 0) s.largest = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicMax(&s.largest, largest);
  __syncthreads();
  constexpr int kParts = Shared<kDim>::kMaxSegments - 1;
  return max((total + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x), (s.largest + kParts - 1) / kParts);
}

// Where a warp's next copy comes from.
template <int kDim>
struct Ahead {
  static constexpr int kWarps = Shared<kDim>::kWarps;
  Walk<Shared<kDim>> walk;
  PageRef ref;
  int page, first;

  __device__ __forceinline__ Ahead(const Decode& p, const Shared<kDim>& s, int begin, int end, int warp)
      : walk(p, s, begin, end) {
    page = walk.at.page + warp;
    Load(warp);
  }
  __device__ __forceinline__ bool done() const { return walk.done(); }
  // On to the segment that has a page for the warp, whose reference is wanted with the next copy only.
  __device__ __forceinline__ void Load(int warp) {
    while (page >= walk.at.page_end) {
      walk.Open(walk.at.next_unit);
      if (walk.done()) return;
      page = walk.at.page + warp;
    }
    ref = LoadRef(walk.p, walk.s, walk.at.task, page), first = 0;
  }
  __device__ __forceinline__ void Next(int warp) {
    first += PieceBlocks(ref) * kBlockEntries;
    if (first < ref.count) return;
    page += kWarps;
    Load(warp);
  }
};

template <int kDim, class Q, class Out>
__global__ void __launch_bounds__(CodedShape<kDim>::kWarps * 32, CodedShape<kDim>::kBlocksPerSm) CodedKernel(const Decode p) {
#if __CUDA_ARCH__ >= 900
  using Cut = CodedShape<kDim>;
  extern __shared__ uint8_t memory[];
  Shared<kDim>& s = *reinterpret_cast<Shared<kDim>*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane < Cut::kSlots) BarrierInit(&s.full[warp][lane], 1);
  BarrierInitFence();
  if (!p.early) GridWait();  // attend_decode.cu says why not always
  ScanTasks(p, s);
  const int total = s.prefix[p.num_tasks];
  const int per_block = UnitsOfBlock(p, s, total);
  const int begin = min(total, per_block * static_cast<int>(blockIdx.x)), end = min(total, begin + per_block);
  if (begin >= end) {
    if (p.early) GridWait();
    WriteEmpty<Shared<kDim>, Out>(p, s);
    return;
  }
  Walk<Shared<kDim>> now(p, s, begin, end);
  Ahead<kDim> ahead(p, s, begin, end, warp);
  int filled = 0;
  bool waited = !p.early;
  const auto issue = [&] {
    if (!ahead.done()) {
      if (!waited && ahead.page + 1 == s.pages[ahead.walk.at.task]) GridWait(), waited = true;
      const int slot = filled++ % Cut::kSlots;
      if (lane == 0) s.refs[warp][slot] = *reinterpret_cast<const uint64_t*>(&ahead.ref);
      IssuePiece<kDim>(p, ahead.ref, ahead.first, s.slots[warp][slot], &s.full[warp][slot]);
      ahead.Next(warp);
    }
  };
  for (int i = 0; i < Cut::kSlots; ++i) issue();
  if (!waited) GridWait(), waited = true;
  WriteEmpty<Shared<kDim>, Out>(p, s);

  int used = 0;
  CodedRunning<kDim> r;
  while (!now.done()) {
    const Task task(p, now.at.task);
    PrepareQueries<kDim, Q>(p, task, s);
    r.Clear();
    const int in_list = InList(p, s, now.at.task);
    const int visible_begin = p.visible_begin[int64_t{task.row} * p.groups + task.group];
    const int visible_end = p.visible_end[int64_t{task.row} * p.groups + task.group];
    for (int page = now.at.page + warp; page < now.at.page_end; page += Cut::kWarps) {
      int first = 0;
      PageRef ref;
      do {
        const int slot = used % Cut::kSlots;
        BarrierWait(&s.full[warp][slot], used++ / Cut::kSlots & 1);
        ref = *reinterpret_cast<const PageRef*>(&s.refs[warp][slot]);
        int low = 0, high = ref.count;
        if (page < in_list) low = max(0, visible_begin - page * kPageEntries), high = min(high, visible_end - page * kPageEntries);
        low -= first, high -= first;
        AddPiece<kDim>(p, ref, first, low, high, SharedAddress(s.slots[warp][slot]), s.queries, r);
        __syncwarp();
        issue();
        first += PieceBlocks(ref) * kBlockEntries;
      } while (first < ref.count);
    }
    if (now.at.next_unit >= end) GridLaunch();  // all pages of the block have been read, or are being
    __syncthreads();                            // queries give way
    MergeWarps(s, r);
    EndSegment<Shared<kDim>, Out>(p, s, now.at, per_block);
    now.Open(now.at.next_unit);
  }
#endif
}

template <int kDim, class Q, class Out>
void LaunchCoded(const Decode& p, const CudaContext& context) {
  constexpr int kBytes = sizeof(Shared<kDim>);
  static const bool ready = [] {
    LOUPE_CUDA(cudaFuncSetAttribute(CodedKernel<kDim, Q, Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return true;
  }();
  (void)ready;
  const auto blocks = static_cast<unsigned>(CodedShape<kDim>::kBlocksPerSm * context.num_sms);
  Launch(CodedKernel<kDim, Q, Out>, blocks, CodedShape<kDim>::kWarps * 32, kBytes, context.stream, p);
}

template <int kDim>
void DispatchTypes(const Decode& p, DType q, DType out, const CudaContext& context) {
  if (q == DType::kF16 && out == DType::kF16) return LaunchCoded<kDim, __half, __half>(p, context);
  LOUPE_CHECK(q == DType::kF32 && out == DType::kF32) << "queries and outputs are both f32 or both fp16";
  LaunchCoded<kDim, float, float>(p, context);
}

}  // namespace

bool AttendCodedIsBuilt(int arch) { return arch >= 90; }

void AttendCoded(const AttendArgs& args, int64_t first, int64_t num, CudaContext context) {
  Decode decode = MakeDecode(args, num, context);
  if (first < args.prompt_rows) decode.row_lse = nullptr;  // nobody asks for their probabilities
  EachLaunch(decode, first, num, [&](const Decode& p) {
    if (p.dim == 128) return DispatchTypes<128>(p, args.q.dtype, args.out.dtype, context);
    LOUPE_CHECK_EQ(p.dim, 64);
    DispatchTypes<64>(p, args.q.dtype, args.out.dtype, context);
  });
}

}  // namespace loupe::cuda
