#include "server/commands/policies.h"

#include "nlohmann/json.hpp"
#include "server/kv_json.h"

namespace loupe {

absl::StatusOr<std::vector<EvalPolicy>> ParsePolicies(const std::vector<std::string>& texts) {
  std::vector<EvalPolicy> policies;
  for (const std::string& text : texts) {
    auto options = ParseKvOptions(text);
    if (!options.ok()) return options.status();
    if (options->policy == "auto") {
      return absl::InvalidArgumentError("kv.policy: this compares named policies; 'auto' chooses by load");
    }
    policies.push_back({*options, KvOptionsToJson(*options).dump()});
  }
  if (policies.empty())
    return absl::InvalidArgumentError(
        "give at least one --kv '{\"policy\":\"snapkv\",\"budget\":{\"ratio\":0.25}}'");
  return policies;
}

}  // namespace loupe
