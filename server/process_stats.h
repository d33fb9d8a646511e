// What the kernel knows of this process, for the standard process_* metrics. Any thread; reads /proc.
#pragma once

#include <cstdint>

namespace loupe {

struct ProcessStats {
  double cpu_seconds = 0;
  double start_unix_s = 0;
  int64_t resident_bytes = 0;
  int64_t virtual_bytes = 0;
  int64_t open_fds = 0;
  int64_t max_fds = 0;
};

// Fields that cannot be read stay 0.
ProcessStats ReadProcessStats();

}  // namespace loupe
