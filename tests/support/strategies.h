// Strategies for tests: uniform ones, which equal a primitive, and random ones, in which every list has its own pattern
// and budget.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvcache/policies/strategy.h"

namespace loupe::testing {

inline Strategy EmptyStrategy(int layers, int groups) {
  Strategy strategy;
  strategy.name = "test";
  strategy.model = "a test";
  strategy.weights_hash = "0";
  strategy.num_layers = layers, strategy.num_kv_heads = groups, strategy.head_dim = 16;
  return strategy;
}

// All lists keep the mean by the same pattern.
inline std::shared_ptr<const Strategy> UniformStrategy(int layers, int groups, const std::string& policy) {
  Strategy strategy = EmptyStrategy(layers, groups);
  strategy.patterns = {{policy, {}}};
  const size_t lists = static_cast<size_t>(layers * groups);
  for (const int mean : {32, 128, 1024}) {
    const StrategyPhase phase{std::vector<int>(lists, 0), std::vector<int>(lists, mean)};
    strategy.budgets.push_back({mean, phase, phase});
  }
  return std::make_shared<const Strategy>(std::move(strategy));
}

inline StrategyPhase RandomPhase(int lists, int patterns, int mean, std::mt19937* random) {
  StrategyPhase phase;
  std::vector<double> wanted;
  for (int i = 0; i < lists; ++i) {
    phase.patterns.push_back(static_cast<int>((*random)() % static_cast<unsigned>(patterns)));
    wanted.push_back(1 + static_cast<double>((*random)() % 100));
  }
  phase.entries = ShareEntries(wanted, int64_t{lists} * mean, std::max(1, mean / 4), 100 * mean);
  return phase;
}

inline std::shared_ptr<const Strategy> RandomStrategy(int layers, int groups, uint32_t seed = 1) {
  std::mt19937 random(seed);
  Strategy strategy = EmptyStrategy(layers, groups);
  for (const char* policy : {"streaming", "h2o", "tova", "snapkv", "chunkkv", "keydiff"})
    strategy.patterns.push_back({policy, {}});
  for (const int mean : {24, 64, 300}) {
    strategy.budgets.push_back(
        {mean, RandomPhase(layers * groups, 6, mean, &random), RandomPhase(layers * groups, 6, mean, &random)});
  }
  return std::make_shared<const Strategy>(std::move(strategy));
}

}  // namespace loupe::testing
