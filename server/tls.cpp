#include "server/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

namespace loupe {
namespace {

namespace ssl = boost::asio::ssl;

std::vector<std::string> Paths(const TlsFiles& files) {
  std::vector<std::string> paths = {files.cert, files.key};
  if (!files.client_ca.empty()) paths.push_back(files.client_ca);
  return paths;
}

absl::Status BadFile(const char* flag, const std::string& path, const boost::system::error_code& error) {
  return absl::InvalidArgumentError(absl::StrCat(flag, ": cannot use '", path, "': ", error.message(), "; it must be a PEM file"));
}

// HTTP/1.1 is all that is spoken here; a client that offers only h2 goes on without.
int ChooseProtocol(SSL*, const unsigned char** chosen, unsigned char* length, const unsigned char* offered,
                   unsigned offered_length, void*) {
  static const unsigned char kHttp[] = "\x08http/1.1";
  unsigned char* out = nullptr;
  const int found = SSL_select_next_proto(&out, length, kHttp, sizeof kHttp - 1, offered, offered_length);
  if (found != OPENSSL_NPN_NEGOTIATED) return SSL_TLSEXT_ERR_NOACK;
  *chosen = out;
  return SSL_TLSEXT_ERR_OK;
}

}  // namespace

TlsContext::TlsContext(TlsFiles files, std::chrono::steady_clock::duration look_every)
    : files_(std::move(files)), watch_(Paths(files_), look_every) {}

absl::StatusOr<std::unique_ptr<TlsContext>> TlsContext::Load(const TlsFiles& files, std::chrono::steady_clock::duration look_every) {
  if (files.cert.empty() || files.key.empty()) {
    return absl::InvalidArgumentError(files.cert.empty() ? "--tls-cert is missing; TLS needs --tls-cert and --tls-key"
                                                         : "--tls-key is missing; TLS needs --tls-cert and --tls-key");
  }
  auto tls = std::unique_ptr<TlsContext>(new TlsContext(files, look_every));
  auto context = tls->Make();
  if (!context.ok()) return context.status();
  tls->context_ = *std::move(context);
  return tls;
}

absl::StatusOr<std::shared_ptr<ssl::context>> TlsContext::Make() const {
  auto context = std::make_shared<ssl::context>(ssl::context::tls_server);
  SSL_CTX* raw = context->native_handle();
  SSL_CTX_set_min_proto_version(raw, TLS1_2_VERSION);
  SSL_CTX_set_options(raw, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_alpn_select_cb(raw, ChooseProtocol, nullptr);
  boost::system::error_code error;
  context->use_certificate_chain_file(files_.cert, error);
  if (error) return BadFile("--tls-cert", files_.cert, error);
  context->use_private_key_file(files_.key, ssl::context::pem, error);
  const int reason = ERR_GET_REASON(error.value());
  const bool other_key = error && (reason == X509_R_KEY_VALUES_MISMATCH || reason == X509_R_KEY_TYPE_MISMATCH);
  if (error && !other_key) return BadFile("--tls-key", files_.key, error);
  if (other_key || SSL_CTX_check_private_key(raw) != 1) {
    return absl::InvalidArgumentError(absl::StrCat("--tls-key: '", files_.key, "' is not the key of the certificate '", files_.cert, "'"));
  }
  if (files_.client_ca.empty()) return context;
  context->load_verify_file(files_.client_ca, error);
  if (error) return BadFile("--tls-client-ca", files_.client_ca, error);
  SSL_CTX_set_client_CA_list(raw, SSL_load_client_CA_file(files_.client_ca.c_str()));
  // Sessions of clients with a certificate are only resumed within a context of this name.
  static const unsigned char kName[] = "loupe";
  SSL_CTX_set_session_id_context(raw, kName, sizeof kName - 1);
  context->set_verify_mode(ssl::verify_peer | ssl::verify_fail_if_no_peer_cert);
  return context;
}

std::shared_ptr<ssl::context> TlsContext::Current() {
  const std::lock_guard lock(mutex_);
  if (!watch_.Changed()) return context_;
  auto context = Make();
  if (context.ok()) {
    context_ = *std::move(context);
    spdlog::info("certificate read again");
  } else {
    spdlog::error("the certificate stays as it was: {}", std::string(context.status().message()));
  }
  return context_;
}

}  // namespace loupe
