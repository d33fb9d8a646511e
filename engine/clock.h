// The engine's time. Injected, so that simulations need no sleeping. Any thread may ask.
#pragma once

#include "engine/request.h"

namespace loupe {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual SteadyTime Now() const = 0;
  static const Clock& Real();
};

inline double SecondsBetween(SteadyTime from, SteadyTime to) { return std::chrono::duration<double>(to - from).count(); }

}  // namespace loupe
