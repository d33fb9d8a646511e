// TOVA (Oren et al., arXiv 2401.06104): what the last row attends to, mean over all heads of the layer, so that all lists of
// a layer keep the same positions.
#include "kvcache/policies/primitives.h"

namespace loupe {
namespace {

class LastRow final : public Scorer {
 public:
  explicit LastRow(bool evicts) : evicts_(evicts) {}

  Signals signals() const override { return {.window_query_rows = 1, .last_row_mass = true, .entry_probability = evicts_}; }

  void ScoreLayer(const SequenceView& sequence, int layer, LayerScores* scores) const override {
    const std::span<const ListView> lists = sequence.layer(layer);
    // Lists of a layer hold the same positions in the same order, since one score decides for all.
    std::vector<float> sum(lists[0].positions.size(), 0.f);
    float heads = 0;
    for (const ListView& list : lists) {
      if (list.entry_probability.empty()) {
        for (const std::span<const float> mass : list.last_row_mass) {
          for (size_t e = 0; e < sum.size(); ++e) sum[e] += mass[e];
        }
        heads += static_cast<float>(list.last_row_mass.size());
      } else {
        const size_t group = list.entry_probability.size() / sum.size();
        for (size_t i = 0; i < list.entry_probability.size(); ++i) sum[i / group] += list.entry_probability[i];
        heads += static_cast<float>(group);
      }
    }
    for (float& s : sum) s /= heads;
    for (std::vector<float>& score : *scores) score = sum;
  }

 private:
  bool evicts_;
};

std::unique_ptr<Scorer> MakeScorer(const KvOptions&, const EvictionBudget& budget, const PolicyContext&) {
  return std::make_unique<LastRow>(budget.decode != DecodeForm::kAppend);
}

}  // namespace

PolicyRow TovaRow() {
  return {"tova", "keeps what the last row attends to, the same in all heads of a layer", "the prompt's last query row", false,
          {DecodeParam(true)}, nullptr, MakeScorer, true};
}

}  // namespace loupe
