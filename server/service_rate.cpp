#include "server/service_rate.h"

#include <algorithm>

namespace loupe {

void ServiceRate::Add(Time now) {
  const std::lock_guard lock(mutex_);
  ends_[count_++ % kEnds] = now;
}

double ServiceRate::SecondsUntilRoom(int waiting, Time now) const {
  const std::lock_guard lock(mutex_);
  // Ends before that tell of another load, or of none.
  constexpr std::chrono::seconds kWindow{60};
  int ended = 0;
  Time oldest = now;
  for (size_t i = 0; i < std::min(count_, kEnds); ++i) {
    const Time end = ends_[(count_ - 1 - i) % kEnds];
    if (now - end > kWindow) break;
    oldest = end;
    ++ended;
  }
  if (ended == 0) return 1;
  const double seconds = std::max(1.0, std::chrono::duration<double>(now - oldest).count());
  return waiting / 2.0 * seconds / ended;
}

}  // namespace loupe
