#include "kvcache/policies/sorted_view.h"

#include <algorithm>
#include <numeric>

namespace loupe {

SortedView::SortedView(const SequenceView& sequence) : view_(sequence), lists_(sequence.lists.begin(), sequence.lists.end()) {
  orders_.resize(lists_.size());
  for (size_t i = 0; i < lists_.size(); ++i) {
    if (!std::is_sorted(lists_[i].positions.begin(), lists_[i].positions.end())) Sort(&lists_[i], &orders_[i]);
  }
  view_.lists = lists_;
}

void SortedView::Sort(ListView* list, std::vector<int32_t>* order) {
  order->resize(list->positions.size());
  std::iota(order->begin(), order->end(), 0);
  std::sort(order->begin(), order->end(), [&](int32_t a, int32_t b) {
    return list->positions[static_cast<size_t>(a)] < list->positions[static_cast<size_t>(b)];
  });
  std::vector<int32_t>& positions = positions_.emplace_back();
  for (const int32_t entry : *order) positions.push_back(list->positions[static_cast<size_t>(entry)]);
  list->positions = positions;
  list->runs = {};
  for (std::vector<std::span<const float>>* sums : {&list->window_mass, &list->last_row_mass, &list->column_sums}) {
    for (std::span<const float>& head : *sums) head = Reorder(head, *order);
  }
  for (std::span<const float>* values : {&list->key_norms, &list->key_alignment, &list->entry_probability}) {
    *values = Reorder(*values, *order);
  }
}

// Any number of values an entry.
std::span<const float> SortedView::Reorder(std::span<const float> values, const std::vector<int32_t>& order) {
  if (values.empty() || order.empty()) return values;
  const size_t width = values.size() / order.size();
  std::vector<float>& out = values_.emplace_back();
  for (const int32_t entry : order) {
    const auto from = values.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(entry) * width);
    out.insert(out.end(), from, from + static_cast<std::ptrdiff_t>(width));
  }
  return out;
}

void SortedView::ToListOrder(ListAction* action) const {
  const std::vector<int32_t>& order = orders_[static_cast<size_t>(action->layer * view_.num_kv_heads + action->kv_head)];
  if (order.empty()) return;
  for (int32_t& entry : action->keep) entry = order[static_cast<size_t>(entry)];
  std::sort(action->keep.begin(), action->keep.end());
}

}  // namespace loupe
