// What the commands share that measure policies.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/eval/eval_runner.h"
#include "engine/engine_config.h"

namespace loupe {

// INVALID_ARGUMENT names the field that is wrong; none, or "auto", is wrong too.
absl::StatusOr<std::vector<EvalPolicy>> ParsePolicies(const std::vector<std::string>& texts);
// What kept measurements depend on beside text and policy: the weights of `path`, and how they are computed.
absl::StatusOr<std::string> MeasuredModel(const std::string& path, const LoadedModel& model, const EngineConfig& config);

}  // namespace loupe
