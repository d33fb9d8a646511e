// What one gRPC call leaves behind: a line in the log and its counts in the metrics. Owned by the call.
#pragma once

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "engine/request.h"
#include "server/metrics.h"

namespace loupe {

class GrpcCallLog {
 public:
  GrpcCallLog(Metrics* metrics, Api api, std::string request_id);
  void Add(const Finished& finished);
  void SetKey(std::string name) { key_ = std::move(name); }
  void SetStatus(const absl::Status& status) { status_ = status; }
  void Done();

 private:
  Metrics* metrics_;
  Api api_;
  std::string request_id_;
  std::string key_;
  std::chrono::steady_clock::time_point start_;
  absl::Status status_;
  FinishReason reason_ = FinishReason::kError;
  int prompt_tokens_ = 0, completion_tokens_ = 0;
  Timings timings_;
  std::string policy_;
};

}  // namespace loupe
