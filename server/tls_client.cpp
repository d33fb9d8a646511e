#include "server/tls_client.h"

#include <openssl/ssl.h>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

namespace ssl = boost::asio::ssl;

absl::Status BadFile(const char* flag, const std::string& path, const boost::system::error_code& error) {
  return absl::InvalidArgumentError(absl::StrCat(flag, ": cannot use '", path, "': ", error.message(), "; it must be a PEM file"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<ssl::context>> MakeTlsClient(const TlsClientOptions& options) {
  if (options.cert.empty() != options.key.empty()) {
    return absl::InvalidArgumentError(options.cert.empty() ? "--tls-cert is missing; a client's certificate needs --tls-cert and --tls-key"
                                                           : "--tls-key is missing; a client's certificate needs --tls-cert and --tls-key");
  }
  auto context = std::make_shared<ssl::context>(ssl::context::tls_client);
  SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
  boost::system::error_code error;
  if (options.ca.empty()) {
    context->set_default_verify_paths(error);
  } else {
    context->load_verify_file(options.ca, error);
  }
  if (error) return BadFile("--tls-ca", options.ca, error);
  context->set_verify_mode(options.insecure ? ssl::verify_none : ssl::verify_peer);
  if (options.cert.empty()) return context;
  context->use_certificate_chain_file(options.cert, error);
  if (error) return BadFile("--tls-cert", options.cert, error);
  context->use_private_key_file(options.key, ssl::context::pem, error);
  if (error) return BadFile("--tls-key", options.key, error);
  return context;
}

}  // namespace loupe
