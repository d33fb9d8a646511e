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
  int entries = 0, protected_entries = 0;  // the latter with outliers
  int outliers = 0;  // entries of a list that are stored as protected ones are, since their keys are the longest
  Protection protection;
  Coding coding;  // its landing; formats are the lists' own
  // With decode evict: what all lists may hold, generated tokens included, and what they grow by between two refreshes.
  bool evicts = false, in_entries = false;
  int64_t bytes = 0, growth = 0;
  SphericalLimits limits;
  std::shared_ptr<const SphericalProfile> profile;  // or none
};

// INVALID_ARGUMENT: "kv.<field>: <what is wrong, with the limits>".
absl::StatusOr<SphericalPlan> PlanSpherical(const KvOptions& options, const PolicyContext& context);

}  // namespace loupe
