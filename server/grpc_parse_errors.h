// gRPC's callback API answers a request that it cannot parse (bytes that are no such message, text that is not UTF-8)
// with UNIMPLEMENTED and no message. This makes it the INVALID_ARGUMENT that it is. Thread-safe.
#pragma once

#include <memory>

#include "grpcpp/support/server_interceptor.h"

namespace loupe {

// Our own UNIMPLEMENTED always says what is missing, which is how the two are told apart.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> NameParseErrors();

}  // namespace loupe
