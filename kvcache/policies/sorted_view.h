// Views in order of positions for policies that know nothing of runs: lists with coded entries are not in that order. Owns
// what it has to put in another order; the original outlives it. Step thread.
#pragma once

#include <vector>

#include "kvcache/policies/policy.h"

namespace loupe {

class SortedView {
 public:
  explicit SortedView(const SequenceView& sequence);
  SortedView(const SortedView&) = delete;
  SortedView& operator=(const SortedView&) = delete;

  const SequenceView& view() const { return view_; }
  // An action's `keep`, which counts entries of this view, in those of the list.
  void ToListOrder(ListAction* action) const;

 private:
  void Sort(ListView* list, std::vector<int32_t>* order);
  std::span<const float> Reorder(std::span<const float> values, const std::vector<int32_t>& order);

  SequenceView view_;
  std::vector<ListView> lists_;
  std::vector<std::vector<int32_t>> orders_;  // [lists] the list's entry by that of the view; empty: the same
  std::vector<std::vector<int32_t>> positions_;
  std::vector<std::vector<float>> values_;
};

}  // namespace loupe
