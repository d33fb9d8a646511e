#include "kvcache/policies/snap_score.h"

#include <algorithm>

#include "kvcache/policies/registry.h"

namespace loupe {
namespace {

class SnapScorer final : public Scorer {
 public:
  SnapScorer(const SnapOptions& options, int recent) : options_(options), recent_(recent) {}

  Signals signals() const override { return {.window_query_rows = options_.window, .window_goes_on = true, .window_mass = true}; }

  void ScoreLayer(const SequenceView& sequence, int layer, LayerScores* scores) const override {
    for (const ListView& list : sequence.layer(layer)) {
      std::vector<float>& score = (*scores)[static_cast<size_t>(list.kv_head)];
      score.assign(list.positions.size(), 0.f);
      const int end = sequence.num_tokens - recent_;
      size_t scored = 0;  // entries before the recent ones
      while (scored < list.positions.size() && list.positions[scored] < end) ++scored;
      std::vector<float> mean(scored);
      for (const std::span<const float> mass : list.window_mass) {
        for (size_t e = 0; e < scored; ++e) {
          const int rows = std::min(sequence.window_rows, sequence.num_tokens - list.positions[e]);
          mean[e] = mass[e] / static_cast<float>(rows);
        }
        AddPooled(mean, &score);
      }
      const float heads = static_cast<float>(list.window_mass.size());
      for (float& s : score) s /= heads;
    }
  }

 private:
  // Zeros beyond both ends are counted in the average, as in the authors' code.
  void AddPooled(const std::vector<float>& x, std::vector<float>* sums) const {
    const int n = static_cast<int>(x.size()), half = options_.kernel / 2;
    for (int i = 0; i < n; ++i) {
      const int from = std::max(0, i - half), to = std::min(n, i + half + 1);
      float pooled = 0;
      for (int j = from; j < to; ++j) {
        const float value = x[static_cast<size_t>(j)];
        pooled = options_.max_pool ? std::max(pooled, value) : pooled + value;
      }
      (*sums)[static_cast<size_t>(i)] += options_.max_pool ? pooled : pooled / static_cast<float>(options_.kernel);
    }
  }

  SnapOptions options_;
  int recent_;
};

}  // namespace

std::vector<ParamSpec> SnapParams() {
  return {{"window", "last query rows that score the entries", 64, 1, 512},
          {"kernel", "neighbours that are pooled, odd", 5, 1, 63},
          {"pool", "how neighbours are pooled", 0, 0, 0, false, {"avg", "max"}}};
}

SnapOptions SnapOptionsOf(const KvOptions& options) {
  // An even kernel has no middle; the next odd one has.
  return {static_cast<int>(NumberParam(options, "window")), static_cast<int>(NumberParam(options, "kernel")) | 1,
          WordParam(options, "pool") == "max"};
}

std::unique_ptr<Scorer> MakeSnapScorer(const SnapOptions& options, int recent) { return std::make_unique<SnapScorer>(options, recent); }

}  // namespace loupe
