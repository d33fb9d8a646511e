// PolyKV (Fei, Kalnis, arXiv 2606.15157): a calibrated strategy says which primitive's score ranks a list's entries and
// how many it keeps, by layer and kv head, for the prompt and for generated tokens. The sum over all lists is exact.
// Adaptive sharing (adakv, pyramidkv) is no pattern here: a strategy shares the budget out itself.
#include "kvcache/policies/strategy.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/check.h"
#include "kvcache/policies/primitives.h"

namespace loupe {
namespace {

struct Phase {
  std::vector<int> patterns;  // [lists]
  std::vector<int> entries;   // [lists]
};

class PolyKv final : public Policy {
 public:
  PolyKv(EvictionBudget budget, const PolicyContext& context) : budget_(std::move(budget)), context_(context) {}

  // Lists' patterns and entries, and a scorer for each pattern that is used; the others are null.
  void Set(Phase prefill, Phase decode, std::vector<std::unique_ptr<Scorer>> scorers) {
    prefill_ = std::move(prefill), decode_ = std::move(decode), scorers_ = std::move(scorers);
  }

  std::string_view name() const override { return "polykv"; }
  bool keeps_everything() const override { return !budget_.drops; }
  int decode_interval() const override { return budget_.interval; }
  Signals signals() const override;
  int64_t MaxBytes(int num_generated) const override;
  void AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const override {
    Act(sequence, prefill_, false, actions);
  }
  void AfterDecode(const SequenceView& sequence, std::vector<ListAction>* actions) const override {
    Act(sequence, decode_, budget_.decode == DecodeForm::kEachToken, actions);
  }

 private:
  void Act(const SequenceView& sequence, const Phase& phase, bool overwrite, std::vector<ListAction>* actions) const;
  void ScoreLayer(const SequenceView& sequence, int layer, const Scorer& scorer, LayerScores* scores) const;

