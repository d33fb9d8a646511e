// Copies entries between pages byte by byte, in the order given: what an earlier copy wrote, a later one may read. Runs
// of 16 entries that fill a block move as one. Step thread; memory is the limit (8 * D bytes an entry, read and written).
#include <cstdint>
#include <cstring>

#include "kernels/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/entry_io.h"

namespace loupe {
namespace {

// Whether the next 16 copies move one whole block onto another.
bool IsWholeBlock(const EntryCopy* copies, int64_t left) {
  if (left < kBlockEntries) return false;
  const EntryCopy& first = copies[0];
  if (first.from.count % kBlockEntries != 0 || first.to.count % kBlockEntries != 0) return false;
  if (first.from.unit == first.to.unit) return false;
  const auto follows = [](PageRef ref, const PageRef& start, int i) {
    ref.count = static_cast<uint16_t>(ref.count - i);
    return std::memcmp(&ref, &start, sizeof ref) == 0;
  };
  for (int i = 1; i < kBlockEntries; ++i) {
    if (!follows(copies[i].from, first.from, i) || !follows(copies[i].to, first.to, i)) return false;
  }
  return true;
}

void CopyLogWeight(const EntryCopy& copy, int dim, void* arena) {
  const float* from = LogWeightOf(copy.from, dim, arena);
  float* to = LogWeightOf(copy.to, dim, arena);
  const float beta = from != nullptr ? *from : 0.f;
  LOUPE_CHECK(to != nullptr || beta == 0) << "log-weight " << beta << " would be lost: the target has none";
  if (to != nullptr) *to = beta;
}

void CopyBlock(const EntrySide& from, const EntrySide& to, int dim) {
  std::memcpy(to.block, from.block, static_cast<size_t>(PlaneBytes(from.codec, dim)) * kBlockEntries);
  if (IsCoded(from.codec)) std::memcpy(to.scale, from.scale, sizeof(uint16_t) * kBlockEntries);
}

}  // namespace

void CopyEntriesCpu(const CopyEntriesArgs& args, CpuContext context) {
  (void)context;
  const int dim = args.head_dim;
  for (int64_t i = 0; i < args.num_copies;) {
    const EntryCopy& copy = args.copies[i];
    LOUPE_CHECK(copy.from.page_class().format == copy.to.page_class().format) << "copy " << i << " changes the format";
    const int n = IsWholeBlock(args.copies + i, args.num_copies - i) ? kBlockEntries : 1;
    for (const bool key : {true, false}) {
      const EntrySide from = SideOf(copy.from, key, dim, args.arena), to = SideOf(copy.to, key, dim, args.arena);
      (n == 1 ? CopySide : CopyBlock)(from, to, dim);
    }
    for (int j = 0; j < n; ++j, ++i) CopyLogWeight(args.copies[i], dim, args.arena);
  }
}

}  // namespace loupe
