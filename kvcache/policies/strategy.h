// A strategy of PolyKV (Fei, Kalnis, arXiv 2606.15157): which pattern decides what each list keeps and how many entries
// it keeps, calibrated once for a model and fixed at run time. Pure data, immutable once loaded, any thread.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kvcache/policies/options.h"
#include "kvcache/policies/registry.h"

namespace loupe {

// A primitive whose score ranks the entries of a list, with its parameters.
struct StrategyPattern {
  std::string policy;
  std::map<std::string, KvParam> params;
};

// What the lists of a model do in one phase, [layers * G]: an index into the patterns, and entries.
struct StrategyPhase {
  std::vector<int> patterns;
  std::vector<int> entries;
};

// At one mean budget: the entries of a phase sum to lists * mean.
struct StrategyBudget {
  int mean = 0;
  StrategyPhase prefill, decode;
};

struct Strategy {
  std::string name;          // by which requests ask for it
  std::string fingerprint;   // of the file's text
  std::string model;         // architecture and name, for people
  std::string weights_hash;  // of the model that it was made for
  int num_layers = 0, num_kv_heads = 0, head_dim = 0;
  std::vector<StrategyPattern> patterns;
  std::vector<StrategyBudget> budgets;  // means ascend

  int num_lists() const { return num_layers * num_kv_heads; }
};

// Whether the numbers fit each other and the patterns can be. INVALID_ARGUMENT: "<field>: <what is wrong, with the
// numbers>".
absl::Status CheckStrategy(const Strategy& strategy);

// Real-valued entries of every list at a mean that lies between the strategy's: budgets are interpolated, patterns are
// those of the nearest mean (by ratio). Outside the strategy's range the nearest budgets are scaled.
struct StrategyShares {
  std::vector<int> patterns;
  std::vector<double> entries;
};
StrategyShares SharesAt(std::span<const StrategyBudget> budgets, bool decode, double mean);

// Whole numbers of entries near `wanted`, each in [least, most] (least <= most), that sum to `total` exactly, or to the
// nearest sum that the limits allow. Fractions are settled by largest remainder, ties go to the lower index.
std::vector<int> ShareEntries(std::span<const double> wanted, int64_t total, int least, int most);

// Lengths near `wanted` whose pages take at most `bytes` together. Lists that want the same get the same. The caller
// has seen to it that `least` entries a list fit.
std::vector<int> ShareBytes(std::span<const double> wanted, int64_t bytes, int least, int most,
                            const PolicyContext& context);

}  // namespace loupe
