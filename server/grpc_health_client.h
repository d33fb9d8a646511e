// The standard gRPC health question to a server, as a client. Blocks the caller for at most `timeout`.
#pragma once

#include <chrono>
#include <string>

#include "absl/status/statusor.h"

namespace loupe {

// True if SERVING. UNAVAILABLE if nobody answers, with gRPC's reason.
absl::StatusOr<bool> CheckGrpcHealth(const std::string& address, std::chrono::seconds timeout);

}  // namespace loupe
