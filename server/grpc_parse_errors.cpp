#include "server/grpc_parse_errors.h"

namespace loupe {
namespace {

namespace experimental = grpc::experimental;

class NameParseError : public experimental::Interceptor {
 public:
  void Intercept(experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(experimental::InterceptionHookPoints::PRE_SEND_STATUS)) {
      const grpc::Status status = batch->GetSendStatus();
      if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED && status.error_message().empty()) {
        batch->ModifySendStatus({grpc::StatusCode::INVALID_ARGUMENT,
                                 "the request's bytes are no message of this method's type, or a string in it is not UTF-8"});
      }
    }
    batch->Proceed();
  }
};

class Factory : public experimental::ServerInterceptorFactoryInterface {
 public:
  experimental::Interceptor* CreateServerInterceptor(experimental::ServerRpcInfo* call) override {
    // gRPC counts a method that does not exist as a bidirectional stream. No service of ours has one.
    const bool may_exist = call->type() != experimental::ServerRpcInfo::Type::BIDI_STREAMING;
    return may_exist ? new NameParseError : nullptr;
  }
};

}  // namespace

std::unique_ptr<experimental::ServerInterceptorFactoryInterface> NameParseErrors() { return std::make_unique<Factory>(); }

}  // namespace loupe
