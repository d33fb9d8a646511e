// H2O (Zhang et al., arXiv 2306.14048): the entries that got most attention so far. By default a sum is divided by the
// number of rows that can see the entry, which takes away the head start of early tokens; `sums` raw is the paper's. Rows
// of the prompt are sampled, since their sums are not what attention computes anyway: every n-th, and all of the last,
// which alone see the last entries and tell what comes next best (as SnapKV's window does). `stride` 1 takes all.
#include <algorithm>
#include <vector>

#include "kvcache/policies/primitives.h"

namespace loupe {
namespace {

class HeavyHitter final : public Scorer {
 public:
  HeavyHitter(SampledRows rows, int num_prompt, bool normalised, bool goes_on)
      : rows_(rows), normalised_(normalised), goes_on_(goes_on) {
    for (int position = 0; position < num_prompt; ++position) below_.push_back(rows_.Below(position));
  }

  Signals signals() const override {
    return {.columns = rows_, .columns_go_on = goes_on_, .entry_probability = goes_on_};
  }

  void ScoreLayer(const SequenceView& sequence, int layer, LayerScores* scores) const override {
    for (const ListView& list : sequence.layer(layer)) {
      std::vector<float>& score = (*scores)[static_cast<size_t>(list.kv_head)];
      score.assign(list.positions.size(), 0.f);
      for (const std::span<const float> sums : list.column_sums) {
        for (size_t e = 0; e < score.size(); ++e) score[e] += sums[e];
      }
      const float heads = static_cast<float>(list.column_sums.size());
      if (!normalised_) {
        for (float& x : score) x /= heads;
        continue;
      }
      for (size_t e = 0; e < score.size(); ++e) {
        const int rows = RowsThatSee(sequence, list.positions[e]);
        // Nobody has looked yet: worth as much as an entry can be.
        score[e] = rows > 0 ? score[e] / (heads * static_cast<float>(rows)) : 1.f;
      }
    }
  }

 private:
  int RowsThatSee(const SequenceView& sequence, int position) const {
    const size_t at = static_cast<size_t>(position);
    const int prompt = at < below_.size() ? rows_.Below(sequence.num_prompt) - below_[at] : 0;
    return prompt + (goes_on_ ? sequence.num_tokens - std::max(position, sequence.num_prompt) : 0);
  }

  SampledRows rows_;
  std::vector<int> below_;  // by position: when answers evict, every entry is scored again for every token
  bool normalised_, goes_on_;
};

std::unique_ptr<Scorer> MakeScorer(const KvOptions& options, const EvictionBudget& budget, const PolicyContext& context) {
  const SampledRows rows{.stride = static_cast<int>(NumberParam(options, "stride")),
                         .dense_from = std::max(0, context.num_prompt - static_cast<int>(NumberParam(options, "tail")))};
  return std::make_unique<HeavyHitter>(rows, context.num_prompt, WordParam(options, "sums") == "normalised",
                                       budget.decode != DecodeForm::kAppend);
}

}  // namespace

PolicyRow H2oRow() {
  return {"h2o",
          "keeps what all rows together attended to most",
          "column sums of attention",
          false,
          {{"sums", "normalised: over the rows that can see the entry; raw: the paper's sums", 0, 0, 0, false, {"normalised", "raw"}},
           {"stride", "every so many prompt rows are summed; 1: all of them", 64, 1, 64},
           {"tail", "the last so many prompt rows are summed in any case", 128, 0, 1024},
           DecodeParam(true)},
          nullptr,
          MakeScorer,
          true};
}

}  // namespace loupe
