// Notices that files were changed, replaced or removed, so that keys and certificates are read again without a restart.
// Looks at them when asked, at most once an interval: an idle server does nothing. Not thread-safe; its owner locks.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace loupe {

class FileWatch {
 public:
  // Made before the files are read for the first time, or a change in between is missed.
  explicit FileWatch(std::vector<std::string> paths,
                     std::chrono::steady_clock::duration interval = std::chrono::seconds(1));
  // True once a change. Links are followed, because a mounted secret changes by its link.
  bool Changed(std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now());

 private:
  using Stamp = std::array<int64_t, 5>;  // device, inode, size, seconds and nanoseconds; all 0: not there
  std::vector<Stamp> Look() const;

  const std::vector<std::string> paths_;
  const std::chrono::steady_clock::duration interval_;
  std::chrono::steady_clock::time_point next_look_;
  std::vector<Stamp> stamps_;
};

}  // namespace loupe
