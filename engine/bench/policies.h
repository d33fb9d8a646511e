// What a KV policy costs: time of a prompt and of decode steps beside the first policy of the list, in turn in one run, so
// that a machine that slows down slows all of them: `loupe bench policies`. Nothing else should run meanwhile.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/bench/bench.h"
#include "engine/eval/eval_runner.h"

namespace loupe {

// Medians over rounds; ratios are medians of the rounds' ratios to the first policy.
struct PolicyCost {
  std::string label;
  double prefill_ms = 0;      // of the prompt, with scoring and repack at its end
  double prefill_ratio = 1;   // time over the first policy's
  double decode_us = 0;       // of a step of one sequence
  double decode_ratio = 1;    // speed over the first policy's
  double bytes_ratio = 1;     // device bytes when the policy had acted, over dense entries without slack
};

// `options`: context, tokens, repeat (rounds, after one that warms up) and max_step_tokens; one sequence at a time.
// INVALID_ARGUMENT: a policy's object, naming its field, or a context that the model does not have.
absl::StatusOr<std::vector<PolicyCost>> BenchPolicies(LoadedModel& model, const BenchOptions& options,
                                                      std::span<const EvalPolicy> policies);

}  // namespace loupe
