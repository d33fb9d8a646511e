// The rate at which requests end: how long a client that finds the queue full should wait. Thread-safe; Add takes
// nanoseconds, so the step thread may call it.
#pragma once

#include <array>
#include <chrono>
#include <mutex>

namespace loupe {

class ServiceRate {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // A request has ended.
  void Add(Time now = std::chrono::steady_clock::now());
  // Until half of `waiting` requests will have been served: by then there is room, and the queue has not run dry before
  // those who were sent away come back. From the ends of the last minute; 1 if there
  // are none.
  double SecondsUntilRoom(int waiting, Time now = std::chrono::steady_clock::now()) const;

 private:
  static constexpr size_t kEnds = 64;
  mutable std::mutex mutex_;
  std::array<Time, kEnds> ends_{};  // guarded by mutex_: a ring of the last ends
  size_t count_ = 0;                // guarded by mutex_: ends so far
};

}  // namespace loupe
