// File descriptors: a connection takes one, and a process that has none left answers nobody, its probes included.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace loupe {

// Kept free of the main listener's connections: for gRPC, the management listener, files and the process itself.
inline constexpr int64_t kReservedDescriptors = 256;

// Raises the soft limit to the hard one, as far as the system lets it; returns what may be open from now on.
int64_t RaiseDescriptorLimit();

// How many connections the main listener may hold of `wanted` when `descriptors` may be open: fewer, with a warning, if
// that is too few. RESOURCE_EXHAUSTED if not even one is left.
absl::StatusOr<int> FitConnections(int wanted, int64_t descriptors);

}  // namespace loupe
