// TLS of the public listeners: --tls-cert, --tls-key and, for clients that must show a certificate, --tls-client-ca. All
// PEM. HTTP takes a fresh context a connection, gRPC watches the files itself; both notice new files within seconds, and
// keep what they have if those are wrong.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "boost/asio/ssl/context.hpp"
#include "server/file_watch.h"

namespace loupe {

struct TlsFiles {
  std::string cert, key, client_ca;  // client_ca empty: clients show no certificate
  bool empty() const { return cert.empty() && key.empty() && client_ca.empty(); }
};

// Thread-safe.
class TlsContext {
 public:
  // INVALID_ARGUMENT: one of the two is missing, a file is no PEM, or certificate and key do not belong together.
  static absl::StatusOr<std::unique_ptr<TlsContext>> Load(
      const TlsFiles& files, std::chrono::steady_clock::duration look_every = std::chrono::seconds(1));

  // Of new connections; reads the files again if they have changed.
  std::shared_ptr<boost::asio::ssl::context> Current();
  const TlsFiles& files() const { return files_; }

 private:
  TlsContext(TlsFiles files, std::chrono::steady_clock::duration look_every);
  absl::StatusOr<std::shared_ptr<boost::asio::ssl::context>> Make() const;

  const TlsFiles files_;
  std::mutex mutex_;
  FileWatch watch_;                                     // guarded by mutex_
  std::shared_ptr<boost::asio::ssl::context> context_;  // guarded by mutex_
};

}  // namespace loupe
