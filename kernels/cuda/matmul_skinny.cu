// out = x W^T for up to eight rows of x: one pass over the weights at the speed of memory.
//
// Weights are the A operand of m16n8k16 (16 outputs a tile), the rows of x its eight columns. Both are loaded straight
// from memory to registers, 16 bytes a lane: a product's k index is permuted alike on both sides, so that a lane's
// bytes are neighbours. A block's eight warps share the reduced dimension of a tile and add up in a fixed order, so a
// row's bits depend on nothing else. Weights do not depend on the kernel before: their first loads are in flight while
// it ends.
//
// Bytes: rows * cols * 2 of weights once; flops 2 * 8 * rows * cols at most: memory is the limit.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"

namespace loupe::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kTile = 16;   // outputs of a tile
constexpr int kStep = 32;   // columns of two products
constexpr int kUnroll = 2;  // steps in a batch of loads

struct Skinny {
  const __nv_bfloat16* weight;
  int64_t weight_stride;
  int rows, cols, tokens;
  const __nv_bfloat16* x;
  int64_t x_stride;
  const float* bias;
  const float* add;
  int64_t add_stride;
  void* out;
  int64_t out_stride;
};

// What a warp has in flight: rows g and g + 8 of each tile, and its columns of x.
template <int kTiles>
struct Batch {
  uint4 low[kTiles][kUnroll], high[kTiles][kUnroll];
};
struct Columns {
  uint4 x[kUnroll];
};

// Steps [step, step + kUnroll) of the tiles from `tile` on; those past the warp's end repeat its last one, against
// zeros.
template <int kTiles>
__device__ __forceinline__ void LoadWeights(const Skinny& p, int tile, int step, int end, Batch<kTiles>& b) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int row = (tile * kTiles + i) * kTile + g;
    const __nv_bfloat16* low = p.weight + int64_t{min(row, p.rows - 1)} * p.weight_stride + 8 * t;
    const __nv_bfloat16* high = p.weight + int64_t{min(row + 8, p.rows - 1)} * p.weight_stride + 8 * t;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = min(step + u, end - 1) * kStep;
      b.low[i][u] = LoadOnce(low + at);
      b.high[i][u] = LoadOnce(high + at);
    }
  }
}
__device__ __forceinline__ void LoadColumns(const Skinny& p, int step, int end, Columns& c) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int col = (step + u) * kStep + 8 * t;
    c.x[u] = uint4{0, 0, 0, 0};
    if (step + u < end && g < p.tokens && col < p.cols)
      c.x[u] = *reinterpret_cast<const uint4*>(p.x + g * p.x_stride + col);
  }
}

template <int kTiles>
__device__ __forceinline__ void Multiply(const Batch<kTiles>& b, const Columns& c, float (&sum)[kTiles][4]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      Mma(sum[i], {b.low[i][u].x, b.high[i][u].x, b.low[i][u].y, b.high[i][u].y}, c.x[u].x, c.x[u].y);
      Mma(sum[i], {b.low[i][u].z, b.high[i][u].z, b.low[i][u].w, b.high[i][u].w}, c.x[u].z, c.x[u].w);
    }
  }
}

template <int kTiles, class Out>
__global__ void __launch_bounds__(kWarps * 32, kTiles == 1 ? 3 : 2) SkinnyKernel(const Skinny p) {
  __shared__ float sums[kWarps][kTiles * kTile][8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int steps = static_cast<int>(p.weight_stride) / kStep, tiles = (p.rows + kTiles * kTile - 1) / (kTiles * kTile);
  const int begin = steps * warp / kWarps, end = steps * (warp + 1) / kWarps;
  Batch<kTiles> now, next;
  Columns columns, next_columns;
  int tile = blockIdx.x;
  if (begin < end) LoadWeights(p, tile, begin, end, now);
  GridWait();
  if (begin < end) LoadColumns(p, begin, end, columns);
  for (; tile < tiles; tile += gridDim.x) {
    float sum[kTiles][4] = {};
    for (int step = begin; step < end; step += kUnroll) {
      const bool last = step + kUnroll >= end;
      const int next_tile = last ? tile + static_cast<int>(gridDim.x) : tile, next_step = last ? begin : step + kUnroll;
      if (next_tile < tiles) {
        LoadWeights(p, next_tile, next_step, end, next);
        LoadColumns(p, next_step, end, next_columns);
      }
      Multiply(now, columns, sum);
      now = next;
      columns = next_columns;
    }
    if (tile + static_cast<int>(gridDim.x) >= tiles) GridLaunch();  // all weights have been read
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float* to = &sums[warp][i * kTile + g][2 * t];
      to[0] = sum[i][0], to[1] = sum[i][1], to[64] = sum[i][2], to[65] = sum[i][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTiles * kTile * p.tokens; i += kWarps * 32) {
      const int line = i % (kTiles * kTile), token = i / (kTiles * kTile), row = tile * kTiles * kTile + line;
      if (row >= p.rows) continue;
      float value = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value += sums[w][line][token];
      if (p.bias) value += p.bias[row];
      if (p.add) value += p.add[token * p.add_stride + row];
      static_cast<Out*>(p.out)[token * p.out_stride + row] = FromFloat<Out>(value);
    }
    __syncthreads();
  }
}

template <int kTiles>
void LaunchSkinny(const Skinny& p, bool bf16, const CudaContext& context) {
  const int64_t tiles = (p.rows + kTiles * kTile - 1) / (kTiles * kTile);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, (kTiles == 1 ? 3 : 2) * context.num_sms));
  if (bf16) {
    Launch(SkinnyKernel<kTiles, __nv_bfloat16>, blocks, kWarps * 32, 0, context.stream, p);
  } else {
    Launch(SkinnyKernel<kTiles, float>, blocks, kWarps * 32, 0, context.stream, p);
  }
}

}  // namespace

void MatMulSkinny(const MatMulArgs& args, const Tensor& x, CudaContext context) {
  const auto& weight = static_cast<const WeightCuda&>(*args.weight);
  Skinny p = {};
  p.weight = static_cast<const __nv_bfloat16*>(weight.data()), p.weight_stride = weight.stride();
  p.rows = static_cast<int>(weight.rows()), p.cols = static_cast<int>(weight.cols());
  const bool large = p.rows >= 2 * kTile * 2 * context.num_sms;  // two tiles a warp still fill the machine
  for (int64_t first = 0; first < x.rows(); first += kSkinnyRows) {
    p.tokens = static_cast<int>(std::min<int64_t>(kSkinnyRows, x.rows() - first));
    p.x = x.row<__nv_bfloat16>(first), p.x_stride = x.row_stride;
    p.bias = args.bias.defined() ? args.bias.as<float>() : nullptr;
    p.add = args.add.defined() ? args.add.row<float>(first) : nullptr, p.add_stride = args.add.row_stride;
    p.out_stride = args.out.row_stride;
    const bool bf16 = args.out.dtype == DType::kBF16;
    p.out = bf16 ? static_cast<void*>(args.out.row<__nv_bfloat16>(first)) : args.out.row<float>(first);
    large ? LaunchSkinny<2>(p, bf16, context) : LaunchSkinny<1>(p, bf16, context);
  }
}

}  // namespace loupe::cuda
