// out = x W^T for up to eight rows of x: one pass over the weights at the speed of memory.
//
// Weights are the A operand of m16n8k16 (16 outputs a tile), the rows of x its eight columns. A block's eight warps
// share the reduced dimension of a tile and add up in a fixed order, so a row's bits depend on nothing else; a warp whose
// share of x fits its registers reads it once, otherwise x comes from the cache again with every tile, a chunk ahead. Each warp
// copies its own columns ahead of its arithmetic, across the borders of tiles, and starts before the kernel before has
// ended, since weights do not depend on it. A product's k index is permuted alike on both sides, so that 16 bytes of a
// lane are neighbours in a row of either operand.
//
// Bytes: rows * cols * 2 of weights once; flops 2 * 8 * rows * cols at most: memory is the limit.
#include <algorithm>
#include <type_traits>

#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"

namespace loupe::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kTile = 16;   // outputs of a tile
constexpr int kCols = 128;  // columns of a stage
constexpr int kStep = 32;   // columns of two products
constexpr int kStageBytes = kTile * kCols * 2;
constexpr int kManyStages = 6, kFewStages = 2;  // by how much shared memory a block may have
constexpr int kKept = 4;  // chunks of a warp whose columns of x stay in registers, if it has no more

struct Skinny {
  const __half* weight;
  int64_t weight_stride;
  int rows, cols, tokens;
  const __half* x;
  int64_t x_stride;
  const float* bias;
  const float* add;
  int64_t add_stride;
  void* out;
  int64_t out_stride;
  // x is the norm of these f32 rows, or they are null.
  const float* norm_x;
  int64_t norm_stride;
  const float* norm_weight;
  float norm_eps;
  // Half of the outputs are gates of the others: a tile takes eight of each.
  bool gated;

  // The weight's row that is line `line` of a tile.
  __device__ __forceinline__ int Row(int tile, int line) const {
    return gated ? tile * (kTile / 2) + line % 8 + (line < 8 ? 0 : rows / 2) : tile * kTile + line;
  }
};

constexpr int kNormBytes = 24 << 10;  // of normalised rows

template <int kStages>
struct Shared {
  alignas(128) uint8_t stages[kWarps][kStages][kStageBytes];
  float sums[kWarps][kTile][8];
  alignas(16) uint8_t x[kNormBytes];  // normalised rows, fp16
};

// Bytes of a normalised row in shared memory: whole chunks, and 16 more so that rows use different banks.
__host__ __device__ __forceinline__ int NormStride(int cols) { return (cols + kCols - 1) / kCols * kCols * 2 + 16; }

// Where 16-byte piece `piece` of a stage's row lies: neighbouring rows use different banks.
__device__ __forceinline__ int PieceOffset(int row, int piece) {
  return row * kCols * 2 + (piece ^ (row & 1) << 2) * 16;
}

// The warp's stages, one (tile, 128 columns) after the other.
struct Cursor {
  int tile, chunk;
};

__device__ __forceinline__ void CopyStage(const Skinny& p, const Cursor& at, uint32_t stage) {
  const int lane = threadIdx.x % 32, piece = lane % 16, col = at.chunk * kCols + piece * 8;
  const bool in = col < p.weight_stride;
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) {
    const int line = 2 * i + lane / 16;
    const int row = min(p.Row(at.tile, line), p.rows - 1);
    CopyAsync16OrZero(stage + PieceOffset(line, piece), p.weight + row * p.weight_stride + (in ? col : 0), in);
  }
}

__device__ __forceinline__ uint4 LoadShared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

// 128 columns of the tile against x.
__device__ __forceinline__ void Multiply(uint32_t stage, const uint4 (&x)[kCols / kStep], float (&sum)[4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int s = 0; s < kCols / kStep; ++s) {
    const uint4 low = LoadShared(stage + PieceOffset(g, 4 * s + t)),
                high = LoadShared(stage + PieceOffset(g + 8, 4 * s + t));
    Mma(sum, {low.x, high.x, low.y, high.y}, x[s].x, x[s].y);
    Mma(sum, {low.z, high.z, low.w, high.w}, x[s].z, x[s].w);
  }
}

