#include "server/http_connection.h"

#include <cstdio>
#include <ctime>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "boost/asio/as_tuple.hpp"
#include "boost/asio/post.hpp"
#include "boost/asio/ssl/error.hpp"
#include "boost/asio/use_awaitable.hpp"
#include "boost/asio/write.hpp"
#include "boost/beast/core/error.hpp"
#include "boost/beast/http/read.hpp"
#include "boost/beast/http/status.hpp"
#include "server/api_keys.h"
#include "server/cors.h"
#include "server/http_rules.h"
#include "server/http_status.h"
#include "server/logging.h"
#include "spdlog/spdlog.h"

namespace loupe {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using Json = nlohmann::ordered_json;

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
constexpr size_t kMaxBuffered = 256 << 10;  // bytes read ahead: a header, or pipelined requests
constexpr size_t kReadBytes = 4096;         // of one read while an answer is made
constexpr size_t kMaxIdBytes = 128;
constexpr int64_t kLingerBytes = 256 << 20;  // of a refused body, read and thrown away
constexpr std::chrono::milliseconds kLingerTime{10'000}, kLingerTimeStopping{500}, kTlsEndTime{500};

bool FitToEcho(std::string_view id) {
  if (id.empty() || id.size() > kMaxIdBytes) return false;
  for (const char c : id) {
    if (c <= ' ' || c > '~') return false;
  }
  return true;
}

std::string MakeRequestId() {
  thread_local std::mt19937_64 random{std::random_device{}()};
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(random()),
                static_cast<unsigned long long>(random()));
  return text;
}

std::string HttpDate() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[40];
  std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &utc);
  return text;
}

std::string ToString(beast::string_view text) { return std::string(text.data(), text.size()); }

}  // namespace

HttpConnection::HttpConnection(asio::ip::tcp::socket socket, std::shared_ptr<asio::ssl::context> tls, HttpShared& shared)
    : shared_(shared), stream_(std::move(socket), std::move(tls)), timer_(stream_.get_executor()), buffer_(kMaxBuffered) {
  boost::system::error_code ignored;
  stream_.tcp().socket().set_option(asio::ip::tcp::no_delay(true), ignored);
}

HttpConnection::~HttpConnection() {
  if (holds_large_body_) --shared_.large_bodies;
}

asio::awaitable<void> HttpConnection::Run() {
  // gcc 12 miscompiles co_await in a loop's condition, so every co_await of this file is a statement of its own.
  if (stream_.tls() != nullptr) {
    const bool shaken = co_await Handshake();
    if (!shaken) co_return;
  }
  for (;;) {
    const bool got_request = co_await ReadRequest();
    if (!got_request) break;
    co_await Handle();
    if (gone_ || !keep_alive_ || stopping_) break;
  }
  if (!gone_) co_await Linger();
  stream_.tcp().close();  // now, not when the last reference goes
}

asio::awaitable<bool> HttpConnection::Handshake() {
  stream_.tcp().expires_after(shared_.options.header_timeout);
  const auto [error] = co_await stream_.tls()->async_handshake(asio::ssl::stream_base::server, kAwait);
  if (!error) co_return true;
  if (error.category() == asio::error::get_ssl_category() && ERR_GET_REASON(error.value()) == SSL_R_HTTP_REQUEST) {
    static constexpr std::string_view kPlain =
        "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: 39\r\n\r\n"
        "this port speaks TLS only; use https://";
    co_await asio::async_write(stream_.tcp(), asio::buffer(kPlain), kAwait);
  }
  spdlog::debug("no TLS session: {}", error.message());
  stream_.tcp().close();
  co_return false;
}

// ---- reading

asio::awaitable<bool> HttpConnection::ReadRequest() {
  log = Json::object();
  status_ = 0;
  streaming_ = chunked_ = answered_ = false;
  if (holds_large_body_) --shared_.large_bodies;
  holds_large_body_ = false;
  request_ = HttpRequest();
  request_.method = "BROKEN";  // until its head was read
  const bool got_header = co_await ReadHeader();
  if (!got_header) co_return false;
  const bool got_body = co_await ReadBody();
  if (!got_body) co_return false;
  request_.arrival = std::chrono::steady_clock::now();
  request_.body = std::move(parser_->get().body());
  co_return true;
}

