// What a route's handler sees of HTTP: one request, and the exchange through which it answers. The connection owns both
// and calls the handler on its strand, so a handler needs no locks; it lives as a coroutine until the answer is
// written.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "boost/asio/awaitable.hpp"
#include "engine/request.h"
#include "nlohmann/json.hpp"

namespace loupe {

class KeyAccount;  // server/api_keys.h

struct HttpRequest {
  std::string method;
  std::string path;       // without query, as sent
  std::string parameter;  // what stood for {id} in the route, percent-decoded
  std::string id;         // X-Request-Id, or made here if the client sent none (or one that is not fit to be echoed)
  std::string content_type;
  std::string content_encoding;
  std::string traceparent;
  std::string origin;     // of the web page that asks; empty: none
  std::shared_ptr<KeyAccount> account;  // of the API key; null: this listener asks for none
  std::string body;
  SteadyTime arrival{};
};

struct HttpResponse {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
};

class HttpExchange {
 public:
  virtual ~HttpExchange() = default;

  // Exactly one of these two starts the answer. False: the client is gone.
  virtual boost::asio::awaitable<bool> Respond(HttpResponse response) = 0;
  virtual boost::asio::awaitable<bool> StartStream(HttpResponse head) = 0;  // body ignored
  // Returns when the bytes are in the socket, so a slow reader slows the handler down and nothing piles up here.
  virtual boost::asio::awaitable<bool> Write(std::string data) = 0;
  virtual bool started() const = 0;

  // Sleeps until Waker()'s function was called, the client is gone, or `until`. Wakes at once if one of them happened
  // since the last Wait.
  virtual boost::asio::awaitable<void> Wait(SteadyTime until) = 0;
  // May be called from any thread, also after the exchange has ended.
  virtual std::function<void()> Waker() = 0;
  // Seen while the handler waits, computes or writes. A client that half-closes counts as gone. Any thread.
  virtual bool client_gone() const = 0;

  // Runs `work`, whose time grows with the request's body, and returns when it is done: here if the body is small, on a
  // worker thread otherwise or if it is known to be `slow`, so that it holds up no other connection. What it throws is
  // thrown here.
  virtual boost::asio::awaitable<void> Compute(std::function<void()> work, bool slow = false) = 0;

  // Joins the access log line of this request.
  nlohmann::ordered_json log = nlohmann::ordered_json::object();
};

using HttpHandler = std::function<boost::asio::awaitable<void>(const HttpRequest&, HttpExchange&)>;

// A handler that has its answer at once; one that has to work through the body for it.
HttpHandler Immediate(std::function<HttpResponse(const HttpRequest&)> answer);
HttpHandler Computed(std::function<HttpResponse(const HttpRequest&)> answer);

// {"error": {message, type, param, code}}, the shape that OpenAI's clients know. Empty param or code: null.
nlohmann::ordered_json ErrorObject(int status, const std::string& message, const std::string& param,
                                   const std::string& code);
HttpResponse ErrorResponse(int status, const std::string& message, const std::string& param = "",
                           const std::string& code = "");

}  // namespace loupe
