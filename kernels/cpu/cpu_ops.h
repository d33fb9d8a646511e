// The CPU backend's ops as free functions, one file each. BackendCpu (backend_cpu.cpp) only forwards to them.
#pragma once

#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops.h"

namespace loupe {

// Instruction sets with kernels of their own, worst first. kAvx512 means F, BW, DQ, VL, VNNI and BF16.
enum class Isa : uint8_t { kPortable, kAvx2, kAvx512 };
Isa DetectIsa();
const char* IsaName(Isa isa);

struct CpuScratch;

// What every op may use.
struct CpuContext {
  ThreadPool& pool;
  Isa isa = Isa::kPortable;
  bool exact = false;
  CpuScratch* scratch = nullptr;  // the backend's; MatMul and Rope need it
};

class WeightMemory;
absl::StatusOr<std::unique_ptr<Weight>> PackWeightCpu(std::span<const HostMatrix> parts, WeightMemory& memory,
                                                      CpuContext context);
void ReadMemoryCpu(const void* data, int64_t bytes, CpuContext context);
void EmbedCpu(const EmbedArgs& args, CpuContext context);
void MatMulCpu(const MatMulArgs& args, CpuContext context);
void RmsNormCpu(const RmsNormArgs& args, CpuContext context);
void SiluMulCpu(const SiluMulArgs& args, CpuContext context);
void RopeCpu(const RopeArgs& args, CpuContext context);
void GatherRowsCpu(const GatherRowsArgs& args, CpuContext context);
void SurprisalCpu(const SurprisalArgs& args, CpuContext context);
void SampleCpu(const SampleArgs& args, CpuContext context);
void AdvanceListsCpu(const AdvanceListsArgs& args);
void AppendKvCpu(const AppendKvArgs& args, CpuContext context);
void AttendCpu(const AttendArgs& args, CpuContext context);
void MergeEntriesCpu(const MergeEntriesArgs& args, CpuContext context);
void SumAttentionCpu(const SumAttentionArgs& args, CpuContext context);
void SummariseKeysCpu(const SummariseKeysArgs& args, CpuContext context);
void CopyEntriesCpu(const CopyEntriesArgs& args, CpuContext context);
void TranscodeEntriesCpu(const TranscodeEntriesArgs& args, CpuContext context);

}  // namespace loupe
