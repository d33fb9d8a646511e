// Writes new keys and values into their slots, as fp16, f32 or codes by the page's format. Keys are scattered, since the
// entries of a block are lanes; at 6 bytes moved an element (4 read, 2 written) it is memory-light next to the projections
// before it. Coded slots are gathered, 16 are encoded at once. Step thread.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "kernels/check.h"
#include "kernels/cpu/attend_kernels.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/entry_io.h"

namespace loupe {
namespace {

// Below this many elements waking the other threads costs more than they save.
constexpr int64_t kMinElementsToSplit = 16384;

using ToHalf = void (*)(const float* x, uint16_t* y, int n);

ToHalf ToHalfOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return attend::Avx512Kernels().to_half;
  if (isa == Isa::kAvx2) return attend::Avx2Kernels().to_half;
#endif
  (void)isa;
  return attend::PortableKernels().to_half;
}

// Sides of one codec that wait to be encoded together.
class CodedSides {
 public:
  CodedSides(int dim, const SphericalKernels& kernels) : dim_(dim), kernels_(kernels) {}

  void Add(const EntrySide& to, const float* x, const float* mean) {
    if (n_ == kSideLanes || (n_ > 0 && to_[0].codec != to.codec)) Flush();
    for (int d = 0; d < dim_; ++d) x_[d * kSideLanes + n_] = x[d];
    to_[n_] = to;
    means_[n_++] = mean;
  }
  void Flush() {
    if (n_ > 0) faults_ += StoreSides(to_, n_, dim_, means_, kernels_, x_);
    n_ = 0;
  }
  int faults() const { return faults_; }

 private:
  const int dim_;
  const SphericalKernels& kernels_;
  EntrySide to_[kSideLanes];
  const float* means_[kSideLanes];
  int n_ = 0, faults_ = 0;
  alignas(64) float x_[attend::kMaxHeadDim * kSideLanes];  // lanes do not meet: those behind n_ may hold anything
};

void StorePlain(const EntrySide& to, const float* x, int dim, ToHalf to_half) {
  if (to.codec == Codec::kF32) return StorePlainSide(to, dim, x, 1);
  alignas(64) uint16_t half[attend::kMaxHeadDim];
  if (!to.key) return to_half(x, reinterpret_cast<uint16_t*>(to.block) + int64_t{to.lane} * dim, dim);
  to_half(x, half, dim);
  uint16_t* keys = reinterpret_cast<uint16_t*>(to.block) + to.lane;
  for (int d = 0; d < dim; ++d) keys[d * kBlockEntries] = half[d];
}

class Appender {
 public:
  Appender(const AppendKvArgs& args, CpuContext context)
      : args_(args), dim_(static_cast<int>(args.k.shape[2])), to_half_(ToHalfOf(context.isa)), kernels_(SphericalKernelsOf(context.isa)) {}

  // Rows [from, to) of all kv heads, but for coded ones a share begins and ends where a block does: neighbours share bytes.
  // Returns the sides that were to be coded and are not finite.
  int Run(int64_t from, int64_t to) const {
    CodedSides keys(dim_, kernels_), values(dim_, kernels_);
    for (int g = 0; g < args_.k.shape[1]; ++g) Add(from, to, g, &keys, &values);
    keys.Flush(), values.Flush();
    return keys.faults() + values.faults();
  }

 private:
  void Add(int64_t from, int64_t to, int g, CodedSides* keys, CodedSides* values) const {
    const int64_t rows = args_.k.rows();
    const float* mean = args_.mean_keys.defined() ? args_.mean_keys.row<float>(g) : nullptr;
    for (int64_t row = Border(from, rows, g); row < Border(to, rows, g); ++row) {
      const PageRef& ref = args_.slots.row<PageRef>(row)[g];
      for (const bool key : {true, false}) {
        const EntrySide side = SideOf(ref, key, dim_, args_.arena);
        const float* x = (key ? args_.k : args_.v).row<float>(row) + int64_t{g} * dim_;
        if (IsCoded(side.codec)) (key ? keys : values)->Add(side, x, key ? mean : nullptr);
        else StorePlain(side, x, dim_, to_half_);
      }
      if (float* log_weight = LogWeightOf(ref, dim_, args_.arena)) *log_weight = 0;
    }
  }

  int64_t Border(int64_t row, int64_t rows, int g) const {
    while (row > 0 && row < rows) {
      const PageRef &before = args_.slots.row<PageRef>(row - 1)[g], &here = args_.slots.row<PageRef>(row)[g];
      const bool coded = IsCoded(here.page_class().format.key) || IsCoded(here.page_class().format.value);
      if (!coded || before.unit != here.unit || here.count % kBlockEntries == 0) break;
      ++row;
    }
    return row;
  }

  const AppendKvArgs& args_;
  const int dim_;
  const ToHalf to_half_;
  const SphericalKernels& kernels_;
};

}  // namespace

void AppendKvCpu(const AppendKvArgs& args, CpuContext context) {
  const int64_t rows = args.k.rows();
  const int groups = static_cast<int>(args.k.shape[1]), dim = static_cast<int>(args.k.shape[2]);
  LOUPE_CHECK(dim > 0 && dim % 8 == 0 && dim <= attend::kMaxHeadDim)
      << "head size " << dim << " is not a multiple of 8 up to " << attend::kMaxHeadDim;
  const Appender appender(args, context);
  std::atomic<int> faults{0};
  const auto append = [&](int64_t from, int64_t to) {
    faults += appender.Run(from, to);
  };
  if (rows * groups * dim < kMinElementsToSplit) {
    append(0, rows);
  } else {
    context.pool.Run([&](int thread) {
      const auto [from, to] = context.pool.Share(rows, thread);
      append(from, to);
    });
  }
  if (args.faults.defined()) *args.faults.as<int32_t>() += faults;
}

}  // namespace loupe
