// ChunkKV (Liu et al., arXiv 2502.00299) over SnapKV's score: whole chunks of consecutive tokens stay or go, the same in
// all lists of a layer. A chunk's score is the mean over its tokens of the sum over heads. The budget is exact: the last
// chunk that comes in gives its best tokens.
#include <algorithm>
#include <numeric>

#include "kvcache/policies/primitives.h"
#include "kvcache/policies/snap_score.h"

namespace loupe {
namespace {

class ChunkScorer final : public Scorer {
 public:
  ChunkScorer(std::unique_ptr<Scorer> tokens, int chunk, int recent) : tokens_(std::move(tokens)), chunk_(chunk), recent_(recent) {}

  Signals signals() const override { return tokens_->signals(); }

  // Rank of the chunk first, the token's own score within it. All lists of a layer hold the same positions, since nothing
  // but this scorer has chosen them.
  void ScoreLayer(const SequenceView& sequence, int layer, LayerScores* scores) const override {
    tokens_->ScoreLayer(sequence, layer, scores);
    const std::vector<int32_t> positions(sequence.layer(layer)[0].positions.begin(), sequence.layer(layer)[0].positions.end());
    const size_t entries = positions.size();
    std::vector<double> sums(entries, 0.0);
    double highest = 0;
    for (const std::vector<float>& score : *scores) {
      for (size_t e = 0; e < entries; ++e) {
        sums[e] += double{score[e]};
        highest = std::max(highest, double{score[e]});
      }
    }
    // Recent tokens count as above all others, so that the chunk they lie in stays together.
    for (size_t e = 0; e < entries; ++e) {
      if (positions[e] >= sequence.num_tokens - recent_) sums[e] = (highest + 1) * static_cast<double>(scores->size());
    }
    const std::vector<int> rank = RankChunks(positions, sums);
    const std::vector<int> within = RankTokens(sums);
    const int num_chunks = rank.empty() ? 0 : 1 + *std::max_element(rank.begin(), rank.end());
    for (std::vector<float>& score : *scores) {
      for (size_t e = 0; e < entries; ++e) {
        score[e] = static_cast<float>(num_chunks - rank[e]) + static_cast<float>(entries - static_cast<size_t>(within[e])) /
                                                                  static_cast<float>(entries + 1);
      }
    }
  }

 private:
  // Per entry: the rank of its chunk, 0 the best. Of equal chunks the first stays.
  std::vector<int> RankChunks(const std::vector<int32_t>& positions, const std::vector<double>& sums) const {
    struct Chunk {
      int number;
      double sum;
      int count;
      double mean() const { return sum / count; }
    };
    std::vector<Chunk> chunks;
    std::vector<int> chunk_of(positions.size());
    for (size_t e = 0; e < positions.size(); ++e) {
      const int number = positions[e] / chunk_;
      if (chunks.empty() || chunks.back().number != number) chunks.push_back({number, 0, 0});
      chunks.back().sum += sums[e];
      ++chunks.back().count;
      chunk_of[e] = static_cast<int>(chunks.size()) - 1;
    }
    std::vector<int> order(chunks.size()), rank(chunks.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return chunks[static_cast<size_t>(a)].mean() > chunks[static_cast<size_t>(b)].mean();
    });
    for (size_t i = 0; i < order.size(); ++i) rank[static_cast<size_t>(order[i])] = static_cast<int>(i);
    for (int& c : chunk_of) c = rank[static_cast<size_t>(c)];
    return chunk_of;
  }
  static std::vector<int> RankTokens(const std::vector<double>& sums) {
    std::vector<int> order(sums.size()), rank(sums.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return sums[static_cast<size_t>(a)] > sums[static_cast<size_t>(b)]; });
    for (size_t i = 0; i < order.size(); ++i) rank[static_cast<size_t>(order[i])] = static_cast<int>(i);
    return rank;
  }

  std::unique_ptr<Scorer> tokens_;
  int chunk_;
  int recent_;
};

std::unique_ptr<Scorer> MakeScorer(const KvOptions& options, const EvictionBudget& budget, const PolicyContext&) {
  const int recent = budget.protection.recent;
  return std::make_unique<ChunkScorer>(MakeSnapScorer(SnapOptionsOf(options), recent), static_cast<int>(NumberParam(options, "chunk")),
                                       recent);
}

}  // namespace

PolicyRow ChunkKvRow() {
  std::vector<ParamSpec> params = SnapParams();
  params.push_back({"chunk", "tokens of a chunk", 20, 1, 512});
  params.push_back(DecodeParam(false));
  params.push_back(IntervalParam());
  return {"chunkkv", "snapkv's score, whole chunks of tokens stay or go", "the prompt's last query rows", false, params, nullptr,
          MakeScorer};
}

}  // namespace loupe
