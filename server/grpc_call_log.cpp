#include "server/grpc_call_log.h"

#include "nlohmann/json.hpp"
#include "server/logging.h"

namespace loupe {
namespace {

const char* MethodName(Api api) { return api == Api::kGrpcChat ? "Chat" : "Generate"; }

CodeClass ClassOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk: return CodeClass::kOk;
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDataLoss: return CodeClass::kServerError;
    default: return CodeClass::kClientError;
  }
}

}  // namespace

GrpcCallLog::GrpcCallLog(Metrics* metrics, Api api, std::string request_id)
    : metrics_(metrics), api_(api), request_id_(std::move(request_id)), start_(std::chrono::steady_clock::now()) {
  metrics_->GrpcStarted();
}

void GrpcCallLog::Add(const Finished& finished) {
  reason_ = finished.reason;
  prompt_tokens_ = finished.usage.prompt_tokens;
  completion_tokens_ += finished.usage.completion_tokens;
  timings_ = finished.timings;
  policy_ = finished.usage.kv.policy;
}

void GrpcCallLog::Done() {
  metrics_->GrpcFinished();
  metrics_->CountRequest(api_, ClassOf(status_), reason_);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  nlohmann::ordered_json fields = {{"request_id", request_id_},
                                   {"protocol", "grpc"},
                                   {"method", MethodName(api_)},
                                   {"status", std::string(absl::StatusCodeToString(status_.code()))},
                                   {"finish_reason", FinishReasonName(reason_)},
                                   {"prompt_tokens", prompt_tokens_},
                                   {"completion_tokens", completion_tokens_},
                                   {"queue_s", timings_.queue},
                                   {"prefill_s", timings_.prefill},
                                   {"decode_s", timings_.decode},
                                   {"first_token_s", timings_.first_token},
                                   {"duration_s", seconds},
                                   {"policy", policy_}};
  if (!key_.empty()) fields["key"] = key_;
  LogEvent("request", fields);
}

}  // namespace loupe
