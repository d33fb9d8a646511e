// An HTTP/1.1 listener: accepts connections, hands them to HttpConnection, and ends them in order. Its own I/O threads;
// everything about one connection happens on that connection's strand, but work on big bodies is done by worker threads.
// Limits: connections, header and body bytes, time
// for a header, a body and a write, large bodies at a time.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/request.h"
#include "server/http_router.h"
#include "server/server_context.h"

namespace loupe {

class ApiKeys;     // server/api_keys.h
class CorsPolicy;  // server/cors.h
class TlsContext;  // server/tls.h

struct HttpServerOptions {
  int num_threads = 2;
  int num_workers = 2;                               // threads that work through bodies over kSmallBody
  bool count_and_log = true;                         // in-flight gauge and access log; probes would only be noise there
  std::chrono::milliseconds idle_timeout{75'000};    // between requests of a connection
  std::chrono::milliseconds header_timeout{20'000};  // from a request's first byte to the end of its header
  std::chrono::milliseconds body_timeout{120'000};
  std::chrono::milliseconds write_timeout{60'000};  // of one write: a reader this slow is given up
  int64_t max_header_bytes = 64 << 10;
  std::optional<int> max_connections;  // none: the context's
  // They outlive the server; null: no key is asked for, TCP without TLS, no web pages.
  ApiKeys* keys = nullptr;
  TlsContext* tls = nullptr;
  const CorsPolicy* cors = nullptr;
  int max_large_bodies = 16;  // requests of which more than kLargeBody has come and that are not answered yet
};
inline constexpr int64_t kLargeBody = 1 << 20;   // bytes
inline constexpr int64_t kSmallBody = 64 << 10;  // bytes: parsed and encoded within a few milliseconds

class HttpServer {
 public:
  // `address` is HOST:PORT, port 0 takes a free one. ALREADY_EXISTS: the port is in use; INVALID_ARGUMENT: the address
  // cannot be resolved or bound. `context` outlives the server.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(ServerContext& context, HttpRouter router,
                                                           const std::string& address, HttpServerOptions options = {});
  ~HttpServer();

  int port() const;
  // Accepts nothing new, ends connections without a whole request, lets requests in flight finish; what is left at
  // `until` is cut.
  void Stop(SteadyTime until);

  struct Impl;

 private:
  HttpServer();
  std::unique_ptr<Impl> impl_;
};

}  // namespace loupe
