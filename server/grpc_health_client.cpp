#include "server/grpc_health_client.h"

#include <grpcpp/grpcpp.h>

#include "absl/strings/str_cat.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/grpc_log.h"

namespace loupe {

absl::StatusOr<bool> CheckGrpcHealth(const std::string& address, std::chrono::seconds timeout) {
  RouteGrpcLog();
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  const auto stub = grpc::health::v1::Health::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status = stub->Check(&context, {}, &response);
  if (!status.ok()) return absl::UnavailableError(absl::StrCat("no answer from ", address, ": ", status.error_message()));
  return response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

}  // namespace loupe
