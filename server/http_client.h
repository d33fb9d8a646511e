// One GET to a server, as a client. Blocks the caller for at most `timeout` a step (connect, handshake, answer).
#pragma once

#include <chrono>
#include <string>

#include "absl/status/statusor.h"
#include "server/tls_client.h"

namespace loupe {

struct HttpReply {
  int status = 0;
  std::string body;
};

// `address` is HOST:PORT. UNAVAILABLE if nobody answers or the certificate is not to be trusted, with the reason;
// INVALID_ARGUMENT as MakeTlsClient.
absl::StatusOr<HttpReply> HttpGet(const std::string& address, const std::string& target, const TlsClientOptions& tls,
                                  std::chrono::seconds timeout);

}  // namespace loupe
