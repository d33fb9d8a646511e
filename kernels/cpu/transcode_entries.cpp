// Moves entries between formats, 16 at a time: decoded lane by lane, turned and coded anew. A block is written by one thread.
// Memory is not the limit: about 20 vector operations a coordinate of 16 entries. Step thread and its team.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/check.h"
#include "kernels/cpu/attend_kernels.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/entry_io.h"

namespace loupe {
namespace {

// Fewer entries than this are not worth waking the other threads.
constexpr int64_t kMinEntriesToSplit = 256;

class Transcoder {
 public:
  Transcoder(const TranscodeEntriesArgs& args, const SphericalKernels& kernels) : args_(args), kernels_(kernels) {}

  // Entries [from, to). Returns how many sides were not finite.
  int Run(int64_t from, int64_t to) const {
    int faults = 0;
    while (from < to) {
      int n = 1;
      while (n < kSideLanes && from + n < to && SameFormats(from, from + n)) ++n;
      faults += Move(from, n, true) + Move(from, n, false);
      for (int i = 0; i < n; ++i) MoveLogWeight(args_.entries[from + i]);
      from += n;
    }
    return faults;
  }

 private:
  bool SameFormats(int64_t a, int64_t b) const {
    const EntryTranscode &x = args_.entries[a], &y = args_.entries[b];
    return x.from.page_class().format == y.from.page_class().format && x.to.page_class().format == y.to.page_class().format;
  }

  int Move(int64_t first, int n, bool key) const {
    EntrySide from[kSideLanes], to[kSideLanes];
    const float* means[kSideLanes];
    for (int i = 0; i < n; ++i) {
      const EntryTranscode& entry = args_.entries[first + i];
      from[i] = SideOf(entry.from, key, args_.head_dim, args_.arena);
      to[i] = SideOf(entry.to, key, args_.head_dim, args_.arena);
      means[i] = args_.mean_keys.defined() ? args_.mean_keys.row<float>(entry.list) : nullptr;
    }
    if (from[0].codec == to[0].codec) {
      for (int i = 0; i < n; ++i) CopySide(from[i], to[i], args_.head_dim);
      return 0;
    }
    alignas(64) float x[attend::kMaxHeadDim * kSideLanes] = {};
    LoadSides(from, n, args_.head_dim, means, kernels_, x);
    return StoreSides(to, n, args_.head_dim, means, kernels_, x);
  }

  void MoveLogWeight(const EntryTranscode& entry) const {
    const float* from = LogWeightOf(entry.from, args_.head_dim, args_.arena);
    float* to = LogWeightOf(entry.to, args_.head_dim, args_.arena);
    const float beta = from != nullptr ? *from : 0.f;
    LOUPE_CHECK(to != nullptr || beta == 0) << "log-weight " << beta << " would be lost: the target has none";
    if (to != nullptr) *to = beta;
  }

  const TranscodeEntriesArgs& args_;
  const SphericalKernels& kernels_;
};

}  // namespace

void TranscodeEntriesCpu(const TranscodeEntriesArgs& args, CpuContext context) {
  LOUPE_CHECK(args.head_dim > 0 && args.head_dim <= attend::kMaxHeadDim) << "head size " << args.head_dim;
  const Transcoder transcoder(args, SphericalKernelsOf(context.isa));
  std::atomic<int> faults{0};
  if (args.num_entries < kMinEntriesToSplit) {
    faults = transcoder.Run(0, args.num_entries);
  } else {
    // A share begins where a block of the target does.
    const auto border = [&](int64_t at) {
      while (at > 0 && at < args.num_entries && args.entries[at].to.count % kBlockEntries != 0) ++at;
      return at;
    };
    context.pool.Run([&](int thread) {
      const auto [from, to] = context.pool.Share(args.num_entries, thread);
      faults += transcoder.Run(border(from), border(to));
    });
  }
  if (args.faults.defined()) *args.faults.as<int32_t>() += faults;
}

}  // namespace loupe
