// Everything the server asks of a device, as about fifteen ops. One call per op per layer, so a virtual call costs
// nothing here. A backend is created once, lives as long as everything made from it, and is used by one thread at a
// time (the step thread; the loader before it). Ops cannot fail: shapes are checked once when the model is loaded, and
// a violated shape is our own bug (CHECK). Only creation, allocation and packing return a status.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/ops.h"

namespace loupe {

// Device memory with an owner. The CPU's is anonymous memory in 2 MiB pages.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual void* data() const = 0;
  virtual int64_t bytes() const = 0;
};

struct BackendOptions {
  std::string device = "auto";  // auto | cpu
  int num_threads = 0;          // CPU: 0 takes all cores that the process may use
  bool exact = false;           // f32 arithmetic over dequantised weights, the slow yardstick
  std::string isa;              // CPU: empty chooses; "portable", "avx2", "avx512" force one (for tests)
};

struct BackendInfo {
  std::string name;    // cpu
  std::string detail;  // e.g. "avx512 vnni bf16, 2 threads"
  int num_threads = 1;
  PageFormat dense_format;             // how pages that users call dense are coded
  int64_t memory_bytes = 0;            // physical memory that the KV cache may be sized from
  int64_t memory_available_bytes = 0;  // of it, free when asked
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual BackendInfo Info() const = 0;
  // RESOURCE_EXHAUSTED names the bytes asked and what the system said. Memory is zero and 2 MiB aligned.
  virtual absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) = 0;
  virtual std::unique_ptr<Stream> NewStream() = 0;

  // Repacks matrices of equal `cols`, stacked by rows into one (fused QKV, gate/up). The host memory may go afterwards.
  virtual absl::StatusOr<std::unique_ptr<Weight>> PackWeight(std::span<const HostMatrix> parts) = 0;

  virtual void Embed(const EmbedArgs& args, Stream& stream) = 0;
  virtual void RmsNorm(const RmsNormArgs& args, Stream& stream) = 0;
  virtual void MatMul(const MatMulArgs& args, Stream& stream) = 0;
  virtual void SiluMul(const SiluMulArgs& args, Stream& stream) = 0;
  virtual void Rope(const RopeArgs& args, Stream& stream) = 0;
  virtual void AppendKv(const AppendKvArgs& args, Stream& stream) = 0;
  virtual void Attend(const AttendArgs& args, Stream& stream) = 0;
  virtual void CopyEntries(const CopyEntriesArgs& args, Stream& stream) = 0;
  virtual void MergeEntries(const MergeEntriesArgs& args, Stream& stream) = 0;
  virtual void SumAttention(const SumAttentionArgs& args, Stream& stream) = 0;
  virtual void SummariseKeys(const SummariseKeysArgs& args, Stream& stream) = 0;
  virtual void GatherRows(const GatherRowsArgs& args, Stream& stream) = 0;
};

// INVALID_ARGUMENT for an unknown device, naming those that exist in this build.
absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const BackendOptions& options);

}  // namespace loupe
