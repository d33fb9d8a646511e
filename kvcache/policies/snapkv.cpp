// SnapKV (Li et al., arXiv 2404.14469): each list keeps what the last rows of the prompt looked at.
#include "kvcache/policies/primitives.h"
#include "kvcache/policies/snap_score.h"

namespace loupe {
namespace {

std::unique_ptr<Scorer> MakeScorer(const KvOptions& options, const EvictionBudget& budget, const PolicyContext&) {
  return MakeSnapScorer(SnapOptionsOf(options), budget.protection.recent);
}

}  // namespace

PolicyRow SnapKvRow() {
  std::vector<ParamSpec> params = SnapParams();
  params.push_back(DecodeParam(false));
  params.push_back(IntervalParam());
  return {"snapkv", "keeps what the last rows of the prompt attend to", "the prompt's last query rows", false, params, nullptr,
          MakeScorer};
}

}  // namespace loupe
