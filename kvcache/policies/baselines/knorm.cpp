// Keeps the keys of smallest norm (Devoto et al., arXiv 2406.11430). For comparison only.
#include "kvcache/policies/primitives.h"

namespace loupe {
namespace {

class SmallNorm final : public Scorer {
 public:
  Signals signals() const override { return {.key_norms = true}; }
  void ScoreLayer(const SequenceView& sequence, int layer, LayerScores* scores) const override {
    for (const ListView& list : sequence.layer(layer)) {
      std::vector<float>& score = (*scores)[static_cast<size_t>(list.kv_head)];
      score.assign(list.key_norms.begin(), list.key_norms.end());
      for (float& s : score) s = -s;
    }
  }
};

std::unique_ptr<Scorer> MakeScorer(const KvOptions&, const EvictionBudget&, const PolicyContext&) { return std::make_unique<SmallNorm>(); }

}  // namespace

PolicyRow KnormRow() {
  return {"knorm", "baseline: keeps the keys of smallest norm", "the keys alone", true, {DecodeParam(false), IntervalParam()}, nullptr,
          MakeScorer};
}

}  // namespace loupe
