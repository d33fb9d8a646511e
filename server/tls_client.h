// TLS as seen from a client of this server: `loupe health` before listeners that were started with --tls-cert.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "boost/asio/ssl/context.hpp"

namespace loupe {

struct TlsClientOptions {
  std::string ca;           // PEM authorities that the server's certificate must come from; empty: the system's
  std::string cert, key;    // PEM, shown to a server that asks (--tls-client-ca there); both or none
  std::string server_name;  // that the server's certificate must bear; empty: the host of the address
  bool insecure = false;    // take any certificate
  // Nothing is set: no TLS.
  bool empty() const { return ca.empty() && cert.empty() && key.empty() && server_name.empty() && !insecure; }
};

// INVALID_ARGUMENT names the flag of a file that is missing, is no PEM or does not belong to the other.
absl::StatusOr<std::shared_ptr<boost::asio::ssl::context>> MakeTlsClient(const TlsClientOptions& options);

}  // namespace loupe
