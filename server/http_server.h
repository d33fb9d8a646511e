// An HTTP/1.1 listener: accepts connections, hands them to HttpConnection, and ends them in order. Its own I/O threads;
// everything about one connection happens on that connection's strand. Limits: connections, header and body bytes, time
// for a header, a body and a write, large bodies at a time.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/request.h"
#include "server/http_router.h"
#include "server/server_context.h"

namespace loupe {

struct HttpServerOptions {
  int num_threads = 2;
  bool count_and_log = true;                         // in-flight gauge and access log; probes would only be noise there
  std::chrono::milliseconds idle_timeout{75'000};    // between requests of a connection
  std::chrono::milliseconds header_timeout{20'000};  // from a request's first byte to the end of its header
  std::chrono::milliseconds body_timeout{120'000};
  std::chrono::milliseconds write_timeout{60'000};  // of one write: a reader this slow is given up
  int64_t max_header_bytes = 64 << 10;
  int max_large_bodies = 16;  // bodies over kLargeBody, or of unknown length, that are being read or answered
};
inline constexpr int64_t kLargeBody = 1 << 20;  // bytes

class HttpServer {
 public:
  // `address` is HOST:PORT, port 0 takes a free one. ALREADY_EXISTS: the port is in use; INVALID_ARGUMENT: the address
  // cannot be resolved or bound. `context` outlives the server.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(ServerContext& context, HttpRouter router,
                                                           const std::string& address, HttpServerOptions options = {});
  ~HttpServer();

  int port() const;
  // Accepts nothing new, ends idle connections, lets requests in flight finish; what is left at `until` is cut.
  void Stop(SteadyTime until);

  struct Impl;

 private:
  HttpServer();
  std::unique_ptr<Impl> impl_;
};

}  // namespace loupe
