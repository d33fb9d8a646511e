// StreamingLLM (Xiao et al., arXiv 2309.17453): the first tokens and the last ones. Keys keep their original positions; the
// paper moves them together, which would need a rotation of every kept key at every step.
#include "kvcache/policies/primitives.h"

namespace loupe {
namespace {

class Recency final : public Scorer {
 public:
  void ScoreLayer(const SequenceView& sequence, int layer, LayerScores* scores) const override {
    for (const ListView& list : sequence.layer(layer)) {
      (*scores)[static_cast<size_t>(list.kv_head)].assign(list.positions.begin(), list.positions.end());
    }
  }
};

std::unique_ptr<Scorer> MakeScorer(const KvOptions&, const EvictionBudget&, const PolicyContext&) { return std::make_unique<Recency>(); }

}  // namespace

PolicyRow StreamingRow() {
  return {"streaming", "keeps the first tokens (protect.sinks) and the last ones", "nothing", false, {DecodeParam(true)}, nullptr,
          MakeScorer, true};
}

}  // namespace loupe
