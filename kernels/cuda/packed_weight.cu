// Matrices of a model file to device memory: the file's bytes go over as they are and are expanded there, to fp16 or,
// in exact mode, to f32. Done once, at load.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"

#include <cuda_fp16.h>

namespace loupe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlockCols = 32;  // of GGUF's block formats

int64_t FileBytes(WeightType type, int64_t elements) {
  switch (type) {
    case WeightType::kF32:
      return elements * 4;
    case WeightType::kF16:
    case WeightType::kBF16:
      return elements * 2;
    case WeightType::kQ8_0:
      return elements / kBlockCols * 34;
    case WeightType::kQ4_0:
      return elements / kBlockCols * 18;
    case WeightType::kQ4_1:
      return elements / kBlockCols * 20;
  }
  return 0;
}
bool IsBlockType(WeightType type) {
  return type == WeightType::kQ8_0 || type == WeightType::kQ4_0 || type == WeightType::kQ4_1;
}

__device__ __forceinline__ float HalfAt(const uint8_t* p) {
  const auto bits = static_cast<unsigned short>(p[0] | p[1] << 8);
  return __half2float(__ushort_as_half(bits));
}

__device__ float ElementOf(WeightType type, const uint8_t* data, int64_t i) {
  const int64_t block = i / kBlockCols;
  const int c = static_cast<int>(i % kBlockCols);
  switch (type) {
    case WeightType::kF32:
      return reinterpret_cast<const float*>(data)[i];
    case WeightType::kF16:
      return HalfAt(data + 2 * i);
    case WeightType::kBF16:
      return __uint_as_float(uint32_t{reinterpret_cast<const uint16_t*>(data)[i]} << 16);
    case WeightType::kQ8_0: {
      const uint8_t* b = data + block * 34;
      return HalfAt(b) * static_cast<float>(static_cast<int8_t>(b[2 + c]));
    }
    case WeightType::kQ4_0: {
      const uint8_t* b = data + block * 18;
      return HalfAt(b) * static_cast<float>((b[2 + c % 16] >> (c / 16 * 4) & 15) - 8);
    }
    case WeightType::kQ4_1: {
      const uint8_t* b = data + block * 20;
      return HalfAt(b) * static_cast<float>(b[4 + c % 16] >> (c / 16 * 4) & 15) + HalfAt(b + 2);
    }
  }
  return 0;
}

// `largest`: of the magnitudes that fp16 cannot hold.
template <class Out>
__global__ void ExpandKernel(WeightType type, const uint8_t* data, int64_t first, int64_t num, int64_t cols,
                             int64_t stride, Out* out, int* largest) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= num) return;
  const float x = ElementOf(type, data, i);
  out[(first + i) / cols * stride + (first + i) % cols] = FromFloat<Out>(x);
  if (sizeof(Out) == 2 && fabsf(x) > kLargestHalf) atomicMax(largest, __float_as_int(fabsf(x)));  // in the order of floats
}

absl::Status CheckPart(const HostMatrix& part, int64_t cols) {
  if (part.data == nullptr || part.rows <= 0 || part.cols <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("a matrix of ", part.rows, " x ", part.cols, " cannot be packed"));
  }
  if (part.cols != cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("a matrix of ", part.cols, " columns cannot be stacked on one of ", cols));
  }
  if (IsBlockType(part.type) && part.cols % kBlockCols != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a matrix of ", part.cols, " columns cannot be in blocks of ", kBlockCols));
  }
  return absl::OkStatus();
}

// In pieces of whole rows, so that the copy of the file's bytes stays small beside the weights.
template <class Out>
absl::Status Expand(const HostMatrix& part, Backend& backend, int64_t stride, Out* out, cudaStream_t stream) {
  constexpr int64_t kPiece = int64_t{64} << 20;
  const int64_t row_bytes = FileBytes(part.type, part.cols);
  const int64_t piece_rows = std::clamp<int64_t>(kPiece / row_bytes, 1, part.rows);
  auto staging = backend.Allocate(piece_rows * row_bytes);
  if (!staging.ok()) return staging.status();
  auto too_large = backend.Allocate(sizeof(int));
  if (!too_large.ok()) return too_large.status();
  auto* device = static_cast<uint8_t*>((*staging)->data());
  auto* largest = static_cast<int*>((*too_large)->data());
  for (int64_t row = 0; row < part.rows; row += piece_rows) {
    const int64_t rows = std::min(piece_rows, part.rows - row), num = rows * part.cols;
    const auto* from = static_cast<const uint8_t*>(part.data) + row * row_bytes;
    LOUPE_CUDA(cudaMemcpyAsync(device, from, static_cast<size_t>(rows * row_bytes), cudaMemcpyHostToDevice, stream));
    ExpandKernel<Out><<<Blocks(num, kThreads), kThreads, 0, stream>>>(part.type, device, row * part.cols, num,
                                                                      part.cols, stride, out, largest);
    LOUPE_CUDA(cudaGetLastError());
  }
  float beyond = 0;
  LOUPE_CUDA(cudaMemcpyAsync(&beyond, largest, sizeof beyond, cudaMemcpyDeviceToHost, stream));
  const cudaError_t error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return DeviceFault("loading weights", error);
  if (beyond == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a weight of magnitude ", beyond, " is beyond fp16, which the GPU computes in and"
                                                 " which ends at ", kLargestHalf, "; use --device cpu"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Weight>> PackWeightCuda(std::span<const HostMatrix> parts, Backend& backend,
                                                       CudaContext context) {
  if (parts.empty()) return absl::InvalidArgumentError("a weight needs at least one matrix");
  int64_t rows = 0;
  const int64_t cols = parts[0].cols;
  for (const HostMatrix& part : parts) {
    if (absl::Status s = CheckPart(part, cols); !s.ok()) return s;
    rows += part.rows;
  }
  constexpr int64_t kRowUnit = 32;  // elements: what a step of the skinny product reads
  const int64_t stride = (cols + kRowUnit - 1) / kRowUnit * kRowUnit;
  const DType dtype = context.exact ? DType::kF32 : DType::kF16;
  auto buffer = backend.Allocate(rows * stride * DTypeBytes(dtype));
  if (!buffer.ok()) return buffer.status();
  int64_t row = 0;
  for (const HostMatrix& part : parts) {
    const int64_t at = row * stride;
    const absl::Status s =
        context.exact
            ? Expand(part, backend, stride, static_cast<float*>((*buffer)->data()) + at, context.stream)
            : Expand(part, backend, stride, static_cast<__half*>((*buffer)->data()) + at, context.stream);
    if (!s.ok()) return s;
    row += part.rows;
  }
  return std::unique_ptr<Weight>(new WeightCuda(*std::move(buffer), rows, cols, stride, dtype));
}

}  // namespace loupe::cuda
