// What every listener shares. Listeners open before the model is loaded; until then engine() is null and requests are
// answered 503 / UNAVAILABLE.
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "engine/text/answer_parser.h"
#include "server/in_flight.h"
#include "server/lifecycle.h"
#include "server/metrics.h"

namespace loupe {

class ApiKeys;     // server/api_keys.h
class CorsPolicy;  // server/cors.h
class TlsContext;  // server/tls.h

struct ServerContext {
  std::string model_name;
  int64_t created_unix_s = 0;
  bool strict_fields = false;       // unknown JSON fields are refused
  std::optional<ToolFormat> tool_format;  // how the model writes calls; none: as its template says
  bool log_prompts = false;
  bool allow_baselines = false;     // kv policies that only serve as comparison
  int64_t max_body_bytes = 16 << 20;
  int max_connections = 1024;
  Lifecycle* lifecycle = nullptr;
  Metrics* metrics = nullptr;
  // Of the public listeners; null: none. The management listener has no key, no TLS and no web pages.
  ApiKeys* keys = nullptr;
  TlsContext* tls = nullptr;
  const CorsPolicy* cors = nullptr;
  std::string config_json;          // --print-config, for /config
  std::atomic<Engine*> engine{nullptr};
  InFlight in_flight;               // by the ids that clients know, of both protocols
};

// UNAVAILABLE while there is no engine yet.
absl::StatusOr<Engine*> ServingEngine(const ServerContext& context);
// NOT_FOUND if a request names another model than the one served; empty names none.
absl::Status CheckModel(const ServerContext& context, const std::string& model);

}  // namespace loupe
