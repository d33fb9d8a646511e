#include "server/grpc_unary_log.h"

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"
#include "server/grpc_caller.h"
#include "server/logging.h"

namespace loupe {
namespace {

namespace experimental = grpc::experimental;

class UnaryLog : public experimental::Interceptor {
 public:
  UnaryLog(const ServerContext& context, experimental::ServerRpcInfo* call) : context_(context), call_(call) {}

  void Intercept(experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(experimental::InterceptionHookPoints::PRE_SEND_STATUS)) Log(batch->GetSendStatus());
    batch->Proceed();
  }

 private:
  void Log(const grpc::Status& status) const {
    const std::string method = call_->method();
    const auto code = static_cast<absl::StatusCode>(status.error_code());
    nlohmann::ordered_json fields = {
        {"protocol", "grpc"},
        {"method", method.substr(method.rfind('/') + 1)},
        {"status", absl::StatusCodeToString(code)},
        {"duration_s", std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count()}};
    if (const std::string key = CallerName(context_, *call_->server_context()); !key.empty()) fields["key"] = key;
    LogEvent("request", fields);
  }

  const ServerContext& context_;
  experimental::ServerRpcInfo* const call_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

class Factory : public experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(const ServerContext& context) : context_(context) {}
  experimental::Interceptor* CreateServerInterceptor(experimental::ServerRpcInfo* call) override {
    const bool unary = call->type() == experimental::ServerRpcInfo::Type::UNARY;
    return unary && std::string(call->method()).starts_with("/loupe.") ? new UnaryLog(context_, call) : nullptr;
  }

 private:
  const ServerContext& context_;
};

}  // namespace

std::unique_ptr<experimental::ServerInterceptorFactoryInterface> LogUnaryCalls(const ServerContext& context) {
  return std::make_unique<Factory>(context);
}

}  // namespace loupe