asio::awaitable<bool> HttpConnection::ReadHeader() {
  if (stopping_) co_return false;
  if (buffer_.size() == 0) {
    stream_.tcp().expires_after(shared_.options.idle_timeout);
    const auto [error, bytes] = co_await stream_.async_read_some(buffer_.prepare(kReadBytes), kAwait);
    if (error) {
      gone_ = true;
      co_return false;
    }
    buffer_.commit(bytes);
  }
  parser_.emplace();
  parser_->header_limit(static_cast<uint32_t>(shared_.options.max_header_bytes));
  parser_->body_limit(static_cast<uint64_t>(shared_.context.max_body_bytes));
  stream_.tcp().expires_after(shared_.options.header_timeout);
  const auto [error, bytes] = co_await http::async_read_header(stream_, buffer_, *parser_, kAwait);
  if (error) {
    co_await RefuseBroken(error);
    co_return false;
  }
  TakeHead();
  if (const auto refusal = CheckHead(parser_->get())) {
    unread_body_ = true;
    HttpResponse response = ErrorResponse(refusal->status, refusal->why);
    co_await Refuse(std::move(response));
    co_return false;
  }
  if (const absl::Status known = Authorize(); !known.ok()) {
    shared_.context.metrics->CountRejected(RejectReason::kNoKey);
    unread_body_ = !parser_->is_done();
    HttpResponse response = ErrorResponse(known);
    response.headers.emplace_back("WWW-Authenticate", "Bearer");
    co_await Refuse(std::move(response));
    co_return false;
  }
  co_return true;
}

asio::awaitable<bool> HttpConnection::ReadBody() {
  stream_.tcp().expires_after(shared_.options.body_timeout);
  if (!parser_->is_done() && version_ >= 11 && parser_->get().count(http::field::expect) > 0) {
    const bool going_on = co_await Continue();
    if (!going_on) co_return false;
  }
  parser_->eager(true);
  while (!parser_->is_done()) {
    const auto [error, bytes] = co_await http::async_read_some(stream_, buffer_, *parser_, kAwait);
    if (error) {
      co_await RefuseBroken(error);
      co_return false;
    }
    // By what has come, not by what was announced: announcing costs a client nothing.
    if (holds_large_body_ || static_cast<int64_t>(parser_->get().body().size()) <= kLargeBody) continue;
    holds_large_body_ = ++shared_.large_bodies <= shared_.options.max_large_bodies;
    if (holds_large_body_) continue;
    --shared_.large_bodies;
    unread_body_ = true;
    HttpResponse response = ErrorResponse(503, absl::StrCat(shared_.options.max_large_bodies, " bodies over ", kLargeBody,
                                                            " bytes are being handled; try again soon"));
    response.headers.emplace_back("Retry-After", "1");
    co_await Refuse(std::move(response));
    co_return false;
  }
  co_return true;
}

// The client waits for a word before it sends the body: the refusal, if there is no such route.
asio::awaitable<bool> HttpConnection::Continue() {
  const HttpRouter::Match match = shared_.router.Find(request_.method, request_.path);
  if (match.handler == nullptr) {
    unread_body_ = true;
    HttpResponse response = NoRoute(match);
    co_await Refuse(std::move(response));
    co_return false;
  }
  static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
  const auto [error, bytes] = co_await asio::async_write(stream_, asio::buffer(kContinue), kAwait);
  if (error) gone_ = true;
  co_return !gone_;
}

