// KeyDiff (Park et al., arXiv 2504.15364): keeps the keys that differ most from the mean direction of all. Needs no queries.
#include "kvcache/policies/primitives.h"

namespace loupe {
namespace {

class Difference final : public Scorer {
 public:
  Signals signals() const override { return {.key_alignment = true}; }
  void ScoreLayer(const SequenceView& sequence, int layer, LayerScores* scores) const override {
    for (const ListView& list : sequence.layer(layer)) {
      std::vector<float>& score = (*scores)[static_cast<size_t>(list.kv_head)];
      score.assign(list.key_alignment.begin(), list.key_alignment.end());
      for (float& s : score) s = -s;
    }
  }
};

std::unique_ptr<Scorer> MakeScorer(const KvOptions&, const EvictionBudget&, const PolicyContext&) { return std::make_unique<Difference>(); }

}  // namespace

PolicyRow KeyDiffRow() {
  return {"keydiff", "keeps the keys that differ most from the mean direction", "the keys alone", false,
          {DecodeParam(false), IntervalParam()}, nullptr, MakeScorer};
}

}  // namespace loupe
