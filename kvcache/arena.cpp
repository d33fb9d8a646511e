#include "kvcache/arena.h"

#include <utility>

#include "absl/strings/str_format.h"

namespace loupe {

absl::StatusOr<std::unique_ptr<SlabArena>> SlabArena::Create(int64_t bytes, Backend& backend) {
  // A PageRef counts units of 128 bytes in 32 bits.
  constexpr int64_t kMaxBytes = (int64_t{1} << 32) * kPageAlignment;
  if (bytes < kSlabBytes || bytes > kMaxBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the KV arena is set to %d bytes; give it between %d (one slab) and %d", bytes, kSlabBytes, kMaxBytes));
  }
  const int num_slabs = static_cast<int>(bytes / kSlabBytes);
  auto buffer = backend.Allocate(num_slabs * kSlabBytes);
  if (!buffer.ok()) return buffer.status();
  return std::unique_ptr<SlabArena>(new SlabArena(*std::move(buffer), num_slabs));
}

SlabArena::SlabArena(std::unique_ptr<DeviceBuffer> buffer, int num_slabs)
    : buffer_(std::move(buffer)), num_slabs_(num_slabs), free_(num_slabs) {
  free_.InsertBelow(num_slabs);
}

int SlabArena::TakeSlab() {
  const int slab = free_.First();
  if (slab >= 0) free_.Erase(slab);
  return slab;
}

void SlabArena::GiveSlab(int slab) { free_.Insert(slab); }

}  // namespace loupe
