#include "server/http_client.h"

#include "absl/strings/str_cat.h"
#include "boost/asio/io_context.hpp"
#include "boost/asio/ip/tcp.hpp"
#include "boost/asio/ssl/host_name_verification.hpp"
#include "boost/beast/core.hpp"
#include "boost/beast/http.hpp"
#include "boost/beast/ssl.hpp"

namespace loupe {
namespace {

namespace beast = boost::beast;
namespace http = beast::http;
namespace ssl = boost::asio::ssl;
using tcp = boost::asio::ip::tcp;

// One connection and what goes over it. Asynchronous calls, because only they honour the time-out.
struct Exchange {
  boost::asio::io_context io;
  http::request<http::empty_body> request;
  http::response<http::string_body> response;
  beast::flat_buffer buffer;
  beast::error_code error;
  std::string failed;  // the step that did

  template <class Stream>
  void Ask(Stream& stream) {
    http::async_write(stream, request, [&](beast::error_code e, size_t) {
      if (Failed(e, "no HTTP answer")) return;
      http::async_read(stream, buffer, response, [&](beast::error_code e2, size_t) { Failed(e2, "no HTTP answer"); });
    });
  }
  bool Failed(beast::error_code e, const char* step) {
    if (e) error = e, failed = step;
    return static_cast<bool>(e);
  }
};

absl::Status RunPlain(Exchange& x, const tcp::resolver::results_type& endpoints, std::chrono::seconds timeout) {
  beast::tcp_stream stream(x.io);
  stream.expires_after(timeout);
  stream.async_connect(endpoints, [&](beast::error_code e, const tcp::endpoint&) {
    if (!x.Failed(e, "no HTTP answer")) x.Ask(stream);
  });
  x.io.run();
  return absl::OkStatus();
}

absl::Status RunTls(Exchange& x, const tcp::resolver::results_type& endpoints, const std::string& host, const TlsClientOptions& tls,
                    std::chrono::seconds timeout) {
  const auto context = MakeTlsClient(tls);
  if (!context.ok()) return context.status();
  beast::ssl_stream<beast::tcp_stream> stream(x.io, **context);
  const std::string& name = tls.server_name.empty() ? host : tls.server_name;
  if (!tls.insecure) stream.set_verify_callback(ssl::host_name_verification(name));
  beast::error_code is_name;
  boost::asio::ip::make_address(name, is_name);
  if (is_name) SSL_set_tlsext_host_name(stream.native_handle(), name.c_str());  // addresses are not sent
  beast::get_lowest_layer(stream).expires_after(timeout);
  beast::get_lowest_layer(stream).async_connect(endpoints, [&](beast::error_code e, const tcp::endpoint&) {
    if (x.Failed(e, "no HTTP answer")) return;
    stream.async_handshake(ssl::stream_base::client, [&](beast::error_code e2) {
      if (!x.Failed(e2, "no TLS session")) x.Ask(stream);
    });
  });
  x.io.run();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HttpReply> HttpGet(const std::string& address, const std::string& target, const TlsClientOptions& tls,
                                  std::chrono::seconds timeout) {
  const size_t colon = address.rfind(':');
  const std::string host = address.substr(0, colon);
  Exchange x;
  const auto endpoints = tcp::resolver(x.io).resolve(host, address.substr(colon + 1), x.error);
  if (x.error) return absl::UnavailableError(absl::StrCat("cannot resolve ", address, ": ", x.error.message()));
  x.request = {http::verb::get, target, 11};
  x.request.set(http::field::host, address);
  const absl::Status ran = tls.empty() ? RunPlain(x, endpoints, timeout) : RunTls(x, endpoints, host, tls, timeout);
  if (!ran.ok()) return ran;
  if (x.error) return absl::UnavailableError(absl::StrCat(x.failed, " from ", address, ": ", x.error.message()));
  return HttpReply{static_cast<int>(x.response.result_int()), std::move(x.response.body())};
}

}  // namespace loupe
