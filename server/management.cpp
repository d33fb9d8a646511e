#include "server/management.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/http_json.h"

namespace loupe {
namespace {

std::optional<EngineStats> StatsNow(const ServerContext& context) {
  const Engine* engine = context.engine;
  if (engine == nullptr) return std::nullopt;
  return engine->Stats();
}

HttpResponse Probe(const ServerContext& context, bool passes, const std::string& reason) {
  const Phase phase = context.lifecycle->phase();
  const bool loaded = phase == Phase::kReady || phase == Phase::kDraining;
  HttpResponse response;
  response.status = passes ? 200 : 503;
  response.body = DumpJson({{"phase", PhaseName(phase)},
                            {"progress", loaded ? 1.0 : context.lifecycle->progress()},
                            {"reason", reason.empty() ? context.lifecycle->reason() : reason}});
  if (!passes) response.headers.emplace_back("Retry-After", "2");
  return response;
}

std::string StallReason(const std::optional<EngineStats>& stats) {
  if (stats && !stats->failure.empty()) return stats->failure;
  if (!stats || !IsStalled(*stats)) return "";
  return absl::StrCat(stats->requests_running, " requests run and ", stats->requests_waiting,
                      " wait, but no step has ended for ", static_cast<int64_t>(stats->last_step_age_s), " s");
}

HttpResponse Liveness(const ServerContext& context) {
  const std::string stalled = StallReason(StatsNow(context));
  return Probe(context, stalled.empty() && context.lifecycle->phase() != Phase::kFailed, stalled);
}

HttpResponse Startup(const ServerContext& context) {
  const Phase phase = context.lifecycle->phase();
  return Probe(context, phase == Phase::kReady || phase == Phase::kDraining, "");
}

HttpResponse MetricsPage(const ServerContext& context, bool routing_only) {
  const std::optional<EngineStats> stats = StatsNow(context);
  const EngineStats* known = stats ? &*stats : nullptr;
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body =
      routing_only ? context.metrics->RoutingPage(known) : context.metrics->Page(known, context.lifecycle->phase());
  return response;
}

}  // namespace

bool IsStalled(const EngineStats& stats) {
  return stats.requests_running + stats.requests_waiting > 0 && stats.last_step_age_s > kStallSeconds;
}

HttpResponse Readiness(const ServerContext& context) {
  const std::string stalled = StallReason(StatsNow(context));
  return Probe(context, stalled.empty() && context.lifecycle->phase() == Phase::kReady, stalled);
}

HttpRouter ManagementRoutes(ServerContext& context) {
  HttpRouter router;
  router.Add("GET", "/livez", Immediate([&context](const HttpRequest&) { return Liveness(context); }));
  router.Add("GET", "/readyz", Immediate([&context](const HttpRequest&) { return Readiness(context); }));
  router.Add("GET", "/startupz", Immediate([&context](const HttpRequest&) { return Startup(context); }));
  router.Add("GET", "/metrics", Immediate([&context](const HttpRequest&) { return MetricsPage(context, false); }));
  router.Add("GET", "/metrics/epp", Immediate([&context](const HttpRequest&) { return MetricsPage(context, true); }));
  router.Add("GET", "/config", Immediate([&context](const HttpRequest&) {
               HttpResponse response;
               response.body = context.config_json.empty() ? "{}" : context.config_json;
               return response;
             }));
  return router;
}

absl::StatusOr<std::unique_ptr<HttpServer>> StartManagement(ServerContext& context, const std::string& address) {
  HttpServerOptions options;
  options.num_threads = 1;
  options.count_and_log = false;
  options.max_connections = 64;  // probes and scrapers, within what kReservedDescriptors sets aside
  return HttpServer::Start(context, ManagementRoutes(context), address, options);
}

}  // namespace loupe
