#include "server/descriptors.h"

#include <sys/resource.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

namespace loupe {

int64_t RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;  // what Linux gives by default
  const rlimit raised{limit.rlim_max, limit.rlim_max};
  if (limit.rlim_cur < limit.rlim_max && setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  constexpr auto kMost = static_cast<rlim_t>(std::numeric_limits<int64_t>::max());
  return static_cast<int64_t>(std::min(limit.rlim_cur, kMost));
}

absl::StatusOr<int> FitConnections(int wanted, int64_t descriptors) {
  const int64_t room = descriptors - kReservedDescriptors;
  if (wanted <= room) return wanted;
  if (room < 1) {
    return absl::ResourceExhaustedError(absl::StrCat("this process may open ", descriptors, " files, and ", kReservedDescriptors,
                                                     " are set aside before the first connection; raise its limit (ulimit -n)"));
  }
  spdlog::warn("--max-connections is {} instead of {}: this process may open {} files, and {} of them are set aside; raise its "
               "limit (ulimit -n)",
               room, wanted, descriptors, kReservedDescriptors);
  return static_cast<int>(room);
}

}  // namespace loupe
