// The rows of the primitives, one file each, and what their make functions share. Included by those files and registry.cpp.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "kvcache/policies/coded.h"
#include "kvcache/policies/eviction.h"
#include "kvcache/policies/registry.h"

namespace loupe {

PolicyRow FullRow();
PolicyRow StreamingRow();
PolicyRow H2oRow();
PolicyRow TovaRow();
PolicyRow SnapKvRow();
PolicyRow AdaKvRow();
PolicyRow PyramidKvRow();
PolicyRow ChunkKvRow();
PolicyRow KeyDiffRow();
PolicyRow PolyKvRow();
PolicyRow SphericalRow();
PolicyRow KnormRow();   // baselines/
PolicyRow RandomRow();  // baselines/

// The budget of `options` for a primitive that drops an entry a token when it evicts, or cuts its lists back after every
// so many tokens (parameter `interval`).
inline absl::StatusOr<EvictionBudget> PlanEviction(const KvOptions& options, const PolicyContext& context, DecodeForm evict) {
  const bool evicts = WordParam(options, "decode") == "evict";
  int interval = evict == DecodeForm::kEachToken ? 1 : static_cast<int>(NumberParam(options, "interval"));
  // A slot of a coded page is no place for a new entry: such lists are cut now and then.
  if (context.coded() && evict == DecodeForm::kEachToken) evict = DecodeForm::kInterval, interval = kCodeInterval;
  return PlanBudget(options, context, evicts ? evict : DecodeForm::kAppend, interval);
}

// `make_scorer` is given the budget. `Kind` is EvictionPolicy or a class whose constructor takes `more` after its arguments.
template <class Kind = EvictionPolicy, class MakeScorer, class... More>
absl::StatusOr<std::unique_ptr<Policy>> MakeEviction(std::string_view name, const KvOptions& options, const PolicyContext& context,
                                                     DecodeForm evict, const MakeScorer& make_scorer, More... more) {
  auto budget = PlanEviction(options, context, evict);
  if (!budget.ok()) return budget.status();
  std::unique_ptr<Scorer> scorer = make_scorer(*budget);
  PolicyContext planned = context;
  planned.landing_entries = budget->landing_entries;
  return std::unique_ptr<Policy>(new Kind(name, *std::move(budget), planned, std::move(scorer), more...));
}

}  // namespace loupe
