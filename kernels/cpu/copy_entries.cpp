// Copies entries between pages byte by byte, in the order given: what an earlier copy wrote, a later one may read. Runs
// of 16 entries that fill a block move as one. Step thread; memory is the limit (8 * D bytes an entry, read and written).
#include <cstdint>
#include <cstring>

#include "kernels/check.h"
#include "kernels/cpu/cpu_ops.h"

namespace loupe {
namespace {

struct Slot {
  uint8_t* keys;    // of its block, at its lane
  uint8_t* values;  // its row
  int64_t key_bytes, value_bytes;  // of an entry
  float* log_weight;  // or null
};

Slot SlotOf(const PageRef& ref, int dim, void* arena) {
  const PageClass page_class = ref.page_class();
  LOUPE_CHECK(ref.count < page_class.entries()) << "slot " << ref.count << " of a page of " << page_class.entries();
  const PageLayout layout = MakePageLayout(page_class, dim);
  uint8_t* page = static_cast<uint8_t*>(arena) + int64_t{ref.unit} * kPageAlignment;
  const int block = ref.count / kBlockEntries, lane = ref.count % kBlockEntries;
  Slot slot;
  slot.key_bytes = CodecBytes(page_class.format.key, dim);
  slot.value_bytes = CodecBytes(page_class.format.value, dim);
  slot.keys = page + block * kBlockEntries * slot.key_bytes + lane * (slot.key_bytes / dim);
  slot.values = page + layout.value_offset + ref.count * slot.value_bytes;
  slot.log_weight = ref.log_weights ? reinterpret_cast<float*>(page + layout.log_weight_offset) + ref.count : nullptr;
  return slot;
}

void CopyLogWeight(const Slot& from, const Slot& to) {
  const float beta = from.log_weight != nullptr ? *from.log_weight : 0.f;
  LOUPE_CHECK(to.log_weight != nullptr || beta == 0) << "log-weight " << beta << " would be lost: the target has none";
  if (to.log_weight != nullptr) *to.log_weight = beta;
}

// Elements of an entry's key lie 16 elements apart.
template <class Element>
void CopyKey(const uint8_t* from, uint8_t* to, int dim) {
  const auto* x = reinterpret_cast<const Element*>(from);
  auto* y = reinterpret_cast<Element*>(to);
  for (int d = 0; d < dim; ++d) y[d * kBlockEntries] = x[d * kBlockEntries];
}

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

}  // namespace

void CopyEntriesCpu(const CopyEntriesArgs& args, CpuContext context) {
  (void)context;
  const int dim = args.head_dim;
  for (int64_t i = 0; i < args.num_copies;) {
    const EntryCopy& copy = args.copies[i];
    LOUPE_CHECK(copy.from.page_class().format == copy.to.page_class().format) << "copy " << i << " changes the format";
    const Slot from = SlotOf(copy.from, dim, args.arena), to = SlotOf(copy.to, dim, args.arena);
    if (IsWholeBlock(args.copies + i, args.num_copies - i)) {
      std::memcpy(to.keys, from.keys, static_cast<size_t>(from.key_bytes) * kBlockEntries);
      std::memcpy(to.values, from.values, static_cast<size_t>(from.value_bytes) * kBlockEntries);
      for (int j = 0; j < kBlockEntries; ++j, ++i) {
        CopyLogWeight(SlotOf(args.copies[i].from, dim, args.arena), SlotOf(args.copies[i].to, dim, args.arena));
      }
      continue;
    }
    (from.key_bytes == 4 * dim ? CopyKey<uint32_t> : CopyKey<uint16_t>)(from.keys, to.keys, dim);
    std::memmove(to.values, from.values, static_cast<size_t>(from.value_bytes));
    CopyLogWeight(from, to);
    ++i;
  }
}

}  // namespace loupe
