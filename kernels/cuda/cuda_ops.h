// The CUDA backend's ops as free functions, one file each. BackendCuda (backend_cuda.cpp) only forwards to them. All
// are asynchronous on the context's stream; none allocates. Shapes: kernels/ops.h. Tensors called f32 there may be fp16
// here (q, x, out, gate_up, k, v), and are in the engine; the residual stream stays f32.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/ops.h"

namespace loupe::cuda {

// Neighbours of one page that become neighbours of another, or one entry.
struct SlotCopy {
  PageRef from, to;  // `count` is the first slot
  int32_t entries = 1;
};

// Device memory that ops share; taken at start.
struct Workspace {
  float* partials = nullptr;  // attention: triples of split lists
  int64_t partial_floats = 0;
  int32_t* counters = nullptr;  // attention: how many splits of a list have arrived; zero between calls
  int64_t num_counters = 0;
  float* row_lse = nullptr;  // attention: log2 of the denominator, [rows, H], for the probabilities
  int64_t row_lse_floats = 0;
  void* activations = nullptr;  // fp16 copies of f32 inputs of a product
  int64_t activation_bytes = 0;
  SlotCopy* copies = nullptr;       // device side of CopyEntries
  SlotCopy* copies_host = nullptr;  // pinned
  int32_t* run_begin = nullptr;       // its runs, [num_copies + 1]
  int32_t* run_begin_host = nullptr;  // pinned
  int64_t num_copies = 0;
  cudaEvent_t copies_taken = nullptr;  // from the pinned side
  char* scratch = nullptr;  // of calls that are no part of a recorded step, for their length
  int64_t scratch_bytes = 0;
  float* staging = nullptr;  // pinned
  int64_t staging_bytes = 0;
};

class LtMatMul;

struct CudaContext {
  cudaStream_t stream = nullptr;
  int num_sms = 0;
  int arch = 0;  // 90: compute capability 9.0
  bool exact = false;
  bool deterministic = false;
  Workspace* workspace = nullptr;
  LtMatMul* lt = nullptr;
};

// A matrix in device memory, row-major: fp16, or f32 in exact mode. `stride` elements a row, a multiple of 8.
class WeightCuda : public Weight {
 public:
  WeightCuda(std::unique_ptr<DeviceBuffer> buffer, int64_t rows, int64_t cols, int64_t stride, DType dtype)
      : buffer_(std::move(buffer)), rows_(rows), cols_(cols), stride_(stride), dtype_(dtype) {}
  int64_t rows() const override { return rows_; }
  int64_t cols() const override { return cols_; }
  int64_t bytes() const override { return rows_ * stride_ * DTypeBytes(dtype_); }
  int64_t stride() const { return stride_; }
  DType dtype() const { return dtype_; }
  const void* data() const { return buffer_->data(); }

 private:
  std::unique_ptr<DeviceBuffer> buffer_;
  int64_t rows_, cols_, stride_;
  DType dtype_;
};

absl::StatusOr<std::unique_ptr<Weight>> PackWeightCuda(std::span<const HostMatrix> parts, Backend& backend,
                                                       CudaContext context);

void ReadMemoryCuda(const void* data, int64_t bytes, CudaContext context);
void EmbedCuda(const EmbedArgs& args, CudaContext context);
void RmsNormCuda(const RmsNormArgs& args, CudaContext context);
void SiluMulCuda(const SiluMulArgs& args, CudaContext context);
void RopeCuda(const RopeArgs& args, CudaContext context);
void GatherRowsCuda(const GatherRowsArgs& args, CudaContext context);
void SurprisalCuda(const SurprisalArgs& args, CudaContext context);
void SampleCuda(const SampleArgs& args, CudaContext context);
void AdvanceListsCuda(const AdvanceListsArgs& args, CudaContext context);
void AppendKvCuda(const AppendKvArgs& args, CudaContext context);
void CopyEntriesCuda(const CopyEntriesArgs& args, CudaContext context);
void TranscodeEntriesCuda(const TranscodeEntriesArgs& args, CudaContext context);
void MergeEntriesCuda(const MergeEntriesArgs& args, CudaContext context);
void SumAttentionCuda(const SumAttentionArgs& args, CudaContext context);
void SummariseKeysCuda(const SummariseKeysArgs& args, CudaContext context);
void MatMulCuda(const MatMulArgs& args, CudaContext context);
void AttendCuda(const AttendArgs& args, CudaContext context);

// Parts of the above. Rows [first, first + num) of the call.
void AttendDecode(const AttendArgs& args, int64_t first, int64_t num, CudaContext context);  // D 64 or 128, dense pages
void AttendCoded(const AttendArgs& args, int64_t first, int64_t num, CudaContext context);  // D 64 or 128, any pages
bool AttendCodedIsBuilt(int arch);
void AttendPrompt(const AttendArgs& args, int64_t num, CudaContext context);  // sm_90a, D 64 or 128, dense pages
void AttendPlain(const AttendArgs& args, int64_t first, int64_t num, CudaContext context);  // anything, f32 arithmetic
void AttendProbabilities(const AttendArgs& args, int64_t first, int64_t num, CudaContext context);
bool AttendPromptIsBuilt(int arch, int heads);
void MatMulSkinny(const MatMulArgs& args, const Tensor& x, CudaContext context);  // up to kSkinnyRows rows, fp16
void MatMulPlain(const MatMulArgs& args, CudaContext context);                    // any types, f32 arithmetic
void ConvertToHalf(const Tensor& x, void* out, int64_t out_stride, CudaContext context);

inline constexpr int kSkinnyRows = 8;
bool SkinnyTakesNorm(const MatMulArgs& args);

}  // namespace loupe::cuda
