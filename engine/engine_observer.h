// Told what happens, by the step thread; must not block. The server turns this into metrics.
#pragma once

#include "engine/engine_stats.h"
#include "engine/request.h"

namespace loupe {

class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnStep(const StepReport& step) = 0;
  virtual void OnFirstToken(double seconds_since_arrival) = 0;
  virtual void OnNextToken(double seconds_since_last) = 0;
  virtual void OnFinished(const Finished& finished) = 0;
};

}  // namespace loupe
