// PyramidKV (Cai et al., arXiv 2406.02069): SnapKV's score, lower layers keep more than upper ones. With mean b, window w,
// prompt N, L layers: bmin = b / beta, bmax = 2 b - bmin; if bmax > N - w: bmax = N - w, bmin = 2 b - bmax; layer l keeps
// round(bmax - l (bmax - bmin) / (L - 1)), unless N >= bmax >= bmin >= w is broken, when all keep b.
#include <algorithm>
#include <cmath>

#include "kvcache/policies/primitives.h"
#include "kvcache/policies/snap_score.h"

namespace loupe {
namespace {

// Entries a list by layer.
std::vector<int> Pyramid(const EvictionBudget& budget, const PolicyContext& context, int window, double beta) {
  const double mean = budget.total_bytes > 0
                          ? context.EntriesIn(static_cast<double>(budget.total_bytes) / context.num_lists()) - budget.interval
                          : budget.entries;
  const double prompt = context.num_prompt;
  double low = mean / beta, high = 2 * mean - low;
  if (high >= prompt - window) {
    high = prompt - window;
    low = 2 * mean - high;
  }
  const bool holds = prompt >= high && high >= low && low >= window && low >= budget.protection.Count(context.num_prompt);
  std::vector<int> entries(static_cast<size_t>(context.num_layers), budget.entries);
  const int steps = std::max(1, context.num_layers - 1);
  for (int layer = 0; holds && layer < context.num_layers; ++layer) {
    int count = static_cast<int>(std::nearbyint(high - layer * (high - low) / steps));
    if (budget.total_bytes > 0) {
      count = context.MaxEntries(static_cast<int64_t>(context.EntryBytesOf(count + budget.interval))) - budget.interval;
    }
    entries[static_cast<size_t>(layer)] = std::max(count, 1);
  }
  return entries;
}

class PyramidKv final : public EvictionPolicy {
 public:
  PyramidKv(std::string_view name, const EvictionBudget& budget, const PolicyContext& context, std::unique_ptr<Scorer> scorer, int window,
            double beta)
      : EvictionPolicy(name, budget, context, std::move(scorer)), entries_(Pyramid(budget, context, window, beta)) {}

 protected:
  int LayerEntries(int layer) const override { return entries_[static_cast<size_t>(layer)]; }

 private:
  std::vector<int> entries_;
};

absl::StatusOr<std::unique_ptr<Policy>> Make(const KvOptions& options, const PolicyContext& context) {
  const SnapOptions snap = SnapOptionsOf(options);
  const auto scorer = [&](const EvictionBudget& budget) { return MakeSnapScorer(snap, budget.protection.recent); };
  return MakeEviction<PyramidKv>("pyramidkv", options, context, DecodeForm::kInterval, scorer, snap.window, NumberParam(options, "beta"));
}

}  // namespace

PolicyRow PyramidKvRow() {
  std::vector<ParamSpec> params = SnapParams();
  params.push_back({"beta", "how steep the pyramid is: the top layer keeps 1/beta of the mean", 20, 1, 1000, false});
  params.push_back(DecodeParam(false));
  params.push_back(IntervalParam());
  return {"pyramidkv", "snapkv's score, lower layers keep more than upper ones", "the prompt's last query rows", false, params, Make};
}

}  // namespace loupe
