// One client connection: reads a request, runs its handler, writes the answer, and so on (keep-alive; requests that
// were pipelined are answered in order). All methods but the last two run on the connection's strand.
//
// While a handler waits, one read stays pending on the socket: that is how a client that leaves is noticed. Bytes of
// pipelined next requests are kept. A client that sends more of them than 256 KiB before its answer is out counts as gone:
// not to read on would mean not to see it leave.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "boost/asio/steady_timer.hpp"
#include "boost/asio/thread_pool.hpp"
#include "boost/beast/core/flat_buffer.hpp"
#include "boost/beast/http/parser.hpp"
#include "boost/beast/http/string_body.hpp"
#include "server/http_server.h"
#include "server/http_stream.h"

namespace loupe {

// What connections share with their server; outlives them.
struct HttpShared {
  ServerContext& context;
  const HttpRouter& router;
  const HttpServerOptions& options;
  std::atomic<int> large_bodies{0};
  boost::asio::thread_pool workers;  // of HttpExchange::Compute
};

class HttpConnection final : public HttpExchange, public std::enable_shared_from_this<HttpConnection> {
 public:
  // `tls` is null for plain TCP.
  HttpConnection(boost::asio::ip::tcp::socket socket, std::shared_ptr<boost::asio::ssl::context> tls, HttpShared& shared);
  ~HttpConnection() override;

  boost::asio::awaitable<void> Run();

  boost::asio::awaitable<bool> Respond(HttpResponse response) override;
  boost::asio::awaitable<bool> StartStream(HttpResponse head) override;
  boost::asio::awaitable<bool> Write(std::string data) override;
  bool started() const override { return status_ != 0; }
  boost::asio::awaitable<void> Wait(SteadyTime until) override;
  std::function<void()> Waker() override;
  boost::asio::awaitable<void> Compute(std::function<void()> work, bool slow) override;
  bool client_gone() const override { return gone_; }

  // Any thread. Ends the connection once the request being handled, if any, is answered (one that has not come whole is
  // not); at once.
  void CloseWhenIdle();
  void CloseNow();

 private:
  boost::asio::awaitable<bool> Handshake();
  boost::asio::awaitable<bool> ReadRequest();
  boost::asio::awaitable<bool> ReadHeader();
  boost::asio::awaitable<bool> ReadBody();
  boost::asio::awaitable<bool> Continue();
  boost::asio::awaitable<void> Refuse(HttpResponse response);
  boost::asio::awaitable<void> RefuseBroken(boost::system::error_code error);
  boost::asio::awaitable<void> Handle();
  boost::asio::awaitable<void> Dispatch();
  boost::asio::awaitable<bool> Send(std::string bytes);
  boost::asio::awaitable<void> EndStream();
  boost::asio::awaitable<void> StopMonitor();
  boost::asio::awaitable<void> Linger();
  void TakeHead();
  absl::Status Authorize();
  HttpResponse NoRoute(const HttpRouter::Match& match) const;
  void Monitor();
  void Wake();
  std::string Head(const HttpResponse& response, bool streaming);
  void Log(double seconds);

  HttpShared& shared_;
  HttpStream stream_;
  boost::asio::steady_timer timer_;
  boost::beast::flat_buffer buffer_;
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  HttpRequest request_;
  unsigned version_ = 11;
  bool keep_alive_ = true;
  bool holds_large_body_ = false;
  bool tls_ended_ = false;    // our end of the TLS session is said
  bool unread_body_ = false;  // the refused request's body is still coming: linger, or the answer is lost to a reset

  int status_ = 0;  // of the answer being written; 0 before
  bool streaming_ = false;
  bool chunked_ = false;
  bool answered_ = false;  // all of it is in the socket; a client may well leave then
  std::atomic<bool> gone_{false};
  bool signalled_ = false;
  bool monitoring_ = false;
  bool stop_monitor_ = false;
  bool handling_ = false;  // a request has come whole, or is refused, and its answer is not out
  bool stopping_ = false;  // close when idle
};

}  // namespace loupe
