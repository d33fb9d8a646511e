// Told what happens, by the step thread; must not block. The server turns this into metrics and log lines.
#pragma once

#include <cstdint>
#include <string>

#include "engine/engine_stats.h"
#include "engine/request.h"

namespace loupe {

// A running sample gives up its cache, and will compute it again.
struct Preemption {
  enum class Cause : uint8_t {
    kPriority,  // a waiting request of higher priority takes its place
    kMemory,    // the step needs more pages than are free, and it ranks last
  };
  Cause cause = Cause::kMemory;
  std::string request_id;
  int index = 0;  // which of the n samples
  int priority = 0;
  int num_tokens = 0;  // in the cache until now
  int64_t bytes = 0;   // of the cache that are free again; pages shared with other samples stay
};

class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnStep(const StepReport& step) = 0;
  virtual void OnFirstToken(double seconds_since_arrival) = 0;
  virtual void OnNextToken(double seconds_since_last) = 0;
  virtual void OnFinished(const Finished& finished) = 0;
  virtual void OnPreempted(const Preemption& preemption) = 0;
};

}  // namespace loupe
