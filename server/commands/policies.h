// The --kv objects of the commands that compare policies.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/eval/eval_runner.h"

namespace loupe {

// INVALID_ARGUMENT names the field that is wrong; none, or "auto", is wrong too.
absl::StatusOr<std::vector<EvalPolicy>> ParsePolicies(const std::vector<std::string>& texts);

}  // namespace loupe
