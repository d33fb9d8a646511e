#include "kernels/cuda/backend_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/lt_matmul.h"

namespace loupe {
namespace cuda {

// attend_decode.cu
int64_t DecodePartialFloats(int num_sms, bool deterministic);
int64_t DecodeCounters();
absl::Status CheckDevice(const cudaDeviceProp& device);

namespace {

constexpr int kMinArch = 80;
constexpr int64_t kLtWorkspaceBytes = int64_t{64} << 20;
constexpr int64_t kActivationBytes = int64_t{64} << 20;
constexpr int64_t kMaxCopies = int64_t{1} << 16;
constexpr int64_t kRowLseFloats = int64_t{1} << 18;
constexpr int64_t kScratchBytes = int64_t{64} << 20;
constexpr int64_t kStagingBytes = int64_t{16} << 20;

class CudaBuffer : public DeviceBuffer {
 public:
  CudaBuffer(void* data, int64_t bytes, bool host) : data_(data), bytes_(bytes), host_(host) {}
  ~CudaBuffer() override { host_ ? cudaFreeHost(data_) : cudaFree(data_); }
  void* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void* data_;
  int64_t bytes_;
  bool host_;
};

class CudaStream : public Stream {
 public:
  explicit CudaStream(cudaStream_t stream) : stream_(stream) {}
  absl::Status Synchronize() override {
    const cudaError_t error = cudaStreamSynchronize(stream_);
    return error == cudaSuccess ? absl::OkStatus() : DeviceFault("a step", error);
  }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_;  // the backend's own
};

class CudaGraph : public OpGraph {
 public:
  CudaGraph(cudaGraphExec_t graph, int64_t bytes, cudaStream_t stream)
      : graph_(graph), bytes_(bytes), stream_(stream) {}
  ~CudaGraph() override { cudaGraphExecDestroy(graph_); }
  void Launch(Stream&) override { LOUPE_CUDA(cudaGraphLaunch(graph_, stream_)); }
  int64_t bytes() const override { return bytes_; }

 private:
  cudaGraphExec_t graph_;
  int64_t bytes_;
  cudaStream_t stream_;
};

class BackendCuda : public Backend {
 public:
  BackendCuda(int device, const cudaDeviceProp& properties, const BackendOptions& options)
      : device_(device), properties_(properties), options_(options) {}
  ~BackendCuda() override {
    if (workspace_.copies_taken) cudaEventDestroy(workspace_.copies_taken);
    if (context_.stream) cudaStreamDestroy(context_.stream);
  }

  absl::Status Start();
  BackendInfo Info() const override;
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> AllocateHost(int64_t bytes) override;
  // All work of a process is in one order.
  std::unique_ptr<Stream> NewStream() override { return std::make_unique<CudaStream>(context_.stream); }
  void Copy(void* to, const void* from, int64_t bytes, Stream&) override {
    LOUPE_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, Here().stream));
  }

  absl::StatusOr<std::unique_ptr<Weight>> PackWeight(std::span<const HostMatrix> parts) override {
    return PackWeightCuda(parts, *this, Here());
  }
  std::unique_ptr<OpGraph> Record(const std::function<void()>& ops, Stream& stream) override;
  void Prepare(const MatMulArgs& args, Stream&) override {
    lt_->set_timing(true);
    MatMulCuda(args, Here());
    lt_->set_timing(false);
  }
  void ReadMemory(const DeviceBuffer& buffer, int64_t bytes, Stream&) override {
    ReadMemoryCuda(buffer.data(), bytes, Here());
  }
  void Embed(const EmbedArgs& args, Stream&) override { EmbedCuda(args, Here()); }
  void RmsNorm(const RmsNormArgs& args, Stream&) override { RmsNormCuda(args, Here()); }
  void MatMul(const MatMulArgs& args, Stream&) override { MatMulCuda(args, Here()); }
  void SiluMul(const SiluMulArgs& args, Stream&) override { SiluMulCuda(args, Here()); }
  void Rope(const RopeArgs& args, Stream&) override { RopeCuda(args, Here()); }
  void AdvanceLists(const AdvanceListsArgs& args, Stream&) override { AdvanceListsCuda(args, Here()); }
  void AppendKv(const AppendKvArgs& args, Stream&) override { AppendKvCuda(args, Here()); }
  void Attend(const AttendArgs& args, Stream&) override { AttendCuda(args, Here()); }
  void CopyEntries(const CopyEntriesArgs& args, Stream&) override { CopyEntriesCuda(args, Here()); }
  void TranscodeEntries(const TranscodeEntriesArgs& args, Stream&) override { TranscodeEntriesCuda(args, Here()); }
  void MergeEntries(const MergeEntriesArgs& args, Stream&) override { MergeEntriesCuda(args, Here()); }
  void SumAttention(const SumAttentionArgs& args, Stream&) override { SumAttentionCuda(args, Here()); }
  void SummariseKeys(const SummariseKeysArgs& args, Stream&) override { SummariseKeysCuda(args, Here()); }
  void GatherRows(const GatherRowsArgs& args, Stream&) override { GatherRowsCuda(args, Here()); }
  void Surprisal(const SurprisalArgs& args, Stream&) override { SurprisalCuda(args, Here()); }
  void Sample(const SampleArgs& args, Stream&) override { SampleCuda(args, Here()); }

