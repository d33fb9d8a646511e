// How long a refused client should wait, carried by the status that refuses it: HTTP sends it as Retry-After, gRPC as
// grpc-retry-pushback-ms. Pure, any thread.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "engine/engine.h"
#include "server/metrics.h"

namespace loupe {

inline constexpr double kMaxRetryAfter = 120;  // seconds

// At least 1 s, at most kMaxRetryAfter.
absl::Status WithRetryAfter(absl::Status status, double seconds);
// Whole seconds; nothing if the status carries none.
std::optional<int> RetryAfterOf(const absl::Status& status);
// A status of Engine::Submit; if the queue is full, with the wait that the measured rate of service promises.
absl::Status WithQueueWait(absl::Status status, const Engine& engine, const Metrics& metrics);

}  // namespace loupe
