#include "engine/bench/policies.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>

#include "absl/strings/str_cat.h"
#include "kvcache/policies/registry.h"

namespace loupe {
namespace {

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Rounds {
  std::vector<double> prefill, decode;  // seconds, of a prompt and of a step
};

// A prompt and what follows it, under one policy.
absl::Status RunOnce(EvalRunner& runner, const Policy& policy, std::span<const int32_t> ids, const BenchOptions& options,
                     Rounds* rounds, PolicyCost* cost) {
  const auto seq = runner.cache().Open(policy);
  if (!seq.ok()) return seq.status();
  const auto run = [&]() -> absl::Status {
    const double start = Seconds();
    const auto context = static_cast<size_t>(options.context);
    if (auto last = runner.Prefill(*seq, ids.first(context), options.max_step_tokens); !last.ok()) return last.status();
    const double between = Seconds();
    const KvSequenceReport report = runner.cache().Report(*seq);
    cost->bytes_ratio = static_cast<double>(report.device_bytes) / static_cast<double>(report.full_bytes);
    const double decode = Seconds();
    for (int i = 0; i < options.tokens; ++i) {
      const int32_t id = ids[context + static_cast<size_t>(i)];
      if (auto row = runner.Decode(std::span(&*seq, 1), std::span(&id, 1)); !row.ok()) return row.status();
    }
    rounds->prefill.push_back(between - start);
    rounds->decode.push_back((Seconds() - decode) / options.tokens);
    return absl::OkStatus();
  };
  const absl::Status status = run();
  runner.cache().Close(*seq);
  return status;
}

std::vector<double> Ratios(const std::vector<double>& over, const std::vector<double>& under) {
  std::vector<double> ratios(over.size());
  for (size_t i = 0; i < over.size(); ++i) ratios[i] = over[i] / under[i];
  return ratios;
}

}  // namespace

absl::StatusOr<std::vector<PolicyCost>> BenchPolicies(LoadedModel& model, const BenchOptions& options,
                                                      std::span<const EvalPolicy> policies) {
  if (options.context <= 0) return absl::InvalidArgumentError("bench policies needs --context N with N > 0");
  auto runner = EvalRunner::Create(model, 1, options.context + options.tokens, options.max_step_tokens);
  if (!runner.ok()) return runner.status();
  PolicyContext context = (*runner)->cache().policy_context(options.context);
  context.allow_baselines = true;
  context.strategies = model.artifacts.strategies;
  context.profiles = model.artifacts.profiles;
  std::vector<std::unique_ptr<Policy>> made;
  std::vector<PolicyCost> costs;
  for (const EvalPolicy& policy : policies) {
    auto one = MakePolicy(policy.options, context);
    if (!one.ok()) return one.status();
    made.push_back(*std::move(one));
    costs.push_back({policy.label});
  }
  std::mt19937 random(7);
  std::vector<int32_t> ids(static_cast<size_t>(options.context + options.tokens));
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % static_cast<uint32_t>(model.config.vocab_size));

  std::vector<Rounds> rounds(policies.size());
  Rounds warm_up;
  if (absl::Status s = RunOnce(**runner, *made[0], ids, options, &warm_up, &costs[0]); !s.ok()) return s;
  for (int round = 0; round < options.repeat; ++round) {
    // Each round begins with another policy.
    for (size_t k = 0; k < made.size(); ++k) {
      const size_t i = (k + static_cast<size_t>(round)) % made.size();
      if (absl::Status s = RunOnce(**runner, *made[i], ids, options, &rounds[i], &costs[i]); !s.ok()) return s;
    }
  }
  for (size_t i = 0; i < costs.size(); ++i) {
    costs[i].prefill_ms = Median(rounds[i].prefill) * 1e3;
    costs[i].decode_us = Median(rounds[i].decode) * 1e6;
    costs[i].prefill_ratio = Median(Ratios(rounds[i].prefill, rounds[0].prefill));
    costs[i].decode_ratio = Median(Ratios(rounds[0].decode, rounds[i].decode));
  }
  return costs;
}

}  // namespace loupe
