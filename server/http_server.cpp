#include "server/http_server.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "boost/asio/co_spawn.hpp"
#include "boost/asio/io_context.hpp"
#include "boost/asio/ip/tcp.hpp"
#include "boost/asio/post.hpp"
#include "boost/asio/steady_timer.hpp"
#include "boost/asio/strand.hpp"
#include "server/http_connection.h"
#include "server/tls.h"
#include "spdlog/spdlog.h"

namespace loupe {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;

struct HttpServer::Impl {
  Impl(ServerContext& server_context, HttpRouter own_router, const HttpServerOptions& own_options)
      : context(server_context), router(std::move(own_router)), options(own_options) {}

  absl::Status Listen(const std::string& address);
  void Accept();
  void Serve(tcp::socket socket);
  void TurnAway(tcp::socket socket);
  void Forget(const HttpConnection* connection);
  bool WaitForNone(SteadyTime until);
  int max_connections() const { return options.max_connections.value_or(context.max_connections); }

  ServerContext& context;
  const HttpRouter router;
  const HttpServerOptions options;
  int port = 0;
  HttpShared shared{context, router, options, 0, asio::thread_pool(static_cast<size_t>(options.num_workers))};

  std::mutex mutex;
  std::condition_variable none_left;
  std::unordered_map<const HttpConnection*, std::weak_ptr<HttpConnection>> connections;  // guarded by mutex
  bool stopping = false;                                                                 // guarded by mutex

  // Below everything that its handlers refer to, so that handlers left over at the end go first.
  asio::io_context io;
  tcp::acceptor acceptor{io};
  asio::steady_timer retry_accept{io};
  std::vector<std::thread> threads;
};

namespace {

absl::Status BindError(const std::string& address, const boost::system::error_code& error) {
  const std::string text = absl::StrCat("cannot listen on ", address, ": ", error.message());
  if (error == asio::error::address_in_use) {
    return absl::AlreadyExistsError(absl::StrCat(text, "; another process uses this port, choose another address"));
  }
  if (error == asio::error::access_denied)
    return absl::PermissionDeniedError(absl::StrCat(text, "; choose a port above 1023"));
  return absl::InvalidArgumentError(text);
}

}  // namespace

absl::Status HttpServer::Impl::Listen(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return absl::InvalidArgumentError(absl::StrCat("'", address, "' is not HOST:PORT"));
  std::string host = address.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  int wanted_port = 0;  // checked here: the system's resolver takes 99999 for 34463
  if (!absl::SimpleAtoi(address.substr(colon + 1), &wanted_port) || wanted_port < 0 || wanted_port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("'", address, "' has no port from 0 to 65535; write HOST:PORT"));
  }
  boost::system::error_code error;
  const auto found = tcp::resolver(io).resolve(host, std::to_string(wanted_port), tcp::resolver::passive, error);
  if (error || found.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("cannot resolve ", address, ": ", error.message()));
  }
  const tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(tcp::acceptor::max_listen_connections, error);
  if (error) return BindError(address, error);
  port = acceptor.local_endpoint().port();
  return absl::OkStatus();
}

void HttpServer::Impl::Accept() {
  acceptor.async_accept(asio::make_strand(io), [this](boost::system::error_code error, tcp::socket socket) {
    if (error == asio::error::operation_aborted || !acceptor.is_open()) return;
    if (error) {
      // Out of file descriptors, most likely: those that close make room.
      spdlog::warn("cannot accept a connection: {}", error.message());
      retry_accept.expires_after(std::chrono::milliseconds(100));
      retry_accept.async_wait([this](boost::system::error_code cancelled) {
        if (!cancelled) Accept();
      });
      return;
    }
    Serve(std::move(socket));
    Accept();
  });
}

void HttpServer::Impl::Serve(tcp::socket socket) {
  const auto executor = socket.get_executor();
  std::shared_ptr<HttpConnection> connection;
  {
    const std::lock_guard lock(mutex);
    if (stopping) return;
    if (connections.size() < static_cast<size_t>(max_connections())) {
      connection = std::make_shared<HttpConnection>(std::move(socket), options.tls == nullptr ? nullptr : options.tls->Current(), shared);
      connections.emplace(connection.get(), connection);
    }
  }
  if (connection == nullptr) return TurnAway(std::move(socket));
  asio::co_spawn(
      executor, [connection] { return connection->Run(); },
      [this, connection](const std::exception_ptr& failure) {
        if (failure) spdlog::error("a connection ended with an exception");
        Forget(connection.get());
      });
}

// One try without waiting: a fresh socket has room for these bytes. Behind TLS nobody would understand them.
void HttpServer::Impl::TurnAway(tcp::socket socket) {
  if (options.tls != nullptr) return;
  const HttpResponse response = ErrorResponse(
      503, absl::StrCat(max_connections(), " connections are open, the most allowed; try again soon"));
  const std::string text = absl::StrCat(
      "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: application/json\r\n",
      "Content-Length: ", response.body.size(), "\r\n\r\n", response.body);
  boost::system::error_code ignored;
  socket.non_blocking(true, ignored);
  socket.write_some(asio::buffer(text), ignored);
  socket.shutdown(tcp::socket::shutdown_send, ignored);
}

void HttpServer::Impl::Forget(const HttpConnection* connection) {
  const std::lock_guard lock(mutex);
  connections.erase(connection);
  if (connections.empty()) none_left.notify_all();
}

bool HttpServer::Impl::WaitForNone(SteadyTime until) {
  std::unique_lock lock(mutex);
  return none_left.wait_until(lock, until, [this] { return connections.empty(); });
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(ServerContext& context, HttpRouter router,
                                                              const std::string& address, HttpServerOptions options) {
  std::unique_ptr<HttpServer> server(new HttpServer);
  server->impl_ = std::make_unique<Impl>(context, std::move(router), options);
  Impl& impl = *server->impl_;
  const absl::Status listening = impl.Listen(address);
  if (!listening.ok()) return listening;
  impl.Accept();
  for (int i = 0; i < options.num_threads; ++i) {
    impl.threads.emplace_back([&impl] { impl.io.run(); });
  }
  return server;
}

HttpServer::HttpServer() = default;

HttpServer::~HttpServer() {
  if (impl_ != nullptr) Stop(std::chrono::steady_clock::now());
}

int HttpServer::port() const { return impl_->port; }

void HttpServer::Stop(SteadyTime until) {
  std::vector<std::shared_ptr<HttpConnection>> open;
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->stopping) return;
    impl_->stopping = true;
    for (const auto& [pointer, weak] : impl_->connections) {
      if (auto connection = weak.lock()) open.push_back(std::move(connection));
    }
  }
  asio::post(impl_->io, [this] {
    boost::system::error_code ignored;
    impl_->acceptor.close(ignored);
    impl_->retry_accept.cancel();
  });
  for (const auto& connection : open) connection->CloseWhenIdle();
  if (!impl_->WaitForNone(until)) {
    for (const auto& connection : open) connection->CloseNow();
    impl_->WaitForNone(std::chrono::steady_clock::now() + std::chrono::seconds(2));
  }
  open.clear();
  impl_->io.stop();
  for (std::thread& thread : impl_->threads) thread.join();
  // Work that is still going on refers to requests that the I/O context owns.
  impl_->shared.workers.stop();
  impl_->shared.workers.join();
  impl_->threads.clear();
}

}  // namespace loupe
