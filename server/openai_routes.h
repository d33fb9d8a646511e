// The main HTTP listener: OpenAI's routes and the few beside them, each a thin layer over parse, submit, answer. Routes
// exist before the model does; until then they answer 503.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/http_router.h"
#include "server/http_server.h"
#include "server/server_context.h"

namespace loupe {

HttpRouter OpenAiRoutes(ServerContext& context);

// `context` outlives the server.
absl::StatusOr<std::unique_ptr<HttpServer>> StartOpenAi(ServerContext& context, const std::string& address);

}  // namespace loupe
