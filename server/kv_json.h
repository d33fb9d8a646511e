// The `kv` object of a request and of the usage report, as JSON. Shared by HTTP and the commands.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/request.h"
#include "nlohmann/json_fwd.hpp"

namespace loupe {

// INVALID_ARGUMENT names the offending field. Fields that this build would silently lose (a budget, fewer bits) are
// refused by name, saying what is offered.
absl::StatusOr<KvOptions> ParseKvOptions(const nlohmann::ordered_json& json);
absl::StatusOr<KvOptions> ParseKvOptions(const std::string& text);

nlohmann::ordered_json KvReportToJson(const KvReport& report);

}  // namespace loupe
