// cuBLASLt for products of many rows: fp16 in, f32 sums, f32 or fp16 out. The library is looked up when the first GPU
// backend is made (libcublasLt.so.13), so that building needs none of its half gigabyte and a machine without a GPU
// never loads it. The choice among its algorithms is timed once per (rows of x, weight shape) and kept. Step thread
// only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace loupe::cuda {

struct LtApi;  // the library's functions

// out[T, rows] = x[T, cols] weight[rows, cols]^T + add; strides in elements.
struct LtProduct {
  const void* weight = nullptr;
  int64_t weight_stride = 0, rows = 0, cols = 0;
  const void* x = nullptr;
  int64_t x_stride = 0, tokens = 0;
  const void* add = nullptr;  // of out's type, or null
  int64_t add_stride = 0;
  void* out = nullptr;
  int64_t out_stride = 0;
  bool out_half = false;
};

class LtMatMul {
 public:
  // FAILED_PRECONDITION if the library is not found, saying which package has it. `workspace` belongs to the caller.
  static absl::StatusOr<std::unique_ptr<LtMatMul>> Create(void* workspace, int64_t workspace_bytes);
  ~LtMatMul();
  void Run(const LtProduct& product, bool deterministic, cudaStream_t stream);
  // While set, products of shapes not seen before are timed; otherwise the library's own first choice serves them.
  void set_timing(bool timing) { timing_ = timing; }

 private:
  struct Algorithm {
    uint64_t data[8];
  };
  struct Plan;
  using Key =
      std::tuple<int64_t, int64_t, int64_t, bool, bool>;  // bucket of tokens, rows, cols, out_half, deterministic

  LtMatMul() = default;
  Algorithm Choose(const LtProduct& product, bool deterministic, cudaStream_t stream);
  int Call(const LtProduct& product, const Algorithm& algorithm, cudaStream_t stream);

  std::unique_ptr<LtApi> api_;
  void* handle_ = nullptr;
  void* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
  bool timing_ = false;
  std::map<Key, Algorithm> chosen_;
};

}  // namespace loupe::cuda
