// The standard gRPC health question to a server, as a client. Blocks the caller for at most `timeout`.
#pragma once

#include <chrono>
#include <string>

#include "absl/status/statusor.h"
#include "server/tls_client.h"

namespace loupe {

// True if SERVING. UNAVAILABLE if nobody answers, with gRPC's reason; INVALID_ARGUMENT for a file that cannot be read.
absl::StatusOr<bool> CheckGrpcHealth(const std::string& address, const TlsClientOptions& tls, std::chrono::seconds timeout);

}  // namespace loupe