  EvictionBudget budget_;
  PolicyContext context_;
  Phase prefill_, decode_;
  std::vector<std::unique_ptr<Scorer>> scorers_;
};

Signals PolyKv::signals() const {
  Signals all;
  for (const auto& scorer : scorers_) {
    if (!scorer) continue;
    const Signals one = scorer->signals();
    all.window_query_rows = std::max(all.window_query_rows, one.window_query_rows);
    if (one.columns.stride > 0) all.columns = one.columns;  // the same in all (CheckStrategy)
    all.window_goes_on |= one.window_goes_on && budget_.decode != DecodeForm::kAppend;
    all.window_mass |= one.window_mass, all.last_row_mass |= one.last_row_mass, all.columns_go_on |= one.columns_go_on;
    all.key_norms |= one.key_norms, all.key_alignment |= one.key_alignment,
        all.entry_probability |= one.entry_probability;
  }
  return all;
}

int64_t PolyKv::MaxBytes(int num_generated) const {
  if (!budget_.drops) return -1;
  const bool append = budget_.decode == DecodeForm::kAppend;
  const int64_t grown = append ? num_generated : std::min(num_generated, budget_.interval);
  const int64_t waiting = append ? std::min(num_generated, kCodeBatch + kCodeInterval) : 0;
  // Before the first cut a list holds what the prompt left, afterwards what its decode form says.
  int64_t bytes[2] = {0, 0};
  for (size_t i = 0; i < prefill_.entries.size(); ++i) {
    const int64_t after_prompt = std::min(prefill_.entries[i], context_.num_prompt) + grown;
    const int64_t later = std::min<int64_t>(decode_.entries[i], context_.num_prompt + num_generated) + grown;
    bytes[0] += context_.MostBytes(after_prompt, waiting);
    bytes[1] += append ? 0 : context_.MostBytes(later, waiting);
  }
  return std::max(bytes[0], bytes[1]);
}

// Primitives that rank a layer's lists together are asked for each list by itself once its lists hold different
// positions.
void PolyKv::ScoreLayer(const SequenceView& sequence, int layer, const Scorer& scorer, LayerScores* scores) const {
  const std::span<const ListView> lists = sequence.layer(layer);
  scores->resize(lists.size());
  const bool alike = std::all_of(lists.begin(), lists.end(), [&](const ListView& list) {
    return std::equal(list.positions.begin(), list.positions.end(), lists[0].positions.begin(),
                      lists[0].positions.end());
  });
  if (alike) {
    scorer.ScoreLayer(sequence, layer, scores);
    return;
  }
  LayerScores one(1);
  for (size_t g = 0; g < lists.size(); ++g) {
    ListView list = lists[g];
    list.kv_head = 0;
    SequenceView alone = sequence;
    alone.num_kv_heads = 1;
    alone.lists = std::span(&list, 1);
    scorer.ScoreLayer(alone, 0, &one);
    (*scores)[g] = one[0];
  }
}

void PolyKv::Act(const SequenceView& sequence, const Phase& phase, bool overwrite,
                 std::vector<ListAction>* actions) const {
  std::vector<LayerScores> scores(scorers_.size());
  for (int layer = 0; layer < sequence.num_layers(); ++layer) {
    for (LayerScores& of_pattern : scores) of_pattern.clear();
    for (const ListView& list : sequence.layer(layer)) {
      const size_t at = static_cast<size_t>(layer * sequence.num_kv_heads + list.kv_head);
      const int excess = static_cast<int>(list.positions.size()) - phase.entries[at];
      if (excess <= 0) continue;
      const size_t pattern = static_cast<size_t>(phase.patterns[at]);
      if (scores[pattern].empty()) ScoreLayer(sequence, layer, *scorers_[pattern], &scores[pattern]);
      const std::vector<float>& score = scores[pattern][static_cast<size_t>(list.kv_head)];
      if (!overwrite) {
        actions->push_back({list.layer, list.kv_head,
                            KeepBest(list, score, budget_.protection, sequence.num_tokens, phase.entries[at])});
      } else if (ListAction action = DropLowest(list, score, budget_.protection, sequence.num_tokens, excess);
                 !action.drop.empty()) {
        actions->push_back(std::move(action));
      }
    }
  }
}

absl::StatusOr<std::shared_ptr<const Strategy>> Choose(const KvOptions& options, const PolicyContext& context) {
  std::vector<std::string> names;
  for (const auto& strategy : context.strategies) {
    if (options.strategy.empty() || strategy->name == options.strategy) return strategy;
    names.push_back(strategy->name);
  }
  if (names.empty()) {
    return absl::InvalidArgumentError(
        "kv.policy: polykv needs a strategy of this model and none is loaded; make one with loupe calibrate polykv and "
        "start with "
        "--strategy FILE");
  }
  return absl::InvalidArgumentError(
      absl::StrCat("kv.strategy: is ", options.strategy, ", must be one that is loaded: ", absl::StrJoin(names, ", ")));
}

// Patterns and entries of a phase. `budget.entries` and `total_bytes` leave room already for what is appended between
// two cuts.
Phase PlanPhase(const Strategy& strategy, bool decode, const EvictionBudget& budget, const PolicyContext& context) {
  const int lists = context.num_lists(), prompt = context.num_prompt;
  const bool evicts = budget.decode != DecodeForm::kAppend;
  // A list grows with what is generated up to its decode budget, whatever the prompt's length.
  const int most = evicts && decode ? 1 << 30 : prompt;
  Protection fixed = budget.protection;
  fixed.recent = 0;
  const int later =
      evicts ? fixed.Count(prompt) + budget.protection.recent : 0;  // recent tokens leave the ranges behind
  const int least = std::min(std::max({1, budget.protection.Count(prompt), later}), most);
  const double mean = budget.total_bytes > 0
                          ? context.EntriesIn(static_cast<double>(budget.total_bytes) / lists)
                          : budget.entries;
  const StrategyShares shares = SharesAt(strategy.budgets, decode, mean);
  if (budget.total_bytes == 0) {
    return {shares.patterns, ShareEntries(shares.entries, int64_t{lists} * budget.entries, least, most)};
  }
  std::vector<int> lengths = ShareBytes(shares.entries, budget.total_bytes, least + budget.interval,
                                        most == prompt ? prompt + budget.interval : most, context);
  for (int& length : lengths) length -= budget.interval;
  return {shares.patterns, std::move(lengths)};
}

absl::StatusOr<std::unique_ptr<Policy>> Make(const KvOptions& options, const PolicyContext& context) {
  auto strategy = Choose(options, context);
  if (!strategy.ok()) return strategy.status();
  // Generated tokens cost one entry each only if all patterns of their phase work that way; a mixture is cut now and
  // then.
  std::vector<bool> used((*strategy)->patterns.size(), false);
  for (const StrategyBudget& budget : (*strategy)->budgets) {
    for (const int pattern : budget.decode.patterns) used[static_cast<size_t>(pattern)] = true;
  }
  bool each_token = true;
  for (size_t i = 0; i < used.size(); ++i)
    each_token &= !used[i] || FindPolicy((*strategy)->patterns[i].policy)->drops_each_token;
  LOUPE_CHECK_EQ((*strategy)->num_lists(), context.num_lists()) << "a strategy of another model came this far";
  auto budget = PlanEviction(options, context, each_token ? DecodeForm::kEachToken : DecodeForm::kInterval);
  if (!budget.ok()) return budget.status();
  PolicyContext planned = context;
  planned.landing_entries = budget->landing_entries;
  auto policy = std::make_unique<PolyKv>(*budget, planned);
  if (!budget->drops) return std::unique_ptr<Policy>(std::move(policy));

  Phase prefill = PlanPhase(**strategy, false, *budget, planned),
        decode = PlanPhase(**strategy, true, *budget, planned);
  std::vector<std::unique_ptr<Scorer>> scorers((*strategy)->patterns.size());
  const bool evicts = budget->decode != DecodeForm::kAppend;
  for (const std::vector<int>* patterns : {&prefill.patterns, &decode.patterns}) {
    if (patterns == &decode.patterns && !evicts) break;
    for (const int pattern : *patterns) {
      const size_t at = static_cast<size_t>(pattern);
      if (scorers[at]) continue;
      const PolicyRow& row = *FindPolicy((*strategy)->patterns[at].policy);
      KvOptions of_pattern;
      of_pattern.params = (*strategy)->patterns[at].params;
      scorers[at] = row.make_scorer(WithDefaults(row, of_pattern).value(), *budget, context);
    }
  }
  policy->Set(std::move(prefill), std::move(decode), std::move(scorers));
  return std::unique_ptr<Policy>(std::move(policy));
}

}  // namespace

PolicyRow PolyKvRow() {
  return {"polykv",
          "a calibrated strategy chooses pattern and budget of every layer and kv head",
          "a strategy (--strategy FILE, made by loupe calibrate polykv) and the signals of its patterns",
          false,
          {DecodeParam(false), IntervalParam()},
          Make};
}

}  // namespace loupe
