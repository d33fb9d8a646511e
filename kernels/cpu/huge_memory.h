// Anonymous memory in 2 MiB pages, zero and 2 MiB aligned, given back when the object goes. Large pages matter because
// weights and KV pages are far larger than what the TLB reaches with 4 KiB pages. Any thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace loupe {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

class HugeMemory {
 public:
  // RESOURCE_EXHAUSTED with the bytes asked, the memory of the machine and what the system said.
  static absl::StatusOr<std::unique_ptr<HugeMemory>> Create(int64_t bytes);
  ~HugeMemory();
  HugeMemory(const HugeMemory&) = delete;
  HugeMemory& operator=(const HugeMemory&) = delete;

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  HugeMemory(uint8_t* data, int64_t bytes, int64_t mapped_bytes)
      : data_(data), bytes_(bytes), mapped_bytes_(mapped_bytes) {}
  uint8_t* data_;
  int64_t bytes_;         // as asked
  int64_t mapped_bytes_;  // a multiple of 2 MiB
};

struct SystemMemory {
  int64_t total_bytes = 0;      // of the machine, or of the control group if that allows less
  int64_t available_bytes = 0;  // of it, what could be taken now without swapping
};
SystemMemory ReadSystemMemory();

}  // namespace loupe
