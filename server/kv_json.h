// The `kv` object of a request and of the usage report, as JSON. Shared by HTTP and the commands.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/request.h"
#include "nlohmann/json_fwd.hpp"

namespace loupe {

inline constexpr size_t kMaxProtectRanges = 256;

// INVALID_ARGUMENT names the offending field. Fields that this build would silently lose (on_miss) are refused by name, saying
// what is offered. Values that depend on model and prompt are checked by the engine.
absl::StatusOr<KvOptions> ParseKvOptions(const nlohmann::ordered_json& json);
absl::StatusOr<KvOptions> ParseKvOptions(const std::string& text);

// The object with every default filled in: what results are kept under.
nlohmann::ordered_json KvOptionsToJson(const KvOptions& options);

// All policies with their parameters, as /v1/kv/policies shows them; and for people.
nlohmann::ordered_json KvPoliciesToJson(bool baselines);
std::string KvPoliciesAsText();

nlohmann::ordered_json KvReportToJson(const KvReport& report);

}  // namespace loupe