// The normalised rows into shared memory. One more look at them is cheaper than a launch in between.
__device__ void Normalise(const Skinny& p, float (&partial)[kTile][8], uint8_t* to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, padded = NormStride(p.cols) / 2;
  for (int token = 0; token < p.tokens; ++token) {
    const float* x = p.norm_x + token * p.norm_stride;
    float sum = 0;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < p.cols; i += kWarps * 32) sum += x[i] * x[i];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) partial[warp][token] = sum;
  }
  __syncthreads();
  for (int token = 0; token < p.tokens; ++token) {
    const float* x = p.norm_x + token * p.norm_stride;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[w][token];
    const float scale = 1 / sqrtf(sum / static_cast<float>(p.cols) + p.norm_eps);
    auto* row = reinterpret_cast<__half*>(to) + token * padded;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < padded; i += kWarps * 32) {
      row[i] = FromFloat<__half>(i < p.cols ? x[i] * scale * p.norm_weight[i] : 0.0f);
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void LoadColumns(const Skinny& p, const uint8_t* normed, int chunk, uint4 (&x)[kCols / kStep]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (p.norm_x) {
#pragma unroll
    for (int s = 0; s < kCols / kStep; ++s) {
      const int at = g * NormStride(p.cols) + 2 * (chunk * kCols + s * kStep + 8 * t);
      x[s] = g < p.tokens ? *reinterpret_cast<const uint4*>(normed + at) : uint4{0, 0, 0, 0};
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < kCols / kStep; ++s) {
    const int col = chunk * kCols + s * kStep + 8 * t;
    x[s] =
        g < p.tokens && col < p.cols ? *reinterpret_cast<const uint4*>(p.x + g * p.x_stride + col) : uint4{0, 0, 0, 0};
  }
}

// The warps' sums of a tile, added up and stored.
template <class Out>
__device__ __forceinline__ void StoreTile(const Skinny& p, const float (&sums)[kWarps][kTile][8], int tile) {
  const int line = static_cast<int>(threadIdx.x) % kTile, token = static_cast<int>(threadIdx.x) / kTile;
  const auto sum_of = [&](int of_line) {
    const int row = p.Row(tile, of_line);
    float value = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += sums[w][of_line][token];
    if (p.bias) value += p.bias[row];
    if (p.add) value += p.add[token * p.add_stride + row];
    return value;
  };
  const int row = p.Row(tile, line);
  if (token >= p.tokens || row >= p.rows || (p.gated && line >= 8)) return;
  float value = sum_of(line);
  if (p.gated) value = value / (1 + expf(-value)) * sum_of(line + 8);
  static_cast<Out*>(p.out)[token * p.out_stride + row] = FromFloat<Out>(value);
}

template <int kStages, bool kKeeps, class Out>
__global__ void __launch_bounds__(kWarps * 32, 1) SkinnyKernel(const Skinny p) {
  extern __shared__ __align__(128) uint8_t memory[];
  Shared<kStages>& s = *reinterpret_cast<Shared<kStages>*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int chunks = (static_cast<int>(p.weight_stride) + kCols - 1) / kCols, tiles = (p.rows + kTile - 1) / kTile;
  const int begin = chunks * warp / kWarps, end = chunks * (warp + 1) / kWarps;
  Cursor ahead{begin < end ? static_cast<int>(blockIdx.x) : tiles, begin};
  int filled = 0, used = 0;
  const auto issue = [&] {
    if (ahead.tile < tiles) {
      CopyStage(p, ahead, SharedAddress(s.stages[warp][filled++ % kStages]));
      if (++ahead.chunk == end) ahead = {ahead.tile + static_cast<int>(gridDim.x), begin};
    }
    CopyCommit();
  };
  for (int i = 0; i < kStages - 1; ++i) issue();
  GridWait();
  if (p.norm_x) Normalise(p, s.sums[0], s.x);
  uint4 kept[kKeeps ? kKept : 1][kCols / kStep];  // all that the warp needs, or what it needs next
#pragma unroll
  for (int i = 0; i < (kKeeps ? kKept : 1); ++i) {
    if (begin + i < end) LoadColumns(p, s.x, begin + i, kept[i]);
  }
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sum[4] = {0, 0, 0, 0};
    const auto multiply = [&](const uint4 (&x)[kCols / kStep]) {
      CopyWait<kStages - 2>();
      __syncwarp();
      Multiply(SharedAddress(s.stages[warp][used++ % kStages]), x, sum);
      __syncwarp();
      issue();
    };
    if constexpr (kKeeps) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        if (begin + i < end) multiply(kept[i]);
      }
    } else {
#pragma unroll 2
      for (int chunk = begin; chunk < end; ++chunk) {
        uint4 x[kCols / kStep];
#pragma unroll
        for (int i = 0; i < kCols / kStep; ++i) x[i] = kept[0][i];
        LoadColumns(p, s.x, chunk + 1 < end ? chunk + 1 : begin, kept[0]);
        multiply(x);
      }
    }
    if (tile + static_cast<int>(gridDim.x) >= tiles) GridLaunch();  // all weights have been read
    float* to = &s.sums[warp][g][2 * t];
    to[0] = sum[0], to[1] = sum[1], to[64] = sum[2], to[65] = sum[3];
    __syncthreads();
    if (threadIdx.x < kTile * 8) StoreTile<Out>(p, s.sums, tile);
    __syncthreads();
  }
}

