// Keeps entries at random, differently in each list: what any other policy must beat. For comparison only.
#include <cstdint>

#include "kvcache/policies/primitives.h"

namespace loupe {
namespace {

// The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Dice final : public Scorer {
 public:
  explicit Dice(uint64_t seed) : seed_(seed) {}
  void ScoreLayer(const SequenceView& sequence, int layer, LayerScores* scores) const override {
    for (const ListView& list : sequence.layer(layer)) {
      std::vector<float>& score = (*scores)[static_cast<size_t>(list.kv_head)];
      score.resize(list.positions.size());
      const uint64_t number = static_cast<uint64_t>(layer) * 4096 + static_cast<uint64_t>(list.kv_head);
      const uint64_t of_list = Mix(Mix(seed_ + 0x9e3779b97f4a7c15u) + number);
      for (size_t e = 0; e < score.size(); ++e) {
        score[e] = static_cast<float>(Mix(of_list + static_cast<uint64_t>(list.positions[e])) >> 40);
      }
    }
  }

 private:
  uint64_t seed_;
};

std::unique_ptr<Scorer> MakeScorer(const KvOptions& options, const EvictionBudget&, const PolicyContext&) {
  return std::make_unique<Dice>(static_cast<uint64_t>(NumberParam(options, "seed")));
}

}  // namespace

PolicyRow RandomRow() {
  return {"random", "baseline: keeps entries at random", "nothing", true,
          {{"seed", "of the choice", 0, 0, 4294967295.0}, DecodeParam(false), IntervalParam()}, nullptr, MakeScorer};
}

}  // namespace loupe
