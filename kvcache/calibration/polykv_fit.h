// From what calibration has measured to a strategy: a pattern and a budget for every list at a mean budget. Pure
// arithmetic, deterministic, any thread.
//
// Joint (the default): a unit (a kv head's list, or all lists of a layer) costs at budget b the least that its patterns
// cost there; the lower convex hull of that curve and one price over all units give the budgets, and largest remainder
// makes them whole. Exact up to the hull. Paper: PolyKV's own rule (Fei, Kalnis, arXiv 2606.15157): the pattern of best
// preference, and a budget in proportion to a sensitivity.
#pragma once

#include <string>
#include <vector>

#include "kvcache/policies/strategy.h"

namespace loupe {

// Numbers of [patterns][budgets][lists].
struct PatternTable {
  int patterns = 0, budgets = 0, lists = 0;
  std::vector<double> values;

  PatternTable() = default;
  PatternTable(int num_patterns, int num_budgets, int num_lists)
      : patterns(num_patterns),
        budgets(num_budgets),
        lists(num_lists),
        values(static_cast<size_t>(num_patterns) * static_cast<size_t>(num_budgets) * static_cast<size_t>(num_lists)) {}
  double& at(int pattern, int budget, int list) {
    return values[static_cast<size_t>((pattern * budgets + budget) * lists + list)];
  }
  double at(int pattern, int budget, int list) const {
    return values[static_cast<size_t>((pattern * budgets + budget) * lists + list)];
  }
};

struct FitInput {
  int num_layers = 0, num_kv_heads = 0;
  std::vector<int> budgets;  // of the tables, ascending, at least two
  int full = 0;              // entries at which nothing is lost, above all budgets
  // What it costs to compress one list, in nats of KL: a table a prompt of running text, a table an item with a needle.
  std::vector<PatternTable> text, needles;
  // Cosine between attention's output and that of the full cache: means over prompts and over items. Empty without
  // items.
  PatternTable cosine, needle_cosine;
  std::vector<double> needle_kl;  // [lists] what compressing the list alone costs the answers; empty without items
  std::vector<double> entropy;    // [lists] of attention, of its largest possible value
  std::vector<std::vector<double>>
      nll;  // [layers][patterns] change when only that layer is compressed; NaN: not measured
};

enum class FitMode : uint8_t { kJoint, kPaper };
enum class FitVary : uint8_t { kBoth, kPattern, kBudget };

struct FitOptions {
  FitMode mode = FitMode::kJoint;
  FitVary vary = FitVary::kBoth;  // what may differ between units; the other is the best uniform choice
  bool per_head = true;           // units are lists; false: layers
  double needle_weight = 0.1;     // of needles beside text in the cost
  // The units that carry this share of what the answers lose, at most a fifth of all, never get less than the mean.
  double pin_share = 0.8;
  bool prefer_by_nll = false;       // paper: pattern by change of NLL, else by cosine
  bool sensitivity_by_nll = false;  // paper: budget by change of NLL, else by entropy
  int snap_pattern = -1;            // paper: the pattern of pinned units; -1: as the others
};

// Entries that every list keeps at a mean budget: what is protected by default, and a quarter of the mean.
int LeastEntries(int mean);

// The pattern that costs least if all lists take it with `mean` entries each.
int BestUniformPattern(const FitInput& input, int mean, const FitOptions& options);

// Sums to lists * mean exactly; every list gets at least LeastEntries(mean).
StrategyPhase FitPhase(const FitInput& input, int mean, const FitOptions& options);

// Expected cost of a phase, in nats: the sum over lists, as the joint mode sees it.
double ExpectedCost(const FitInput& input, const StrategyPhase& phase, const FitOptions& options);

}  // namespace loupe
