#include "server/retry_after.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "absl/strings/cord.h"

namespace loupe {
namespace {

constexpr char kPayload[] = "loupe/retry-after-s";

}  // namespace

absl::Status WithRetryAfter(absl::Status status, double seconds) {
  const double whole = std::ceil(std::clamp(seconds, 1.0, kMaxRetryAfter));
  status.SetPayload(kPayload, absl::Cord(std::to_string(static_cast<int>(whole))));
  return status;
}

std::optional<int> RetryAfterOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayload);
  if (!payload) return std::nullopt;
  return std::atoi(std::string(*payload).c_str());
}

absl::Status WithQueueWait(absl::Status status, const Engine& engine, const Metrics& metrics) {
  if (status.code() != absl::StatusCode::kResourceExhausted) return status;
  return WithRetryAfter(std::move(status), metrics.service_rate().SecondsUntilRoom(engine.Stats().requests_waiting));
}

}  // namespace loupe
