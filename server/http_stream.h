// The byte stream of one HTTP connection: TCP, or TLS over it, behind one face, so that the connection is written once.
// An AsyncStream in Beast's sense. Used on the connection's strand; a read and a write may be pending at a time.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "boost/asio/ssl/stream.hpp"
#include "boost/beast/core/tcp_stream.hpp"

namespace loupe {

class HttpStream {
 public:
  using executor_type = boost::beast::tcp_stream::executor_type;
  using Tls = boost::asio::ssl::stream<boost::beast::tcp_stream&>;

  // `context` is null for plain TCP.
  HttpStream(boost::asio::ip::tcp::socket socket, std::shared_ptr<boost::asio::ssl::context> context)
      : tcp_(std::move(socket)), context_(std::move(context)) {
    if (context_ != nullptr) tls_.emplace(tcp_, *context_);
  }

  executor_type get_executor() { return tcp_.get_executor(); }
  boost::beast::tcp_stream& tcp() { return tcp_; }  // time limits, cancel, close
  Tls* tls() { return tls_ ? &*tls_ : nullptr; }

  template <class Buffers, class Token>
  auto async_read_some(const Buffers& buffers, Token&& token) {
    return boost::asio::async_initiate<Token, void(boost::system::error_code, size_t)>(
        [this](auto handler, const Buffers& into) {
          if (tls_) {
            tls_->async_read_some(into, std::move(handler));
          } else {
            tcp_.async_read_some(into, std::move(handler));
          }
        },
        token, buffers);
  }
  template <class Buffers, class Token>
  auto async_write_some(const Buffers& buffers, Token&& token) {
    return boost::asio::async_initiate<Token, void(boost::system::error_code, size_t)>(
        [this](auto handler, const Buffers& from) {
          if (tls_) {
            tls_->async_write_some(from, std::move(handler));
          } else {
            tcp_.async_write_some(from, std::move(handler));
          }
        },
        token, buffers);
  }

 private:
  boost::beast::tcp_stream tcp_;
  std::shared_ptr<boost::asio::ssl::context> context_;  // outlives tls_
  std::optional<Tls> tls_;
};

}  // namespace loupe
