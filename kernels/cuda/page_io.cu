// New keys and values into their slots, coded on the way where the slot is. A warp a vector. Memory is the limit: an appended
// entry reads 4 D or 8 D bytes and writes its page's bytes; both are small beside the products.
#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/spherical.cuh"

namespace loupe::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxDim = 256;

// Where appended vectors go, and what coding them takes.
struct Target {
  const PageRef* slots;
  int64_t slot_stride;
  int groups, dim;
  uint8_t* arena;
  const float* mean_keys;  // or null
  int32_t* faults;         // or null
};

// A warp stores a key or value of kv head g, whose contents are lost.
template <int kPer>
__device__ __forceinline__ void StoreAppended(const Target& p, int64_t row, int g, bool is_key, uint8_t* codes, float (&x)[kPer]) {
  const PageView page(p.slots[row * p.slot_stride + g]);
  const float* mean = p.mean_keys ? p.mean_keys + g * p.dim : nullptr;
  const bool finite = StoreSide(Side(page, is_key, p.dim, p.arena), p.dim, mean, codes, x);
  if (threadIdx.x % 32 != 0) return;
  if (!finite && p.faults) atomicAdd(p.faults, 1);
  if (page.log_weights && !is_key) reinterpret_cast<float*>(p.arena + page.LogWeightOffset(p.dim))[page.count] = 0;
}

template <class In, int kPer>
__global__ void AppendKernel(const Target p, const In* k, int64_t k_stride, const In* v, int64_t v_stride, int64_t rows) {
  __shared__ uint8_t codes[kWarps][kMaxDim];
  GridWait();
  GridLaunch();
  const int warp = threadIdx.x / 32, first = threadIdx.x % 32 * kPer;
  const int64_t i = int64_t{blockIdx.x} * kWarps + warp, row = i / (2 * p.groups);
  if (row >= rows) return;
  const int at = static_cast<int>(i % (2 * p.groups)), g = at / 2;
  const bool is_key = at % 2 == 0;
  const In* from = (is_key ? k + row * k_stride : v + row * v_stride) + g * p.dim + first;
  float x[kPer];
#pragma unroll
  for (int j = 0; j < kPer; ++j) x[j] = first + j < p.dim ? ToFloat(from[j]) : 0;
  StoreAppended(p, row, g, is_key, codes[warp], x);
}

// Queries and keys are rotated, keys and values stored: a warp a head of a row, query heads first, then keys, then values.
// The angle is reduced in double: at position 131,072 a float's last bit is a hundredth of a turn.
template <class T>
struct RotateAppend : Target {
  T *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  int heads, pairs;
  const int32_t* positions;
  const float* frequencies;
  float scale;
  bool interleaved;
};

template <class T, int kPer>
__global__ void RotateAppendKernel(const RotateAppend<T> p) {
  __shared__ float turned[kWarps][kMaxDim];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = p.dim / 2;
  const int head = static_cast<int>(blockIdx.y) * kWarps + warp;
  if (head >= p.heads + 2 * p.groups) return;
  const bool is_query = head < p.heads, is_value = head >= p.heads + p.groups;
  const int rotating = is_value ? 0 : p.pairs;
  constexpr int kPairs = kPer / 2;  // of a lane
  double frequency[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) frequency[j] = lane + 32 * j < rotating ? static_cast<double>(p.frequencies[lane + 32 * j]) : 0;
  GridWait();
  GridLaunch();
  const int64_t row = blockIdx.x;
  const int g = is_value ? head - p.heads - p.groups : head - p.heads;
  T* x = is_query   ? p.q + row * p.q_stride + head * p.dim
         : is_value ? p.v + row * p.v_stride + g * p.dim
                    : p.k + row * p.k_stride + g * p.dim;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int pair = lane + 32 * j;
    const bool rotates = pair < rotating;
    if (pair >= half || (is_query && !rotates)) continue;
    const bool apart = rotates && !p.interleaved;
    // Pairs that stay lie behind those that turn.
    const int first = apart ? pair : 2 * pair, second = apart ? pair + p.pairs : 2 * pair + 1;
    float a = ToFinite(x[first]), b = ToFinite(x[second]);
    if (rotates) {
      constexpr double kTurn = 6.283185307179586476925286766559;
      const double angle = p.positions[row] * frequency[j];
      float sine, cosine;
      sincosf(static_cast<float>(angle - kTurn * rint(angle * (1 / kTurn))), &sine, &cosine);
      const float rotated = p.scale * (a * cosine - b * sine);
      b = p.scale * (a * sine + b * cosine), a = rotated;
    }
    if (is_query) {
      x[first] = FromFloat<T>(a), x[second] = FromFloat<T>(b);
    } else {
      turned[warp][first] = a, turned[warp][second] = b;
    }
  }
  if (is_query) return;
  __syncwarp();
  float y[kPer];
