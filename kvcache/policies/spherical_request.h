// From what a request asks of policy spherical to what each list of its prompt holds. Pure, any thread.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "kvcache/policies/coded.h"
#include "kvcache/policies/spherical_plan.h"

namespace loupe {

// What a prompt's lists hold.
struct SphericalPlan {
  std::vector<SphericalOption> lists;
  int entries = 0, protected_entries = 0;
  Protection protection;
  Coding coding;  // its landing; formats are the lists' own
};

// INVALID_ARGUMENT: "kv.<field>: <what is wrong, with the limits>".
absl::StatusOr<SphericalPlan> PlanSpherical(const KvOptions& options, const PolicyContext& context);

}  // namespace loupe