 private:
  absl::Status Take(int64_t bytes, bool host, void** to);
  // The device is CUDA's for each thread apart, and the loader and the step thread are two.
  const CudaContext& Here() const {
    static thread_local int current = -1;
    if (std::exchange(current, device_) != device_) LOUPE_CUDA(cudaSetDevice(device_));
    return context_;
  }

  const int device_;
  const cudaDeviceProp properties_;
  const BackendOptions options_;
  std::vector<std::unique_ptr<DeviceBuffer>> owned_;
  Workspace workspace_;
  CudaContext context_;
  std::unique_ptr<LtMatMul> lt_;
};

absl::Status BackendCuda::Take(int64_t bytes, bool host, void** to) {
  auto buffer = host ? AllocateHost(bytes) : Allocate(bytes);
  if (!buffer.ok()) return buffer.status();
  *to = (*buffer)->data();
  owned_.push_back(*std::move(buffer));
  return absl::OkStatus();
}

absl::Status BackendCuda::Start() {
  if (const cudaError_t e = cudaSetDevice(device_); e != cudaSuccess) return DeviceFault("cudaSetDevice", e);
  if (const cudaError_t e = cudaStreamCreateWithFlags(&context_.stream, cudaStreamNonBlocking); e != cudaSuccess) {
    return DeviceFault("making a stream", e);
  }
  if (const cudaError_t e = cudaEventCreateWithFlags(&workspace_.copies_taken, cudaEventDisableTiming); e != cudaSuccess) {
    return DeviceFault("making an event", e);
  }
  if (absl::Status s = CheckDevice(properties_); !s.ok()) return s;
  context_.num_sms = properties_.multiProcessorCount;
  context_.arch = 10 * properties_.major + properties_.minor;
  context_.exact = options_.exact;
  context_.deterministic = options_.deterministic;
  context_.workspace = &workspace_;
  workspace_.partial_floats = DecodePartialFloats(context_.num_sms, options_.deterministic);
  workspace_.num_counters = DecodeCounters();
  workspace_.row_lse_floats = kRowLseFloats;
  workspace_.activation_bytes = kActivationBytes;
  workspace_.num_copies = kMaxCopies;
  workspace_.scratch_bytes = kScratchBytes;
  workspace_.staging_bytes = kStagingBytes;
  void* lt_workspace = nullptr;
  const struct {
    int64_t bytes;
    bool host;
    void** to;
  } parts[] = {
      {workspace_.partial_floats * 4, false, reinterpret_cast<void**>(&workspace_.partials)},
      {workspace_.num_counters * 4, false, reinterpret_cast<void**>(&workspace_.counters)},
      {workspace_.row_lse_floats * 4, false, reinterpret_cast<void**>(&workspace_.row_lse)},
      {workspace_.activation_bytes, false, &workspace_.activations},
      {workspace_.num_copies * int64_t{sizeof(SlotCopy)}, false, reinterpret_cast<void**>(&workspace_.copies)},
      {workspace_.num_copies * int64_t{sizeof(SlotCopy)}, true, reinterpret_cast<void**>(&workspace_.copies_host)},
      {(workspace_.num_copies + 1) * 4, false, reinterpret_cast<void**>(&workspace_.run_begin)},
      {(workspace_.num_copies + 1) * 4, true, reinterpret_cast<void**>(&workspace_.run_begin_host)},
      {workspace_.scratch_bytes, false, reinterpret_cast<void**>(&workspace_.scratch)},
      {workspace_.staging_bytes, true, reinterpret_cast<void**>(&workspace_.staging)},
      {kLtWorkspaceBytes, false, &lt_workspace}};
  for (const auto& part : parts) {
    if (absl::Status s = Take(part.bytes, part.host, part.to); !s.ok()) return s;
  }
  auto lt = LtMatMul::Create(lt_workspace, kLtWorkspaceBytes);
  if (!lt.ok()) return lt.status();
  lt_ = *std::move(lt);
  context_.lt = lt_.get();
  return absl::OkStatus();
}

BackendInfo BackendCuda::Info() const {
  size_t available = 0, total = 0;
  Here();
  LOUPE_CUDA(cudaMemGetInfo(&available, &total));
  BackendInfo info;
  info.name = "cuda";
  info.detail = absl::StrCat(properties_.name, ", compute capability ", properties_.major, ".", properties_.minor, ", ",
                             properties_.multiProcessorCount, " SMs", options_.exact ? ", exact" : "",
                             options_.deterministic ? ", deterministic" : "");
  info.host_memory = false;
  info.activations = options_.exact ? DType::kF32 : DType::kF16;
  if (options_.exact) info.dense_format = {Codec::kF32, Codec::kF32};
  info.memory_bytes = static_cast<int64_t>(total);
  info.memory_available_bytes = static_cast<int64_t>(available);
  return info;
}

std::unique_ptr<OpGraph> BackendCuda::Record(const std::function<void()>& ops, Stream&) {
  size_t before = 0, after = 0, total = 0;
  Here();
  LOUPE_CUDA(cudaMemGetInfo(&before, &total));
  LOUPE_CUDA(cudaStreamBeginCapture(context_.stream, cudaStreamCaptureModeThreadLocal));
  ops();
  cudaGraph_t graph = nullptr;
  LOUPE_CUDA(cudaStreamEndCapture(context_.stream, &graph));
  cudaGraphExec_t ready = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&ready, graph, 0);
  if (graph) cudaGraphDestroy(graph);
  if (error != cudaSuccess) {  // out of memory, most likely: the ops go on without a graph
    cudaGetLastError();
    return nullptr;
  }
  LOUPE_CUDA(cudaGraphUpload(ready, context_.stream));
  LOUPE_CUDA(cudaMemGetInfo(&after, &total));
  return std::make_unique<CudaGraph>(ready, before > after ? static_cast<int64_t>(before - after) : 0, context_.stream);
}

