// loupe health: asks a running server whether it is ready, for scripts and probes. Exit 0 only if it is.
#include <chrono>
#include <cstdio>

#include "boost/asio/connect.hpp"
#include "boost/asio/io_context.hpp"
#include "boost/asio/ip/tcp.hpp"
#include "boost/beast/core.hpp"
#include "boost/beast/http.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/commands/command.h"
#include "server/grpc_health_client.h"
#include "server/logging.h"

namespace loupe {
namespace {

namespace beast = boost::beast;
namespace http = beast::http;
using tcp = boost::asio::ip::tcp;
constexpr std::chrono::seconds kTimeout{5};

constexpr const char* kDefaultManagement = "127.0.0.1:8002";

struct State {
  std::string http_address, grpc_address, management_address;  // empty: not asked
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

absl::StatusOr<http::response<http::string_body>> Get(const std::string& address, const std::string& target) {
  const size_t colon = address.rfind(':');
  boost::asio::io_context io;
  beast::tcp_stream stream(io);
  http::response<http::string_body> response;
  beast::error_code error;
  const auto endpoints = tcp::resolver(io).resolve(address.substr(0, colon), address.substr(colon + 1), error);
  if (error) return absl::UnavailableError(absl::StrCat("cannot resolve ", address, ": ", error.message()));
  // Asynchronous calls, because only they honour the time-out.
  stream.expires_after(kTimeout);
  http::request<http::empty_body> request(http::verb::get, target, 11);
  request.set(http::field::host, address);
  beast::flat_buffer buffer;
  stream.async_connect(endpoints, [&](beast::error_code e, const tcp::endpoint&) {
    if ((error = e)) return;
    http::async_write(stream, request, [&](beast::error_code e2, size_t) {
      if ((error = e2)) return;
      http::async_read(stream, buffer, response, [&](beast::error_code e3, size_t) { error = e3; });
    });
  });
  io.run();
  if (error) return absl::UnavailableError(absl::StrCat("no HTTP answer from ", address, ": ", error.message()));
  return response;
}

Answer AskHttp(const std::string& address, const std::string& target) {
  Answer answer;
  const auto response = Get(address, target);
  if (!response.ok()) {
    answer.reason = std::string(response.status().message());
    return answer;
  }
  const auto body = nlohmann::json::parse(response->body(), nullptr, false);
  const auto text = [&](const char* key) {
    return body.is_object() && body.contains(key) && body[key].is_string() ? body[key].get<std::string>() : std::string();
  };
  if (text("phase").empty()) {
    answer.reason = absl::StrCat(address, " answers ", target, " with ", response->result_int(),
                                 " and no phase: this is no such listener of Loupe's");
    return answer;
  }
  answer.live = true;
  answer.ready = response->result() == http::status::ok;
  answer.phase = text("phase");
  answer.reason = text("reason");
  return answer;
}

Answer AskGrpc(const std::string& address) {
  Answer answer;
  const auto serving = CheckGrpcHealth(address, kTimeout);
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
  // Ready means that every listener asked is; the first that is not speaks for all.
  Answer answer{.live = true, .ready = true};
  if (!management.empty()) answer = AskHttp(management, "/readyz");
  if (answer.ready && !state.http_address.empty()) answer = AskHttp(state.http_address, "/health");
  if (answer.ready && !state.grpc_address.empty()) answer = AskGrpc(state.grpc_address);
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
                                "loupe health --management 127.0.0.1:8002 --json");
  auto state = std::make_shared<State>();
  command.app->add_option("--http", state->http_address, "ask the main HTTP listener")->type_name("HOST:PORT");
  command.app->add_option("--grpc", state->grpc_address, "ask the gRPC listener (grpc.health.v1)")->type_name("HOST:PORT");
  command.app->add_option("--management", state->management_address, "ask the management listener; the default if none is named")
      ->type_name("HOST:PORT")
      ->default_str(kDefaultManagement);
  const auto common = command.common;
  command.run = [state, common] { return Run(*state, common->json); };
  return command;
}

}  // namespace loupe
