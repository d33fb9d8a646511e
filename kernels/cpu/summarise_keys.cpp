// Norms of a list's keys and their cosine with the mean direction (KeyDiff, Park et al., arXiv 2504.15364): once a prompt,
// so plain loops over the 16 lanes of a block are enough. Reads every key once, twice with the alignment. Step thread.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/attend_kernels.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/entry_io.h"

namespace loupe {
namespace {

// Calls visit(keys [D][16], first entry, entries) for every block of the list.
template <class Visit>
void ForEachBlock(const SummariseKeysArgs& args, const SphericalKernels& kernels, const Visit& visit) {
  const int dim = args.head_dim;
  alignas(64) float keys[attend::kMaxHeadDim * kBlockEntries] = {};
  for (int page = 0, first = 0; page < args.num_pages; first += args.pages[page++].count) {
    PageRef slot = args.pages[page];
    const int count = slot.count;
    for (int entry = 0; entry < count; entry += kBlockEntries) {
      const int n = std::min(kBlockEntries, count - entry);
      EntrySide sides[kBlockEntries];
      const float* means[kBlockEntries];
      for (int i = 0; i < n; ++i) {
        slot.count = static_cast<uint16_t>(entry + i);
        sides[i] = SideOf(slot, true, dim, const_cast<void*>(args.arena));  // only read
        means[i] = args.mean_key;
      }
      LoadSides(sides, n, dim, means, kernels, keys);
      visit(keys, first + entry, n);
    }
  }
}

}  // namespace

void SummariseKeysCpu(const SummariseKeysArgs& args, CpuContext context) {
  const SphericalKernels& kernels = SphericalKernelsOf(context.isa);
  const int dim = args.head_dim;
  LOUPE_CHECK(dim > 0 && dim <= attend::kMaxHeadDim) << "head size " << dim;
  std::vector<double> mean(static_cast<size_t>(dim), 0.0);
  int64_t entries = 0;
  ForEachBlock(args, kernels, [&](const float* keys, int first, int count) {
    float squares[kBlockEntries] = {};
    for (int d = 0; d < dim; ++d) {
      for (int i = 0; i < kBlockEntries; ++i) squares[i] += keys[d * kBlockEntries + i] * keys[d * kBlockEntries + i];
    }
    float inverse[kBlockEntries];
    for (int i = 0; i < count; ++i) {
      args.norms[first + i] = std::sqrt(squares[i]);
      inverse[i] = squares[i] > 0 ? 1 / args.norms[first + i] : 0;
    }
    entries += count;
    if (args.alignment == nullptr) return;
    for (int d = 0; d < dim; ++d) {
      double sum = 0;
      for (int i = 0; i < count; ++i) sum += double{keys[d * kBlockEntries + i]} * double{inverse[i]};
      mean[static_cast<size_t>(d)] += sum;
    }
  });
  if (args.alignment == nullptr || entries == 0) return;
  double square = 0;
  for (const double x : mean) square += x * x;
  const double length = std::sqrt(square);
  ForEachBlock(args, kernels, [&](const float* keys, int first, int count) {
    float dots[kBlockEntries] = {};
    for (int d = 0; d < dim; ++d) {
      const float direction = length > 0 ? static_cast<float>(mean[static_cast<size_t>(d)] / length) : 0.f;
      for (int i = 0; i < kBlockEntries; ++i) dots[i] += keys[d * kBlockEntries + i] * direction;
    }
    for (int i = 0; i < count; ++i) args.alignment[first + i] = args.norms[first + i] > 0 ? dots[i] / args.norms[first + i] : 0;
  });
}

}  // namespace loupe