absl::StatusOr<std::unique_ptr<DeviceBuffer>> BackendCuda::Allocate(int64_t bytes) {
  void* data = nullptr;
  Here();
  const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t available = 0, total = 0;
    cudaMemGetInfo(&available, &total);
    return absl::ResourceExhaustedError(
        absl::StrCat("the GPU has ", available, " of ", total, " bytes free, ", bytes,
                     " are asked; lower --kv-device-bytes, --max-step-tokens or --max-sequences"));
  }
  if (error != cudaSuccess) return DeviceFault("taking memory", error);
  LOUPE_CUDA(cudaMemsetAsync(data, 0, static_cast<size_t>(std::max<int64_t>(bytes, 1)), context_.stream));
  return std::unique_ptr<DeviceBuffer>(new CudaBuffer(data, bytes, false));
}

absl::StatusOr<std::unique_ptr<DeviceBuffer>> BackendCuda::AllocateHost(int64_t bytes) {
  void* data = nullptr;
  Here();
  const cudaError_t error =
      cudaHostAlloc(&data, static_cast<size_t>(std::max<int64_t>(bytes, 1)), cudaHostAllocDefault);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return absl::ResourceExhaustedError(
        absl::StrCat(bytes, " bytes of pinned host memory are refused; lower --kv-host-bytes"));
  }
  if (error != cudaSuccess) return DeviceFault("taking pinned host memory", error);
  std::memset(data, 0, static_cast<size_t>(bytes));
  return std::unique_ptr<DeviceBuffer>(new CudaBuffer(data, bytes, true));
}

absl::StatusOr<int> DeviceIndex(const std::string& device) {
  int index = 0;
  if (device == "cuda" || device == "auto") return index;
  if (!absl::StartsWith(device, "cuda:") || !absl::SimpleAtoi(device.substr(5), &index) || index < 0) {
    return absl::InvalidArgumentError(absl::StrCat("device '", device, "' is unknown; give auto, cpu, cuda or cuda:N"));
  }
  return index;
}

}  // namespace
}  // namespace cuda

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const BackendOptions& options) {
  const auto index = cuda::DeviceIndex(options.device);
  if (!index.ok()) return index.status();
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    return absl::FailedPreconditionError(absl::StrCat("no NVIDIA GPU can be used: ", cudaGetErrorString(error),
                                                      "; check the driver, or use --device cpu"));
  }
  if (*index >= count)
    return absl::InvalidArgumentError(absl::StrCat("device cuda:", *index, " is asked, there are ", count));
  cudaDeviceProp properties = {};
  if (const cudaError_t e = cudaGetDeviceProperties(&properties, *index); e != cudaSuccess)
    return cuda::DeviceFault("asking for its properties", e);
  if (10 * properties.major + properties.minor < cuda::kMinArch) {
    return absl::FailedPreconditionError(absl::StrCat(properties.name, " has compute capability ", properties.major,
                                                      ".", properties.minor, "; 8.0 is the least"));
  }
  auto backend = std::make_unique<cuda::BackendCuda>(*index, properties, options);
  if (absl::Status s = backend->Start(); !s.ok()) return s;
  return std::unique_ptr<Backend>(std::move(backend));
}

bool CudaDeviceIsThere() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) cudaGetLastError(), count = 0;
  return count > 0;
}

}  // namespace loupe
