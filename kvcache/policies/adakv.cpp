// Ada-KV (Feng et al., arXiv 2407.11550) over SnapKV's score: the lists of a layer share one budget. Each keeps a floor of
// its best entries; the rest of the budget goes to the best entries of the whole layer. The sum over a layer is exact.
#include <algorithm>

#include "kvcache/policies/primitives.h"
#include "kvcache/policies/snap_score.h"

namespace loupe {
namespace {

class AdaKv final : public EvictionPolicy {
 public:
  AdaKv(std::string_view name, EvictionBudget budget, const PolicyContext& context, std::unique_ptr<Scorer> scorer, double floor)
      : EvictionPolicy(name, std::move(budget), context, std::move(scorer)), floor_(floor) {}

 protected:
  bool equal_lists() const override { return false; }
  void SelectLayer(const SequenceView& sequence, int layer, const LayerScores& scores, std::vector<ListAction>* actions) const override;

 private:
  // An entry that may stay.
  struct Candidate {
    float score;
    int32_t position;
    int32_t list;
    int32_t entry;
    bool Before(const Candidate& other) const {
      return score != other.score ? score > other.score : position != other.position ? position < other.position : list < other.list;
    }
  };

  double floor_;
};

void AdaKv::SelectLayer(const SequenceView& sequence, int layer, const LayerScores& scores, std::vector<ListAction>* actions) const {
  const std::span<const ListView> lists = sequence.layer(layer);
  const int64_t bytes = budget().total_bytes / context().num_layers;
  const int num_lists = static_cast<int>(lists.size()), interval = budget().interval;
  int entries_left = budget().entries * num_lists;
  // A budget in bytes may use the room that page borders would waste if all lists were of one length. What is appended
  // until the next cut is inside.
  if (bytes > 0) {
    entries_left = static_cast<int>(context().EntriesIn(static_cast<double>(bytes) / num_lists) * num_lists) - num_lists * interval;
  }
  int64_t bytes_left = bytes > 0 ? bytes - num_lists * context().ListBytes(interval) : INT64_MAX;
  std::vector<std::vector<int32_t>> kept(lists.size());
  std::vector<Candidate> candidates;
  // Takes an entry into its list if the budget has the entry and, at a page's border, the page.
  const auto take = [&](size_t list, int32_t entry) {
    const int count = static_cast<int>(kept[list].size()) + interval;
    const int64_t more = context().ListBytes(count + 1) - context().ListBytes(count);
    if (entries_left < 1 || more > bytes_left) return;
    kept[list].push_back(entry);
    --entries_left;
    bytes_left -= more;
  };
  for (size_t g = 0; g < lists.size(); ++g) {
    // The best of a list by themselves: what is protected, and then the floor.
    const int floor = std::max(1, static_cast<int>(floor_ * budget().entries));
    const int protected_count = static_cast<int>(std::count_if(lists[g].positions.begin(), lists[g].positions.end(), [&](int32_t p) {
      return budget().protection.Covers(p, sequence.num_tokens);
    }));
    const std::vector<int32_t> safe =
        KeepBest(lists[g], scores[g], budget().protection, sequence.num_tokens, std::max(floor, protected_count));
    for (const int32_t entry : safe) take(g, entry);
    size_t next = 0;
    for (int32_t e = 0; e < static_cast<int32_t>(lists[g].positions.size()); ++e) {
      if (next < safe.size() && safe[next] == e) {
        ++next;
        continue;
      }
      candidates.push_back({scores[g][static_cast<size_t>(e)], lists[g].positions[static_cast<size_t>(e)], static_cast<int32_t>(g), e});
    }
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) { return a.Before(b); });
  for (const Candidate& c : candidates) take(static_cast<size_t>(c.list), c.entry);
  for (size_t g = 0; g < lists.size(); ++g) {
    std::sort(kept[g].begin(), kept[g].end());
    if (kept[g].size() < lists[g].positions.size()) actions->push_back({lists[g].layer, lists[g].kv_head, std::move(kept[g])});
  }
}

absl::StatusOr<std::unique_ptr<Policy>> Make(const KvOptions& options, const PolicyContext& context) {
  const auto scorer = [&](const EvictionBudget& budget) { return MakeSnapScorer(SnapOptionsOf(options), budget.protection.recent); };
  return MakeEviction<AdaKv>("adakv", options, context, DecodeForm::kInterval, scorer, NumberParam(options, "floor"));
}

}  // namespace

PolicyRow AdaKvRow() {
  std::vector<ParamSpec> params = SnapParams();
  params.push_back({"floor", "share of the mean budget that every list keeps of its own best", 0.2, 0, 1, false});
  params.push_back(DecodeParam(false));
  params.push_back(IntervalParam());
  return {"adakv", "snapkv's score, the budget of a layer shared among its heads", "the prompt's last query rows", false, params, Make};
}

}  // namespace loupe
