// Ops over single rows. All are limited by memory: each input read once, each output written once.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRopeThreads = 128;
constexpr int kNormValues = 4;  // of a thread of a norm, in registers

template <class F>
void WithType(DType type, F&& f) {
  if (type == DType::kF16) return f(__half{});
  LOUPE_CHECK(type == DType::kF32) << "type " << static_cast<int>(type) << " is neither f32 nor fp16";
  f(float{});
}

template <class Table, class Out>
__global__ void EmbedKernel(const Table* table, int64_t table_stride, const int32_t* ids, Out* out, int64_t out_stride,
                            int64_t cols) {
  GridWait();
  GridLaunch();
  const Table* from = table + int64_t{ids[blockIdx.x]} * table_stride;
  Out* to = out + int64_t{blockIdx.x} * out_stride;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) to[i] = FromFloat<Out>(ToFloat(from[i]));
}

// One block a row of `cols`; x may lie in groups of `per_row` within strided rows. What fits stays in registers between
// the sum and the scaling; weights are read while the kernel before still runs.
template <class In, class Out>
__global__ void RmsNormKernel(const In* x, int64_t x_stride, const float* weight, float eps, Out* out,
                              int64_t out_stride, int cols, int per_row) {
  const int64_t row = blockIdx.x / per_row, part = blockIdx.x % per_row;
  const In* from = x + row * x_stride + part * cols;
  Out* to = out + row * out_stride + part * cols;
  float scales[kNormValues], values[kNormValues];
#pragma unroll
  for (int j = 0; j < kNormValues; ++j) {
    const int i = static_cast<int>(threadIdx.x + j * blockDim.x);
    scales[j] = i < cols ? weight[i] : 0;
  }
  GridWait();
  GridLaunch();
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kNormValues; ++j) {
    const int i = static_cast<int>(threadIdx.x + j * blockDim.x);
    values[j] = i < cols ? ToFloat(from[i]) : 0;
  }
#pragma unroll
  for (int j = 0; j < kNormValues; ++j) sum += values[j] * values[j];
  const int rest = kNormValues * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  for (int i = rest; i < cols; i += blockDim.x) sum += ToFloat(from[i]) * ToFloat(from[i]);
  __shared__ float sums[32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  const float scale = 1 / sqrtf(sum / static_cast<float>(cols) + eps);
#pragma unroll
  for (int j = 0; j < kNormValues; ++j) {
    const int i = static_cast<int>(threadIdx.x + j * blockDim.x);
    if (i < cols) to[i] = FromFloat<Out>(values[j] * scale * scales[j]);
  }
  for (int i = rest; i < cols; i += blockDim.x) to[i] = FromFloat<Out>(ToFloat(from[i]) * scale * weight[i]);
}

// x / (1 + e^-x), whose denominator may become infinite and the result zero, as it should.
__device__ __forceinline__ float Silu(float x) { return x / (1 + expf(-x)); }

template <class T, class Out>
__global__ void SiluMulKernel(const T* gate_up, int64_t stride, Out* out, int64_t out_stride, int cols) {
  GridWait();
  GridLaunch();
  const T* gate = gate_up + int64_t{blockIdx.y} * stride;
  Out* to = out + int64_t{blockIdx.y} * out_stride;
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < cols) to[i] = FromFloat<Out>(Silu(ToFinite(gate[i])) * ToFinite(gate[cols + i]));
}

// The angle is reduced in double: at position 131,072 a float's last bit is a hundredth of a turn.
template <class T>
__global__ void RopeKernel(T* x, int64_t stride, const int32_t* positions, const float* frequencies, float scale,
                           bool interleaved, int heads, int dim, int pairs) {
  const int i = static_cast<int>(blockIdx.y) * kRopeThreads + static_cast<int>(threadIdx.x);
  if (i >= heads * pairs) return;
  const int64_t row = blockIdx.x;
  const int head = i / pairs, pair = i % pairs;
  const double frequency = static_cast<double>(frequencies[pair]);
  GridWait();
  GridLaunch();
  constexpr double kTurn = 6.283185307179586476925286766559;
  const double angle = positions[row] * frequency;
  float sine, cosine;
  sincosf(static_cast<float>(angle - kTurn * rint(angle * (1 / kTurn))), &sine, &cosine);
  T* at = x + row * stride + head * dim;
  T& first = at[interleaved ? 2 * pair : pair];
  T& second = at[interleaved ? 2 * pair + 1 : pair + pairs];
  const float a = ToFloat(first), b = ToFloat(second);
  first = FromFloat<T>(scale * (a * cosine - b * sine));
  second = FromFloat<T>(scale * (a * sine + b * cosine));
}

