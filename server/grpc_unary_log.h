// One line in the access log for each unary call of ours; streams write their own (grpc_call_log.h), probes none.
// Thread-safe.
#pragma once

#include <memory>

#include "grpcpp/support/server_interceptor.h"
#include "server/server_context.h"

namespace loupe {

// `context` outlives the server.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> LogUnaryCalls(const ServerContext& context);

}  // namespace loupe
