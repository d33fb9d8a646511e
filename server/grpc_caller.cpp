#include "server/grpc_caller.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include "server/tls.h"

namespace loupe {
namespace {

constexpr unsigned kLookEveryS = 1;

std::string Authorization(const grpc::ServerContextBase& call) {
  const auto& metadata = call.client_metadata();
  const auto shown = metadata.find("authorization");
  return shown == metadata.end() ? std::string() : std::string(shown->second.data(), shown->second.size());
}

}  // namespace

absl::StatusOr<std::shared_ptr<KeyAccount>> FindCaller(const ServerContext& context, const grpc::ServerContextBase& call) {
  if (context.keys == nullptr) return nullptr;
  auto account = context.keys->Find(Authorization(call));
  if (!account.ok()) context.metrics->CountRejected(RejectReason::kNoKey);
  return account;
}

std::string CallerName(const ServerContext& context, const grpc::ServerContextBase& call) {
  if (context.keys == nullptr) return "";
  const auto account = context.keys->Find(Authorization(call));
  return account.ok() ? (*account)->name() : "";
}

std::shared_ptr<grpc::ServerCredentials> CredentialsOf(const ServerContext& context) {
  if (context.tls == nullptr) return grpc::InsecureServerCredentials();
  const TlsFiles& files = context.tls->files();
  const auto provider =
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(files.key, files.cert, files.client_ca, kLookEveryS);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_identity_key_cert_pairs();
  if (!files.client_ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace loupe
