// Everything the server asks of a device, as about twenty ops. One call per op per layer, so a virtual call costs
// nothing here. A backend is created once, lives as long as everything made from it, and is used by one thread at a
// time (the step thread; the loader before it). Ops cannot fail: shapes are checked once when the model is loaded, and
// a violated shape is our own bug (CHECK). Only creation, allocation, packing and waiting return a status.
//
// Device memory is the host's own on the CPU (BackendInfo::host_memory); elsewhere the host reaches it by Copy alone.
// MirroredBuffer (mirrored_buffer.h) hides the difference.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/ops.h"

namespace loupe {

// Work given to one stream runs in order. The CPU backend runs each op before the call returns.
class Stream {
 public:
  virtual ~Stream() = default;
  // Returns once everything given to the stream so far has run. UNAVAILABLE: the device has failed, for good in this
  // process; what the stream should have computed is lost.
  virtual absl::Status Synchronize() = 0;
};

// Device memory with an owner. The CPU's is anonymous memory in 2 MiB pages.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual void* data() const = 0;
  virtual int64_t bytes() const = 0;
};

// A recorded run of ops, launched as one. Pointers and shapes are those of the recording; what they point to may change.
class OpGraph {
 public:
  virtual ~OpGraph() = default;
  virtual void Launch(Stream& stream) = 0;
  virtual int64_t bytes() const = 0;  // device memory that it holds
};

struct BackendOptions {
  std::string device = "auto";  // auto | cpu | cuda | cuda:N; auto takes a GPU if this build can use one that is there
  int num_threads = 0;          // CPU: 0 takes all cores that the process may use
  bool exact = false;           // f32 arithmetic over dequantised weights, the slow yardstick
  bool deterministic = false;   // CUDA: a row's bits do not depend on its company (the CPU's never do)
  std::string isa;              // CPU: empty chooses; "portable", "avx2", "avx512" force one (for tests)
};

struct BackendInfo {
  std::string name;    // cpu, cuda
  std::string detail;  // e.g. "avx512 vnni bf16, 2 threads"
  int num_threads = 1;
  PageFormat dense_format;             // how pages that users call dense are coded
  DType activations = DType::kF32;     // what the pass keeps between ops, the residual stream apart, which is f32
  bool host_memory = true;             // the host may read and write buffers
  int64_t memory_bytes = 0;            // physical memory that the KV cache may be sized from
  int64_t memory_available_bytes = 0;  // of it, free when asked
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual BackendInfo Info() const = 0;
  // RESOURCE_EXHAUSTED names the bytes asked and what the system said. Memory is zero and 2 MiB aligned.
  virtual absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) = 0;
  // Memory of the host that copies to and from the device run fastest on; zero.
  virtual absl::StatusOr<std::unique_ptr<DeviceBuffer>> AllocateHost(int64_t bytes) = 0;
  virtual std::unique_ptr<Stream> NewStream() = 0;
  // Between host and device memory in any direction, in the stream's order. Host memory from AllocateHost stays untouched
  // until the copy has run; other host memory that is read may be reused at once.
  virtual void Copy(void* to, const void* from, int64_t bytes, Stream& stream) = 0;

  // Repacks matrices of equal `cols`, stacked by rows into one (fused QKV, gate/up). The host memory may go afterwards.
  virtual absl::StatusOr<std::unique_ptr<Weight>> PackWeight(std::span<const HostMatrix> parts) = 0;

  // Records the ops that `ops` gives to the stream, without running them; null where recording is unknown (the CPU).
  // Nothing in `ops` may wait or look at results, and it must have run once before, unrecorded.
  virtual std::unique_ptr<OpGraph> Record(const std::function<void()>& ops, Stream& stream) {
    (void)ops, (void)stream;
    return nullptr;
  }
  // Before serving: the product is computed and the fastest way to do so remembered for its shape and number of rows.
  virtual void Prepare(const MatMulArgs& args, Stream& stream) { MatMul(args, stream); }

  // Reads `bytes` of a buffer once and does nothing else: how fast the memory can be.
  virtual void ReadMemory(const DeviceBuffer& buffer, int64_t bytes, Stream& stream) = 0;

  virtual void Embed(const EmbedArgs& args, Stream& stream) = 0;
  virtual void RmsNorm(const RmsNormArgs& args, Stream& stream) = 0;
  virtual void MatMul(const MatMulArgs& args, Stream& stream) = 0;
  virtual void SiluMul(const SiluMulArgs& args, Stream& stream) = 0;
  virtual void Rope(const RopeArgs& args, Stream& stream) = 0;
  virtual void AdvanceLists(const AdvanceListsArgs& args, Stream& stream) = 0;
  virtual void AppendKv(const AppendKvArgs& args, Stream& stream) = 0;
  virtual void Attend(const AttendArgs& args, Stream& stream) = 0;
  virtual void CopyEntries(const CopyEntriesArgs& args, Stream& stream) = 0;
  virtual void TranscodeEntries(const TranscodeEntriesArgs& args, Stream& stream) = 0;
  virtual void MergeEntries(const MergeEntriesArgs& args, Stream& stream) = 0;
  virtual void SumAttention(const SumAttentionArgs& args, Stream& stream) = 0;
  virtual void SummariseKeys(const SummariseKeysArgs& args, Stream& stream) = 0;
  virtual void GatherRows(const GatherRowsArgs& args, Stream& stream) = 0;
  virtual void Surprisal(const SurprisalArgs& args, Stream& stream) = 0;
  virtual void Sample(const SampleArgs& args, Stream& stream) = 0;
};

// INVALID_ARGUMENT for an unknown device, naming those that exist in this build.
absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const BackendOptions& options);
// Names that MakeBackend understands, for messages: "auto, cpu" and in a CUDA build "cuda".
const char* BuiltDevices();

}  // namespace loupe
