#include "server/grpc_health_client.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>

#include "absl/strings/str_cat.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/grpc_log.h"
#include "server/read_input.h"

namespace loupe {
namespace {

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsOf(const TlsClientOptions& tls) {
  namespace experimental = grpc::experimental;
  if (tls.empty()) return grpc::InsecureChannelCredentials();
  std::string files[3];
  const std::string paths[3] = {tls.ca, tls.key, tls.cert};
  for (size_t i = 0; i < 3; ++i) {
    if (paths[i].empty()) continue;
    auto text = ReadFile("PEM file", paths[i]);
    if (!text.ok()) return text.status();
    files[i] = *std::move(text);
  }
  const auto& [ca, key, cert] = files;
  experimental::TlsChannelCredentialsOptions options;
  const std::vector<experimental::IdentityKeyCertPair> pairs(cert.empty() ? 0 : 1, {key, cert});
  if (!ca.empty() || !cert.empty()) {
    options.set_certificate_provider(std::make_shared<experimental::StaticDataCertificateProvider>(ca, pairs));
  }
  if (!ca.empty()) options.watch_root_certs();
  if (!cert.empty()) options.watch_identity_key_cert_pairs();
  if (tls.insecure) {
    options.set_verify_server_certs(false);
    options.set_certificate_verifier(std::make_shared<experimental::NoOpCertificateVerifier>());
    options.set_check_call_host(false);
  }
  return experimental::TlsCredentials(options);
}

}  // namespace

absl::StatusOr<bool> CheckGrpcHealth(const std::string& address, const TlsClientOptions& tls, std::chrono::seconds timeout) {
  RouteGrpcLog();
  const auto credentials = CredentialsOf(tls);
  if (!credentials.ok()) return credentials.status();
  grpc::ChannelArguments arguments;
  if (!tls.server_name.empty()) arguments.SetSslTargetNameOverride(tls.server_name);
  const auto channel = grpc::CreateCustomChannel(address, *credentials, arguments);
  const auto stub = grpc::health::v1::Health::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status = stub->Check(&context, {}, &response);
  if (!status.ok()) return absl::UnavailableError(absl::StrCat("no answer from ", address, ": ", status.error_message()));
  return response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

}  // namespace loupe
