// Where the process stands, for probes: one value that the loader and the drain advance and every listener reads.
// Thread-safe.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

namespace loupe {

enum class Phase { kStarting, kLoading, kWarming, kReady, kDraining, kFailed };

class Lifecycle {
 public:
  void Set(Phase phase, std::string reason = "");
  void SetProgress(double share) { progress_.store(share, std::memory_order_relaxed); }  // 0 to 1, while loading
  Phase phase() const;
  double progress() const { return progress_.load(std::memory_order_relaxed); }
  std::string reason() const;

 private:
  mutable std::mutex mutex_;
  Phase phase_ = Phase::kStarting;  // guarded by mutex_
  std::string reason_;              // guarded by mutex_
  std::atomic<double> progress_{0};
};

const char* PhaseName(Phase phase);  // starting, loading, warming, ready, draining, failed

}  // namespace loupe
