// The byte arena of one tier: one device buffer, taken at start-up and cut into slabs of 2 MiB. Page classes take whole
// slabs and give empty ones back, which is how formats trade memory. Owned by the cache, used by the step thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kvcache/index_set.h"
#include "kvcache/kv_config.h"

namespace loupe {

class SlabArena {
 public:
  // Rounds down to whole slabs. INVALID_ARGUMENT below one slab or beyond what a PageRef can address; the backend's
  // RESOURCE_EXHAUSTED is passed on.
  static absl::StatusOr<std::unique_ptr<SlabArena>> Create(int64_t bytes, Backend& backend);

  // The free slab of the lowest address, -1 when there is none.
  int TakeSlab();
  void GiveSlab(int slab);

  void* data() const { return buffer_->data(); }
  int num_slabs() const { return num_slabs_; }
  int num_free() const { return free_.size(); }
  int64_t bytes() const { return num_slabs_ * kSlabBytes; }

 private:
  SlabArena(std::unique_ptr<DeviceBuffer> buffer, int num_slabs);

  std::unique_ptr<DeviceBuffer> buffer_;
  int num_slabs_ = 0;
  IndexSet free_;
};

}  // namespace loupe
