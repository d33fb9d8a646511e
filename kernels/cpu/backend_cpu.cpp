#include "kernels/cpu/backend_cpu.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/huge_memory.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/scratch.h"

namespace loupe {
namespace {

constexpr int kMaxThreads = 1024;

int UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(
      std::clamp<int64_t>(sysconf(_SC_NPROCESSORS_ONLN), 1, kMaxThreads));  // more cores than the set holds
}

class CpuBuffer : public DeviceBuffer {
 public:
  explicit CpuBuffer(std::unique_ptr<HugeMemory> memory) : memory_(std::move(memory)) {}
  void* data() const override { return memory_->data(); }
  int64_t bytes() const override { return memory_->bytes(); }

 private:
  std::unique_ptr<HugeMemory> memory_;
};

class CpuStream : public Stream {
 public:
  absl::Status Synchronize() override { return absl::OkStatus(); }
};

class BackendCpu : public Backend {
 public:
  BackendCpu(Isa isa, int num_threads, bool exact)
      : pool_(num_threads), scratch_(num_threads), context_{pool_, isa, exact, &scratch_} {}

  BackendInfo Info() const override {
    const SystemMemory memory = ReadSystemMemory();
    const char* isa = context_.isa == Isa::kAvx512 ? "avx512 vnni bf16" : IsaName(context_.isa);
    BackendInfo info;
    info.name = "cpu";
    info.num_threads = pool_.size();
    info.detail = absl::StrCat(isa, ", ", pool_.size(), pool_.size() == 1 ? " thread" : " threads",
                               context_.exact ? ", exact" : "");
    if (context_.exact) info.dense_format = {Codec::kF32, Codec::kF32};
    info.memory_bytes = memory.total_bytes;
    info.memory_available_bytes = memory.available_bytes;
    return info;
  }

  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override {
    auto memory = HugeMemory::Create(bytes);
    if (!memory.ok()) return memory.status();
    return std::unique_ptr<DeviceBuffer>(new CpuBuffer(*std::move(memory)));
  }
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> AllocateHost(int64_t bytes) override { return Allocate(bytes); }
  std::unique_ptr<Stream> NewStream() override { return std::make_unique<CpuStream>(); }
  void Copy(void* to, const void* from, int64_t bytes, Stream&) override { std::memmove(to, from, static_cast<size_t>(bytes)); }
  absl::StatusOr<std::unique_ptr<Weight>> PackWeight(std::span<const HostMatrix> parts) override {
    return PackWeightCpu(parts, weight_memory_, context_);
  }

  void ReadMemory(const DeviceBuffer& buffer, int64_t bytes, Stream&) override {
    ReadMemoryCpu(buffer.data(), bytes, context_);
  }
  void Embed(const EmbedArgs& args, Stream&) override { EmbedCpu(args, context_); }
  void RmsNorm(const RmsNormArgs& args, Stream&) override { RmsNormCpu(args, context_); }
  void MatMul(const MatMulArgs& args, Stream&) override {
    if (args.norm.x.defined()) RmsNormCpu(args.norm, context_);
    MatMulCpu(args, context_);
    if (args.gated.defined()) SiluMulCpu({args.out, args.gated}, context_);
  }
  void SiluMul(const SiluMulArgs& args, Stream&) override { SiluMulCpu(args, context_); }
  void Rope(const RopeArgs& args, Stream&) override { RopeCpu(args, context_); }
  void AdvanceLists(const AdvanceListsArgs& args, Stream&) override { AdvanceListsCpu(args); }
  void AppendKv(const AppendKvArgs& args, Stream&) override {
    const Rotation& r = args.rotation;
    if (r.q.defined()) {
      for (const Tensor& x : {r.q, args.k}) RopeCpu({x, r.positions, r.frequencies, r.scale, r.interleaved}, context_);
    }
    AppendKvCpu(args, context_);
  }
  void Attend(const AttendArgs& args, Stream&) override { AttendCpu(args, context_); }
  void CopyEntries(const CopyEntriesArgs& args, Stream&) override { CopyEntriesCpu(args, context_); }
  void TranscodeEntries(const TranscodeEntriesArgs& args, Stream&) override { TranscodeEntriesCpu(args, context_); }
  void MergeEntries(const MergeEntriesArgs& args, Stream&) override { MergeEntriesCpu(args, context_); }
  void SumAttention(const SumAttentionArgs& args, Stream&) override { SumAttentionCpu(args, context_); }
  void SummariseKeys(const SummariseKeysArgs& args, Stream&) override { SummariseKeysCpu(args, context_); }
  void GatherRows(const GatherRowsArgs& args, Stream&) override { GatherRowsCpu(args, context_); }
  void Surprisal(const SurprisalArgs& args, Stream&) override { SurprisalCpu(args, context_); }
  void Sample(const SampleArgs& args, Stream&) override { SampleCpu(args, context_); }

 private:
  ThreadPool pool_;
  CpuScratch scratch_;
  WeightMemory weight_memory_;
  const CpuContext context_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const BackendOptions& options) {
  const Isa best = DetectIsa();
  Isa isa = best;
  if (!options.isa.empty()) {
    bool known = false;
    for (const Isa candidate : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
      if (options.isa != IsaName(candidate)) continue;
      known = true;
      isa = candidate;
    }
    if (!known) {
      return absl::InvalidArgumentError(
          absl::StrCat("instruction set '", options.isa, "' is unknown; known are portable, avx2 and avx512"));
    }
    if (isa > best) {
      return absl::InvalidArgumentError(
          absl::StrCat("this CPU lacks instruction set '", options.isa, "'; its best is ", IsaName(best)));
    }
  }
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.num_threads, " threads asked; give 1 to ", kMaxThreads, ", or 0 for all cores"));
  }
  const int num_threads = options.num_threads > 0 ? options.num_threads : std::min(UsableCores(), kMaxThreads);
  try {
    return std::unique_ptr<Backend>(new BackendCpu(isa, num_threads, options.exact));
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("the system gives no ", num_threads, " threads (", error.what(),
                                                     "); ask for fewer with --threads or raise the limit"));
  }
}

}  // namespace loupe