// Nothing more can be read from this connection afterwards.
asio::awaitable<void> HttpConnection::Refuse(HttpResponse response) {
  keep_alive_ = false;
  handling_ = true;
  if (request_.id.empty()) request_.id = MakeRequestId();
  const auto start = std::chrono::steady_clock::now();
  co_await Respond(std::move(response));
  handling_ = false;
  Log(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (!gone_) co_await Linger();
}

asio::awaitable<void> HttpConnection::RefuseBroken(boost::system::error_code error) {
  const bool malformed = error.category() == http::make_error_code(http::error::bad_method).category() &&
                         error != http::error::end_of_stream && error != http::error::partial_message;
  int status = 400;
  std::string why = absl::StrCat("this is not HTTP/1.1: ", error.message());
  if (error == http::error::body_limit) {
    status = 413;
    why = absl::StrCat("the body is larger than ", shared_.context.max_body_bytes,
                       " bytes; send less or raise --max-body-bytes");
  } else if (error == http::error::header_limit || error == http::error::buffer_overflow) {
    status = 431;
    why = absl::StrCat("the header is larger than ", shared_.options.max_header_bytes, " bytes");
  } else if (!malformed) {
    gone_ = true;  // left, timed out or cut
    co_return;
  }
  unread_body_ = true;
  HttpResponse response = ErrorResponse(status, why);
  co_await Refuse(std::move(response));
}

void HttpConnection::TakeHead() {
  const http::request<http::string_body>& message = parser_->get();
  version_ = message.version();
  keep_alive_ = message.keep_alive();
  request_.method = ToString(message.method_string());
  request_.path = PathOf(ToString(message.target()));
  request_.content_type = ToString(message[http::field::content_type]);
  request_.content_encoding = ToString(message[http::field::content_encoding]);
  request_.traceparent = ToString(message["traceparent"]);
  request_.origin = ToString(message[http::field::origin]);
  request_.id = ToString(message["X-Request-Id"]);
  if (!FitToEcho(request_.id)) request_.id = MakeRequestId();
}

// Before the body is read. Open are the routes that say so, and what a browser asks before it may send a key.
absl::Status HttpConnection::Authorize() {
  if (shared_.options.keys == nullptr) return absl::OkStatus();
  const auto& message = parser_->get();
  const bool preflight = request_.method == "OPTIONS" && message.count(http::field::access_control_request_method) > 0;
  if (shared_.options.cors != nullptr && preflight) return absl::OkStatus();
  if (shared_.router.Find(request_.method, request_.path).open) return absl::OkStatus();
  auto account = shared_.options.keys->Find(ToString(message[http::field::authorization]));
  if (account.ok()) request_.account = *std::move(account);
  return account.status();
}

// ---- answering

asio::awaitable<void> HttpConnection::Handle() {
  if (shared_.options.count_and_log) shared_.context.metrics->HttpStarted();
  handling_ = true;
  stream_.tcp().expires_never();
  std::string failure;
  try {
    co_await Dispatch();
  } catch (const std::exception& error) {  // the wall: a library threw, or memory ran out
    failure = error.what();
  }
  if (!failure.empty()) spdlog::error("request {}: handler failed: {}", request_.id, failure);
  if (!started() && !gone_) {
    HttpResponse response = ErrorResponse(500, "the server failed to answer; this is our fault and is in its log");
    co_await Respond(std::move(response));
  } else if (streaming_ && !failure.empty()) {
    gone_ = true;  // the stream is incomplete, and only a cut says so
  }
  if (streaming_ && !gone_) co_await EndStream();
  co_await StopMonitor();
  handling_ = false;
  if (shared_.options.count_and_log) shared_.context.metrics->HttpFinished();
  Log(std::chrono::duration<double>(std::chrono::steady_clock::now() - request_.arrival).count());
}

asio::awaitable<void> HttpConnection::Dispatch() {
  const HttpRouter::Match match = shared_.router.Find(request_.method, request_.path);
  if (match.handler != nullptr) {
    request_.parameter = match.parameter;
    co_await (*match.handler)(request_, *this);
    co_return;
  }
  HttpResponse response = NoRoute(match);
  co_await Respond(std::move(response));
}

HttpResponse HttpConnection::NoRoute(const HttpRouter::Match& match) const {
  const std::string path = request_.path.substr(0, 200);
  if (match.allowed.empty()) {
    return ErrorResponse(404, absl::StrCat("no route ", path, "; there are ", shared_.router.Offered()));
  }
  HttpResponse response;
  response.status = 204;
  if (request_.method != "OPTIONS") {
    response = ErrorResponse(405, absl::StrCat(request_.method, " is not offered on ", path, "; use ", match.allowed));
  }
  response.headers.emplace_back("Allow", match.allowed);
  if (shared_.options.cors != nullptr && request_.method == "OPTIONS" && !request_.origin.empty()) {
    for (auto& header : CorsPolicy::PreflightHeaders(match.allowed)) response.headers.push_back(std::move(header));
  }
  return response;
}

std::string HttpConnection::Head(const HttpResponse& response, bool streaming) {
  if (stopping_ || shared_.context.lifecycle->phase() == Phase::kDraining) keep_alive_ = false;
  status_ = response.status;
  std::string head =
      absl::StrCat("HTTP/1.1 ", response.status, " ", ToString(http::obsolete_reason(http::status(response.status))),
                   "\r\nDate: ", HttpDate(), "\r\nX-Request-Id: ", request_.id, "\r\n");
  if (!request_.traceparent.empty()) absl::StrAppend(&head, "traceparent: ", request_.traceparent, "\r\n");
  if (response.status != 204) absl::StrAppend(&head, "Content-Type: ", response.content_type, "\r\n");
  for (const auto& [name, value] : response.headers) absl::StrAppend(&head, name, ": ", value, "\r\n");
  if (shared_.options.cors != nullptr) {
    const CorsPolicy::Headers headers = shared_.options.cors->AnswerHeaders(request_.origin);
    for (const auto& [name, value] : headers) absl::StrAppend(&head, name, ": ", value, "\r\n");
  }
  if (streaming) {
    chunked_ = version_ >= 11;
    if (chunked_) absl::StrAppend(&head, "Transfer-Encoding: chunked\r\n");
    if (!chunked_) keep_alive_ = false;  // HTTP/1.0: the end of the connection is the end of the body
  } else if (response.status != 204) {
    absl::StrAppend(&head, "Content-Length: ", response.body.size(), "\r\n");
  }
  if (!keep_alive_) absl::StrAppend(&head, "Connection: close\r\n");
  if (keep_alive_ && version_ < 11) absl::StrAppend(&head, "Connection: keep-alive\r\n");
  return head + "\r\n";
}

asio::awaitable<bool> HttpConnection::Respond(HttpResponse response) {
  std::string bytes = Head(response, false);
  if (request_.method != "HEAD" && response.status != 204) bytes += response.body;
  answered_ = co_await Send(std::move(bytes));
  co_return answered_;
}

asio::awaitable<bool> HttpConnection::StartStream(HttpResponse head) {
  std::string bytes = Head(head, true);
  streaming_ = true;
  const bool sent = co_await Send(std::move(bytes));
  co_return sent;
}

asio::awaitable<bool> HttpConnection::Write(std::string data) {
  if (data.empty()) co_return !gone_;
  if (chunked_) {
    char size[20];
    std::snprintf(size, sizeof size, "%zx\r\n", data.size());
    data = absl::StrCat(size, data, "\r\n");
  }
  const bool sent = co_await Send(std::move(data));
  co_return sent;
}

asio::awaitable<void> HttpConnection::EndStream() {
  std::string last = chunked_ ? "0\r\n\r\n" : "";
  answered_ = co_await Send(std::move(last));
}

asio::awaitable<bool> HttpConnection::Send(std::string bytes) {
  if (gone_) co_return false;
  stream_.tcp().expires_after(shared_.options.write_timeout);
  const auto [error, written] = co_await asio::async_write(stream_, asio::buffer(bytes), kAwait);
  if (error) gone_ = true;
  co_return !gone_;
}

// ---- waiting, and noticing that the client left

asio::awaitable<void> HttpConnection::Wait(SteadyTime until) {
  if (!monitoring_ && !gone_) Monitor();
  if (!signalled_ && !gone_) {
    timer_.expires_at(until);
    co_await timer_.async_wait(kAwait);
  }
  signalled_ = false;
}

void HttpConnection::Wake() {
  signalled_ = true;
  timer_.cancel();
}

std::function<void()> HttpConnection::Waker() {
  return [weak = weak_from_this(), executor = stream_.get_executor()] {
    asio::post(executor, [weak] {
      if (const auto self = weak.lock()) static_cast<HttpConnection&>(*self).Wake();
    });
  };
}

asio::awaitable<void> HttpConnection::Compute(std::function<void()> work, bool slow) {
  if (!slow && static_cast<int64_t>(request_.body.size()) <= kSmallBody) {
    work();
    co_return;
  }
  struct Job {
    std::atomic<bool> done{false};
    std::exception_ptr failure;
  };
  const auto job = std::make_shared<Job>();
  asio::post(shared_.workers, [job, work = std::move(work), wake = Waker()] {
    try {
      work();
    } catch (...) {
      job->failure = std::current_exception();
    }
    job->done = true;
    wake();
  });
  while (!job->done) {  // even if the client has left: the work refers to this request
    if (!signalled_) {
      timer_.expires_at(SteadyTime::max());
      co_await timer_.async_wait(kAwait);
    }
    signalled_ = false;
  }
  if (job->failure) std::rethrow_exception(job->failure);
}

void HttpConnection::Monitor() {
  if (buffer_.size() + kReadBytes > kMaxBuffered) {
    log["error"] = absl::StrCat("gave up: ", buffer_.size(), " bytes were sent ahead of an answer");
    gone_ = true;
    return;
  }
  monitoring_ = true;
  stream_.tcp().expires_never();
  stream_.async_read_some(buffer_.prepare(kReadBytes),
                          [self = shared_from_this()](boost::system::error_code error, size_t bytes) {
                            self->monitoring_ = false;
                            if (!error) {
                              self->buffer_.commit(bytes);
                              if (!self->stop_monitor_) self->Monitor();
                            } else if (!(self->stop_monitor_ && error == asio::error::operation_aborted)) {
                              self->gone_ = true;
                            }
                            if (self->gone_ || self->stop_monitor_) self->Wake();
                          });
}

asio::awaitable<void> HttpConnection::StopMonitor() {
  stop_monitor_ = true;
  if (monitoring_) stream_.tcp().cancel();
  while (monitoring_) {
    timer_.expires_after(std::chrono::milliseconds(100));
    co_await timer_.async_wait(kAwait);
    if (monitoring_) stream_.tcp().cancel();  // half a TLS record came just then, and the read waits for the rest
  }
  stop_monitor_ = signalled_ = false;
}

// ---- the end

// Closing with unread bytes makes the kernel send a reset, which can overtake the answer. So what still comes is read
// and thrown away for a while.
asio::awaitable<void> HttpConnection::Linger() {
  boost::system::error_code ignored;
  if (stream_.tls() != nullptr && !tls_ended_) {
    tls_ended_ = true;
    stream_.tcp().expires_after(kTlsEndTime);
    co_await stream_.tls()->async_shutdown(kAwait);
  }
  stream_.tcp().socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  if (!unread_body_ && buffer_.size() == 0) co_return;
  unread_body_ = false;
  stream_.tcp().expires_after(stopping_ ? kLingerTimeStopping : kLingerTime);
  std::string trash(64 << 10, '\0');
  for (int64_t left = kLingerBytes; left > 0;) {
    const auto [error, bytes] = co_await stream_.tcp().async_read_some(asio::buffer(trash), kAwait);
    if (error) break;
    left -= static_cast<int64_t>(bytes);
  }
  gone_ = true;
}

void HttpConnection::CloseWhenIdle() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    self->stopping_ = true;
    if (!self->handling_) self->stream_.tcp().cancel();
  });
}

