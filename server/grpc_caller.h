// Who calls over gRPC, and how its connection is secured. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "server/api_keys.h"
#include "server/server_context.h"

namespace loupe {

// The account of the metadata `authorization: Bearer KEY`; null if this server asks for no key. UNAUTHENTICATED, counted.
absl::StatusOr<std::shared_ptr<KeyAccount>> FindCaller(const ServerContext& context, const grpc::ServerContextBase& call);
// The name of its key, for the log; empty without one.
std::string CallerName(const ServerContext& context, const grpc::ServerContextBase& call);

// TLS by the context's files, which gRPC watches itself; or none.
std::shared_ptr<grpc::ServerCredentials> CredentialsOf(const ServerContext& context);

}  // namespace loupe
