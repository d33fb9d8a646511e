// What all eviction primitives share: a scorer says how much each entry is worth, the budget how many stay, and this class
// turns both into actions, in prefill and decode form. A primitive is a scorer, and at most another way to share the
// budget out. Definitions are those of the papers named in each file, ties go to the lower position.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "kvcache/policies/budget.h"
#include "kvcache/policies/policy.h"

namespace loupe {

// Scores of a layer's lists: [kv heads][entries], higher is kept first.
using LayerScores = std::vector<std::vector<float>>;

class Scorer {
 public:
  virtual ~Scorer() = default;
  virtual Signals signals() const { return {}; }
  // At the end of the prompt and, in a decode form, later. What is protected is known to the caller, who keeps it whatever
  // its score.
  virtual void ScoreLayer(const SequenceView& sequence, int layer, LayerScores* scores) const = 0;
};

// Indexes of the entries that stay: all protected ones and the best of the others, `count` in all, ascending.
std::vector<int32_t> KeepBest(const ListView& list, const std::vector<float>& scores, const Protection& protection, int num_tokens,
                              int count);

// The `excess` entries of lowest score that are not protected, to be overwritten; fewer if there are fewer.
ListAction DropLowest(const ListView& list, const std::vector<float>& scores, const Protection& protection, int num_tokens, int excess);

class EvictionPolicy : public Policy {
 public:
  // `name` lives as long as the registry's rows.
  EvictionPolicy(std::string_view name, EvictionBudget budget, const PolicyContext& context, std::unique_ptr<Scorer> scorer)
      : name_(name), budget_(std::move(budget)), context_(context), scorer_(std::move(scorer)) {}

  std::string_view name() const override { return name_; }
  Signals signals() const override;
  bool keeps_everything() const override { return !budget_.drops; }
  int decode_interval() const override { return budget_.interval; }
  int64_t MaxBytes(int num_generated) const override;
  void AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const override;
  void AfterDecode(const SequenceView& sequence, std::vector<ListAction>* actions) const override;

 protected:
  // What a layer's lists keep. The default keeps the best of each, LayerEntries of them.
  virtual void SelectLayer(const SequenceView& sequence, int layer, const LayerScores& scores, std::vector<ListAction>* actions) const;
  // False if the lists of a layer may differ in length.
  virtual bool equal_lists() const { return true; }
  // How many entries a list of the layer keeps.
  virtual int LayerEntries(int /*layer*/) const { return budget_.entries; }

  const EvictionBudget& budget() const { return budget_; }
  const PolicyContext& context() const { return context_; }

 private:
  std::string_view name_;
  EvictionBudget budget_;
  PolicyContext context_;
  std::unique_ptr<Scorer> scorer_;
};

// The parameters that all primitives have: what becomes of generated tokens, and how often a list is cut back when it does
// not lose an entry at every token.
ParamSpec DecodeParam(bool evicts_by_default);
ParamSpec IntervalParam();

}  // namespace loupe
