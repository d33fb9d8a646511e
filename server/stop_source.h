// What ends the process: SIGTERM and SIGINT from outside, and requests from inside (Admin.Drain, a load that failed).
// They are kept apart because a second signal means "at once", while a request beside a signal means nothing new:
// Kubernetes calls Drain in preStop and sends SIGTERM afterwards.
//
// One per process, made before any other thread starts. Request may be called from any thread, the rest by its owner.
#pragma once

#include <chrono>

namespace loupe {

class StopSource {
 public:
  // Blocks both signals for this thread and all that it starts.
  StopSource();
  ~StopSource();
  StopSource(const StopSource&) = delete;
  StopSource& operator=(const StopSource&) = delete;

  void Request();
  // Sleeps until a signal or a request that no Wait has seen yet, at most until then; true if there was one.
  bool Wait(std::chrono::steady_clock::time_point until = std::chrono::steady_clock::time_point::max());
  int num_signals() const { return num_signals_; }

 private:
  int signal_fd_ = -1;
  int request_fd_ = -1;
  int num_signals_ = 0;
};

}  // namespace loupe