template <class T>
__global__ void GatherKernel(const T* x, int64_t x_stride, const int32_t* rows, T* out, int64_t out_stride,
                             int64_t cols) {
  GridWait();
  GridLaunch();
  const T* from = x + int64_t{rows[blockIdx.x]} * x_stride;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) out[int64_t{blockIdx.x} * out_stride + i] = from[i];
}

__global__ void ToHalfKernel(const float* x, int64_t x_stride, __half* out, int64_t out_stride, int64_t cols) {
  GridWait();
  GridLaunch();
  const int64_t row = blockIdx.y, i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < out_stride) out[row * out_stride + i] = FromFloat<__half>(i < cols ? x[row * x_stride + i] : 0);
}

}  // namespace

void EmbedCuda(const EmbedArgs& args, CudaContext context) {
  const auto& table = static_cast<const WeightCuda&>(*args.table);
  if (args.ids.rows() == 0) return;
  WithType(table.dtype(), [&](auto from) {
    WithType(args.out.dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      Launch(EmbedKernel<From, To>, static_cast<unsigned>(args.ids.rows()), kThreads, 0, context.stream,
             static_cast<const From*>(table.data()), table.stride(), args.ids.as<int32_t>(), args.out.as<To>(),
             args.out.row_stride, table.cols());
    });
  });
}

void RmsNormCuda(const RmsNormArgs& args, CudaContext context) {
  const int cols = static_cast<int>(args.weight.shape[0]);
  const int per_row = static_cast<int>(args.x.row_elements()) / cols;
  if (args.x.rows() == 0) return;
  const int threads = cols >= 1024 ? 1024 : cols > 256 ? 256 : 64;
  WithType(args.x.dtype, [&](auto from) {
    WithType(args.out.dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      Launch(RmsNormKernel<From, To>, static_cast<unsigned>(args.x.rows() * per_row), threads, 0, context.stream,
             args.x.as<From>(), args.x.row_stride, args.weight.as<float>(), args.eps, args.out.as<To>(),
             args.out.row_stride, cols, per_row);
    });
  });
}

void SiluMulCuda(const SiluMulArgs& args, CudaContext context) {
  const int cols = static_cast<int>(args.out.shape[1]);
  if (args.out.rows() == 0) return;
  WithType(args.gate_up.dtype, [&](auto from) {
    WithType(args.out.dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      Launch(SiluMulKernel<From, To>, dim3(Blocks(cols, kThreads), static_cast<unsigned>(args.out.rows())), kThreads, 0,
             context.stream, args.gate_up.as<From>(), args.gate_up.row_stride, args.out.as<To>(), args.out.row_stride,
             cols);
    });
  });
}

void RopeCuda(const RopeArgs& args, CudaContext context) {
  if (args.x.rows() == 0) return;
  WithType(args.x.dtype, [&](auto type) {
    using T = decltype(type);
    const int heads = static_cast<int>(args.x.shape[1]), pairs = static_cast<int>(args.frequencies.shape[0]);
    const dim3 grid(static_cast<unsigned>(args.x.rows()), Blocks(heads * pairs, kRopeThreads));
    Launch(RopeKernel<T>, grid, kRopeThreads, 0, context.stream, args.x.as<T>(), args.x.row_stride,
           args.positions.as<int32_t>(), args.frequencies.as<float>(), args.scale, args.interleaved, heads,
           static_cast<int>(args.x.shape[2]), pairs);
  });
}

void GatherRowsCuda(const GatherRowsArgs& args, CudaContext context) {
  if (args.rows.rows() == 0) return;
  WithType(args.x.dtype, [&](auto type) {
    using T = decltype(type);
    Launch(GatherKernel<T>, static_cast<unsigned>(args.rows.rows()), kThreads, 0, context.stream, args.x.as<T>(),
           args.x.row_stride, args.rows.as<int32_t>(), args.out.as<T>(), args.out.row_stride, args.x.row_elements());
  });
}

void ConvertToHalf(const Tensor& x, void* out, int64_t out_stride, CudaContext context) {
  Launch(ToHalfKernel, dim3(Blocks(out_stride, kThreads), static_cast<unsigned>(x.rows())), kThreads, 0, context.stream,
         x.as<float>(), x.row_stride, static_cast<__half*>(out), out_stride, x.row_elements());
}

}  // namespace loupe::cuda
