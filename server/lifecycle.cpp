#include "server/lifecycle.h"

namespace loupe {

void Lifecycle::Set(Phase phase, std::string reason) {
  const std::lock_guard lock(mutex_);
  phase_ = phase;
  reason_ = std::move(reason);
}

Phase Lifecycle::phase() const {
  const std::lock_guard lock(mutex_);
  return phase_;
}

std::string Lifecycle::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

const char* PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kStarting:
      return "starting";
    case Phase::kLoading:
      return "loading";
    case Phase::kWarming:
      return "warming";
    case Phase::kReady:
      return "ready";
    case Phase::kDraining:
      return "draining";
    case Phase::kFailed:
      return "failed";
  }
  return "unknown";
}

}  // namespace loupe
