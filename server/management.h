// The management listener: probes and metrics for the orchestrator, on a port of its own, open before the model is
// loaded, without a key. Handlers answer at once and run on the listener's one thread.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/http_router.h"
#include "server/http_server.h"
#include "server/server_context.h"

namespace loupe {

// Work waits and no step has ended for so long: the step thread hangs, only a restart helps.
inline constexpr double kStallSeconds = 60;

HttpRouter ManagementRoutes(ServerContext& context);

// `context` outlives the server.
absl::StatusOr<std::unique_ptr<HttpServer>> StartManagement(ServerContext& context, const std::string& address);

// /readyz, and /health on the main listener: 200 if requests are welcome, else 503; {phase, progress, reason}.
HttpResponse Readiness(const ServerContext& context);

// Pure, for the probes.
bool IsStalled(const EngineStats& stats);

}  // namespace loupe