#pragma unroll
  for (int j = 0; j < kPer; ++j) y[j] = lane * kPer + j < p.dim ? turned[warp][lane * kPer + j] : 0;
  __syncwarp();
  StoreAppended(p, row, g, !is_value, reinterpret_cast<uint8_t*>(turned[warp]), y);
}

template <class In, int kPer>
void LaunchAppend(const AppendKvArgs& args, const Target& target, cudaStream_t stream) {
  const Rotation& r = args.rotation;
  if (!r.q.defined()) {
    Launch(AppendKernel<In, kPer>, Blocks(args.k.rows() * 2 * target.groups, kWarps), 32 * kWarps, 0, stream, target, args.k.as<In>(),
           args.k.row_stride, args.v.as<In>(), args.v.row_stride, args.k.rows());
    return;
  }
  RotateAppend<In> p = {};
  static_cast<Target&>(p) = target;
  p.q = r.q.as<In>(), p.k = args.k.as<In>(), p.v = args.v.as<In>();
  p.q_stride = r.q.row_stride, p.k_stride = args.k.row_stride, p.v_stride = args.v.row_stride;
  p.heads = static_cast<int>(r.q.shape[1]), p.pairs = static_cast<int>(r.frequencies.rows());
  p.positions = r.positions.as<int32_t>(), p.frequencies = r.frequencies.as<float>();
  p.scale = r.scale, p.interleaved = r.interleaved;
  const dim3 grid(static_cast<unsigned>(args.k.rows()), Blocks(p.heads + 2 * target.groups, kWarps));
  Launch(RotateAppendKernel<In, kPer>, grid, 32 * kWarps, 0, stream, p);
}

}  // namespace

void AppendKvCuda(const AppendKvArgs& args, CudaContext context) {
  const int dim = static_cast<int>(args.k.shape[2]);
  LOUPE_CHECK(dim > 0 && dim % kChunkDims == 0 && dim <= kMaxDim) << "head size " << dim << " is not a multiple of " << kChunkDims
                                                                   << " up to " << kMaxDim;
  if (args.k.rows() == 0) return;
  const Target target{args.slots.as<PageRef>(), args.slots.row_stride, static_cast<int>(args.k.shape[1]), dim,
                      static_cast<uint8_t*>(args.arena), args.mean_keys.defined() ? args.mean_keys.as<float>() : nullptr,
                      args.faults.defined() ? args.faults.as<int32_t>() : nullptr};
  const auto launch = [&](auto type) {
    using In = decltype(type);
    const int per = CoordinatesOf(dim);
    per == 2   ? LaunchAppend<In, 2>(args, target, context.stream)
    : per == 4 ? LaunchAppend<In, 4>(args, target, context.stream)
               : LaunchAppend<In, 8>(args, target, context.stream);
  };
  args.k.dtype == DType::kF16 ? launch(__half{}) : launch(float{});
}

}  // namespace loupe::cuda
