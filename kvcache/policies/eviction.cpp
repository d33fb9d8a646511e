#include "kvcache/policies/eviction.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kvcache/policies/coded.h"

namespace loupe {

std::vector<int32_t> KeepBest(const ListView& list, const std::vector<float>& scores, const Protection& protection, int num_tokens,
                              int count) {
  const int entries = static_cast<int>(list.positions.size());
  std::vector<int32_t> kept;
  if (count >= entries) {
    kept.resize(static_cast<size_t>(entries));
    std::iota(kept.begin(), kept.end(), 0);
    return kept;
  }
  std::vector<int32_t> others;
  for (int32_t e = 0; e < entries; ++e) {
    (protection.Covers(list.positions[static_cast<size_t>(e)], num_tokens) ? kept : others).push_back(e);
  }
  const size_t more = static_cast<size_t>(std::clamp(count - static_cast<int>(kept.size()), 0, static_cast<int>(others.size())));
  const auto better = [&](int32_t a, int32_t b) {
    const float x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    return x != y ? x > y : list.positions[static_cast<size_t>(a)] < list.positions[static_cast<size_t>(b)];
  };
  if (more < others.size()) {
    std::nth_element(others.begin(), others.begin() + static_cast<std::ptrdiff_t>(more), others.end(), better);
    others.resize(more);
  }
  kept.insert(kept.end(), others.begin(), others.end());
  std::sort(kept.begin(), kept.end());
  return kept;
}

ListAction DropLowest(const ListView& list, const std::vector<float>& scores, const Protection& protection, int num_tokens, int excess) {
  ListAction action{list.layer, list.kv_head, {}, {}, true, {}};
  for (int dropped = 0; dropped < excess; ++dropped) {
    int lowest = -1;
    for (int e = 0; e < static_cast<int>(list.positions.size()); ++e) {
      const size_t at = static_cast<size_t>(e), best = static_cast<size_t>(std::max(lowest, 0));
      // Of equal scores the lower position stays.
      const bool lower = lowest < 0 || scores[at] < scores[best] ||
                         (scores[at] == scores[best] && list.positions[at] > list.positions[best]);
      if (!lower || protection.Covers(list.positions[at], num_tokens)) continue;
      if (std::find(action.drop.begin(), action.drop.end(), e) == action.drop.end()) lowest = e;
    }
    if (lowest < 0) break;
    action.drop.push_back(lowest);
  }
  std::sort(action.drop.begin(), action.drop.end());
  return action;
}

Signals EvictionPolicy::signals() const {
  Signals signals = scorer_->signals();
  if (budget_.decode == DecodeForm::kAppend) signals.window_goes_on = false;
  return signals;
}

int64_t EvictionPolicy::MaxBytes(int num_generated) const {
  if (!budget_.drops) return -1;
  const bool append = budget_.decode == DecodeForm::kAppend;
  const int grown = append ? num_generated : std::min(num_generated, budget_.interval);
  const int waiting = append ? std::min(num_generated, kCodeBatch + kCodeInterval) : 0;
  int64_t bytes = 0;
  for (int layer = 0; layer < context_.num_layers; ++layer) {
    const int64_t entries = std::min(LayerEntries(layer), context_.num_prompt + num_generated) + grown;
    // Lists of different lengths have at most one page each that is not full.
    bytes += context_.num_kv_heads * context_.MostBytes(equal_lists() ? entries : entries + kPageEntries, waiting);
  }
  return bytes;
}

void EvictionPolicy::AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const {
  LayerScores scores(static_cast<size_t>(sequence.num_kv_heads));
  for (int layer = 0; layer < sequence.num_layers(); ++layer) {
    scorer_->ScoreLayer(sequence, layer, &scores);
    SelectLayer(sequence, layer, scores, actions);
  }
}

void EvictionPolicy::AfterDecode(const SequenceView& sequence, std::vector<ListAction>* actions) const {
  LayerScores scores(static_cast<size_t>(sequence.num_kv_heads));
  for (int layer = 0; layer < sequence.num_layers(); ++layer) {
    const auto lists = sequence.layer(layer);
    const bool full = std::any_of(lists.begin(), lists.end(), [&](const ListView& list) {
      return static_cast<int>(list.positions.size()) > LayerEntries(layer);
    });
    if (!full) continue;
    scorer_->ScoreLayer(sequence, layer, &scores);
    if (budget_.decode != DecodeForm::kEachToken) {
      SelectLayer(sequence, layer, scores, actions);
      continue;
    }
    for (const ListView& list : lists) {
      const int excess = static_cast<int>(list.positions.size()) - LayerEntries(layer);
      if (excess <= 0) continue;
      ListAction action =
          DropLowest(list, scores[static_cast<size_t>(list.kv_head)], budget_.protection, sequence.num_tokens, excess);
      if (!action.drop.empty()) actions->push_back(std::move(action));
    }
  }
}

void EvictionPolicy::SelectLayer(const SequenceView& sequence, int layer, const LayerScores& scores,
                                 std::vector<ListAction>* actions) const {
  const int count = LayerEntries(layer);
  for (const ListView& list : sequence.layer(layer)) {
    if (static_cast<int>(list.positions.size()) <= count) continue;
    actions->push_back({list.layer, list.kv_head,
                        KeepBest(list, scores[static_cast<size_t>(list.kv_head)], budget_.protection, sequence.num_tokens, count)});
  }
}

ParamSpec DecodeParam(bool evicts_by_default) {
  return {"decode", "append: generated tokens come on top of the budget; evict: it holds for them too", evicts_by_default ? 1.0 : 0.0, 0, 0,
          false, {"append", "evict"}};
}

ParamSpec IntervalParam() { return {"interval", "with decode evict: generated tokens between two cuts", 64, 1, 4096}; }

}  // namespace loupe
