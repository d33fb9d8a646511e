#include "server/commands/policies.h"

#include "absl/strings/str_cat.h"
#include "engine/load/artifacts.h"
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
    const KvProtect& protect = options->protect;
    if (!protect.messages.empty() || !protect.roles.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("kv.protect.", protect.messages.empty() ? "roles" : "messages",
                                                     ": there are no messages here; give ranges of tokens"));
    }
    policies.push_back({*options, KvOptionsToJson(*options).dump()});
  }
  if (policies.empty())
    return absl::InvalidArgumentError(
        "give at least one --kv '{\"policy\":\"snapkv\",\"budget\":{\"ratio\":0.25}}'");
  return policies;
}

absl::StatusOr<std::string> MeasuredModel(const std::string& path, const LoadedModel& model, const EngineConfig& config) {
  auto hash = HashWeights(path);
  if (!hash.ok()) return hash.status();
  return absl::StrCat(*hash, ":", model.backend->Info().name, config.backend.exact ? ":exact" : "",
                      config.backend.isa.empty() ? "" : ":", config.backend.isa);
}

}  // namespace loupe
