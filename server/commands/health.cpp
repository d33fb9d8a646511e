// loupe health: asks a running server whether it is ready, for scripts and probes. Exit 0 only if it is.
#include <chrono>
#include <cstdio>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/commands/command.h"
#include "server/grpc_health_client.h"
#include "server/http_client.h"
#include "server/logging.h"

namespace loupe {
namespace {

constexpr std::chrono::seconds kTimeout{5};

constexpr const char* kDefaultManagement = "127.0.0.1:8002";

struct State {
  std::string http_address, grpc_address, management_address;  // empty: not asked
  TlsClientOptions tls;  // of the first two; the management listener has none
};

struct Answer {
  bool live = false;
  bool ready = false;
  std::string phase = "unknown";
  std::string reason;
};

absl::Status CheckAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon != std::string::npos && colon > 0 && absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= 1 && port <= 65535) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("'", address, "' is not HOST:PORT with a port from 1 to 65535"));
}

Answer AskHttp(const std::string& address, const std::string& target, const TlsClientOptions& tls) {
  Answer answer;
  const auto response = HttpGet(address, target, tls, kTimeout);
  if (!response.ok()) {
    answer.reason = std::string(response.status().message());
    return answer;
  }
  const auto body = nlohmann::json::parse(response->body, nullptr, false);
  const auto text = [&](const char* key) {
    return body.is_object() && body.contains(key) && body[key].is_string() ? body[key].get<std::string>() : std::string();
  };
  if (text("phase").empty()) {
    const bool plain = tls.empty() && response->status == 400;  // what a listener with TLS says to those without
    answer.reason = absl::StrCat(address, " answers ", target, " with ", response->status,
                                 " and no phase: this is no such listener of Loupe's", plain ? ", or one that needs --tls-ca" : "");
    return answer;
  }
  answer.live = true;
  answer.ready = response->status == 200;
  answer.phase = text("phase");
  answer.reason = text("reason");
  return answer;
}

Answer AskGrpc(const std::string& address, const TlsClientOptions& tls) {
  Answer answer;
  const auto serving = CheckGrpcHealth(address, tls, kTimeout);
  if (!serving.ok()) {
    answer.reason = std::string(serving.status().message());
    return answer;
  }
  answer.live = true;
  answer.ready = *serving;
  answer.phase = *serving ? "ready" : "not serving";
  return answer;
}

int Run(const State& state, bool json) {
  InitLogging("off");
  std::string management = state.management_address;
  if (state.http_address.empty() && state.grpc_address.empty() && management.empty()) management = kDefaultManagement;
  for (const std::string& address : {state.http_address, state.grpc_address, management}) {
    if (address.empty()) continue;
    if (const absl::Status status = CheckAddress(address); !status.ok()) return Fail(status);
  }
  if (const auto files = MakeTlsClient(state.tls); !files.ok()) return Fail(files.status());
  // Ready means that every listener asked is; the first that is not speaks for all.
  Answer answer{.live = true, .ready = true};
  if (!management.empty()) answer = AskHttp(management, "/readyz", {});
  if (answer.ready && !state.http_address.empty()) answer = AskHttp(state.http_address, "/health", state.tls);
  if (answer.ready && !state.grpc_address.empty()) answer = AskGrpc(state.grpc_address, state.tls);
  if (json) {
    const nlohmann::ordered_json out = {
        {"live", answer.live}, {"ready", answer.ready}, {"phase", answer.phase}, {"reason", answer.reason}};
    std::printf("%s\n", out.dump().c_str());
  } else {
    std::printf("%s, phase %s%s%s\n", answer.ready ? "ready" : answer.live ? "live, not ready" : "not reachable",
                answer.phase.c_str(), answer.reason.empty() ? "" : ": ", answer.reason.c_str());
  }
  return answer.ready ? kExitOk : kExitFailed;
}

}  // namespace

Command AddHealthCommand(CLI::App* root) {
  Command command = MakeCommand(root, "health", "ask a running server whether it is ready (exit 0 only if so)",
                                "loupe health --management 127.0.0.1:8002 --json\n"
                                "  loupe health --http 127.0.0.1:8000 --tls-ca ca.crt --tls-server-name loupe.example.org\n"
                                "Health needs no API key. A probe in the server's own pod asks --management, which never has TLS; if it\n"
                                "must ask --http or --grpc at 127.0.0.1, --tls-server-name says what name the certificate bears.");
  auto state = std::make_shared<State>();
  command.app->add_option("--http", state->http_address, "ask the main HTTP listener")->type_name("HOST:PORT");
  command.app->add_option("--grpc", state->grpc_address, "ask the gRPC listener (grpc.health.v1)")->type_name("HOST:PORT");
  command.app->add_option("--management", state->management_address, "ask the management listener; the default if none is named")
      ->type_name("HOST:PORT")
      ->default_str(kDefaultManagement);
  TlsClientOptions& tls = state->tls;
  command.app->add_option("--tls-ca", tls.ca, "TLS to --http and --grpc; PEM authorities of the server's certificate, the system's if none")
      ->type_name("FILE");
  command.app->add_option("--tls-cert", tls.cert, "TLS, with this PEM certificate shown to a server that asks for one")->type_name("FILE");
  command.app->add_option("--tls-key", tls.key, "PEM key of --tls-cert")->type_name("FILE");
  command.app->add_option("--tls-server-name", tls.server_name, "TLS; the name in the server's certificate, if it is not the host asked")
      ->type_name("NAME");
  command.app->add_flag("--tls-insecure", tls.insecure, "TLS, whatever the server's certificate is");
  const auto common = command.common;
  command.run = [state, common] { return Run(*state, common->json); };
  return command;
}

}  // namespace loupe