template <int kStages, bool kKeeps, class Out>
void LaunchSkinny(const Skinny& p, const CudaContext& context) {
  constexpr int kBytes = sizeof(Shared<kStages>);
  static const bool ready = [] {
    LOUPE_CUDA(cudaFuncSetAttribute(SkinnyKernel<kStages, kKeeps, Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return true;
  }();
  (void)ready;
  const auto blocks = static_cast<unsigned>(std::min((p.rows + kTile - 1) / kTile, context.num_sms));
  Launch(SkinnyKernel<kStages, kKeeps, Out>, blocks, kWarps * 32, kBytes, context.stream, p);
}

template <class Out>
void LaunchByMemory(const Skinny& p, const CudaContext& context) {
  const bool much_memory = context.arch == 90 || context.arch >= 100;
  const auto launch = [&](auto keeps) {
    much_memory ? LaunchSkinny<kManyStages, keeps(), Out>(p, context) : LaunchSkinny<kFewStages, keeps(), Out>(p, context);
  };
  p.weight_stride <= kWarps * kKept * kCols ? launch(std::true_type{}) : launch(std::false_type{});
}

}  // namespace

bool SkinnyTakesNorm(const MatMulArgs& args) {
  const int cols = static_cast<int>(args.weight->cols());
  return args.norm.x.dtype == DType::kF32 && args.norm.x.row_elements() == cols &&
         args.norm.x.rows() * NormStride(cols) <= kNormBytes;
}

void MatMulSkinny(const MatMulArgs& args, const Tensor& x, CudaContext context) {
  const auto& weight = static_cast<const WeightCuda&>(*args.weight);
  Skinny p = {};
  p.weight = static_cast<const __half*>(weight.data()), p.weight_stride = weight.stride();
  p.rows = static_cast<int>(weight.rows()), p.cols = static_cast<int>(weight.cols());
  for (int64_t first = 0; first < x.rows(); first += kSkinnyRows) {
    p.tokens = static_cast<int>(std::min<int64_t>(kSkinnyRows, x.rows() - first));
    p.x = x.row<__half>(first), p.x_stride = x.row_stride;
    p.bias = args.bias.defined() ? args.bias.as<float>() : nullptr;
    p.add = args.add.defined() ? args.add.row<float>(first) : nullptr, p.add_stride = args.add.row_stride;
    if (args.norm.x.defined()) {
      p.norm_x = args.norm.x.row<float>(first), p.norm_stride = args.norm.x.row_stride;
      p.norm_weight = args.norm.weight.as<float>(), p.norm_eps = args.norm.eps;
    }
    p.gated = args.gated.defined();
    const Tensor& out = p.gated ? args.gated : args.out;
    p.out_stride = out.row_stride;
    if (out.dtype == DType::kF16) {
      p.out = out.row<__half>(first);
      LaunchByMemory<__half>(p, context);
    } else {
      p.out = out.row<float>(first);
      LaunchByMemory<float>(p, context);
    }
  }
}

}  // namespace loupe::cuda
