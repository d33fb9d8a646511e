// The gRPC listeners: Inference (with grpc.health.v1 and reflection), and Admin on a listener of its own. Callback API:
// one reactor a call, fed from the call's ResponseStream; no thread waits for a token.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/server_context.h"

namespace loupe {

class GrpcServer {
 public:
  // `address` is HOST:PORT, port 0 takes a free one. ALREADY_EXISTS: the port is in use. NOT_SERVING until told.
  // `context` outlives the server.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(ServerContext& context, const std::string& address);
  // Serves only loupe.v1.Admin; `drain` is what Drain does, on gRPC's thread, and must not wait.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> StartAdmin(ServerContext& context, const std::string& address,
                                                                std::function<void()> drain);
  ~GrpcServer();

  int port() const;
  // What health answers for "" and loupe.v1.Inference.
  void SetServing(bool serving);
  // Refuses new calls, lets running ones finish until then, cuts the rest.
  void Shutdown(SteadyTime until);

 private:
  GrpcServer();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace loupe