void HttpConnection::CloseNow() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    self->stopping_ = true;
    self->gone_ = true;
    self->stream_.tcp().close();
    self->Wake();
  });
}

void HttpConnection::Log(double seconds) {
  if (!shared_.options.count_and_log) return;
  Json fields = {{"request_id", request_.id},
                 {"method", request_.method},
                 {"path", request_.path.substr(0, 200)},
                 {"status", answered_ ? status_ : 499},
                 {"duration_s", seconds}};
  if (!request_.traceparent.empty()) fields["traceparent"] = request_.traceparent.substr(0, 100);
  if (request_.account != nullptr) fields["key"] = request_.account->name();
  fields.update(log);
  LogEvent("request", fields);
}

// ---- messages

HttpHandler Immediate(std::function<HttpResponse(const HttpRequest&)> answer) {
  return [answer = std::move(answer)](const HttpRequest& request, HttpExchange& exchange) -> asio::awaitable<void> {
    HttpResponse response = answer(request);
    co_await exchange.Respond(std::move(response));
  };
}

HttpHandler Computed(std::function<HttpResponse(const HttpRequest&)> answer) {
  return [answer = std::move(answer)](const HttpRequest& request, HttpExchange& exchange) -> asio::awaitable<void> {
    HttpResponse response;
    std::function<void()> work = [&] { response = answer(request); };
    co_await exchange.Compute(std::move(work));
    co_await exchange.Respond(std::move(response));
  };
}

Json ErrorObject(int status, const std::string& message, const std::string& param, const std::string& code) {
  const char* type = status == 401                   ? "authentication_error"
                     : status == 429                 ? "rate_limit_error"
                     : status == 503                 ? "service_unavailable_error"
                     : status >= 400 && status < 500 ? "invalid_request_error"
                                                     : "server_error";
  return {{"error",
           {{"message", message},
            {"type", type},
            {"param", param.empty() ? Json(nullptr) : Json(param)},
            {"code", code.empty() ? Json(nullptr) : Json(code)}}}};
}

HttpResponse ErrorResponse(int status, const std::string& message, const std::string& param, const std::string& code) {
  HttpResponse response;
  response.status = status;
  response.body = ErrorObject(status, message, param, code).dump(-1, ' ', false, Json::error_handler_t::replace);
  return response;
}

}  // namespace loupe
