// One client connection: reads a request, runs its handler, writes the answer, and so on (keep-alive; requests that
// were pipelined are answered in order). All methods but the last two run on the connection's strand.
//
// While a handler waits, one read stays pending on the socket: that is how a client that leaves is noticed. Bytes of a
// pipelined next request are kept, up to a limit; beyond it reading pauses until the answer is out.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "boost/asio/steady_timer.hpp"
#include "boost/beast/core/flat_buffer.hpp"
#include "boost/beast/core/tcp_stream.hpp"
#include "boost/beast/http/parser.hpp"
#include "boost/beast/http/string_body.hpp"
#include "server/http_server.h"

namespace loupe {

// What connections share with their server; outlives them.
struct HttpShared {
  ServerContext& context;
  const HttpRouter& router;
  const HttpServerOptions& options;
  std::atomic<int> large_bodies{0};
};

class HttpConnection final : public HttpExchange, public std::enable_shared_from_this<HttpConnection> {
 public:
  HttpConnection(boost::asio::ip::tcp::socket socket, HttpShared& shared);
  ~HttpConnection() override;

  boost::asio::awaitable<void> Run();

  boost::asio::awaitable<bool> Respond(HttpResponse response) override;
  boost::asio::awaitable<bool> StartStream(HttpResponse head) override;
  boost::asio::awaitable<bool> Write(std::string data) override;
  bool started() const override { return status_ != 0; }
  boost::asio::awaitable<void> Wait(SteadyTime until) override;
  std::function<void()> Waker() override;
  bool client_gone() const override { return gone_; }

  // Any thread. Ends the connection once the request in flight, if any, is answered; at once.
  void CloseWhenIdle();
  void CloseNow();

 private:
  boost::asio::awaitable<bool> ReadRequest();
  boost::asio::awaitable<bool> ReadHeader();
  boost::asio::awaitable<bool> ReadBody();
  boost::asio::awaitable<void> Refuse(int status, std::string message);
  boost::asio::awaitable<void> RefuseBroken(boost::system::error_code error);
  boost::asio::awaitable<void> Handle();
  boost::asio::awaitable<void> Dispatch();
  boost::asio::awaitable<bool> Send(std::string bytes);
  boost::asio::awaitable<void> EndStream();
  boost::asio::awaitable<void> StopMonitor();
  boost::asio::awaitable<void> Linger();
  void TakeRequest();
  void Monitor();
  void Wake();
  std::string Head(const HttpResponse& response, bool streaming);
  void Log(double seconds);

  HttpShared& shared_;
  boost::beast::tcp_stream stream_;
  boost::asio::steady_timer timer_;
  boost::beast::flat_buffer buffer_;
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  HttpRequest request_;
  unsigned version_ = 11;
  bool keep_alive_ = true;
  bool holds_large_body_ = false;
  bool unread_body_ = false;  // the refused request's body is still coming: linger, or the answer is lost to a reset

  int status_ = 0;  // of the answer being written; 0 before
  bool streaming_ = false;
  bool chunked_ = false;
  bool answered_ = false;  // all of it is in the socket; a client may well leave then
  bool gone_ = false;
  bool signalled_ = false;
  bool monitoring_ = false;
  bool stop_monitor_ = false;
  bool idle_ = true;       // between requests
  bool stopping_ = false;  // close when idle
};

}  // namespace loupe
