#include "kvcache/block_table.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace loupe {

int PositionPlane::LowerBound(int32_t position) const {
  LOUPE_CHECK(ascending_) << "a search among entries that are out of order";
  if (!chosen_.empty() && chosen_.back() >= position) {
    return static_cast<int>(std::lower_bound(chosen_.begin(), chosen_.end(), position) - chosen_.begin());
  }
  const int32_t into_run = std::clamp(position - run_begin_, 0, run_count_);
  return static_cast<int>(chosen_.size()) + into_run;
}

int PositionPlane::VisibleTo(int32_t position) const {
  if (ascending_) return LowerBound(position + 1);
  return static_cast<int>(chosen_.size()) + std::clamp(position + 1 - run_begin_, 0, run_count_);
}

void PositionPlane::Append(int32_t first, int count) {
  if (run_count_ == 0) run_begin_ = first;
  LOUPE_CHECK_EQ(run_begin_ + run_count_, first) << "position of an appended entry";
  run_count_ += count;
}

void PositionPlane::Assign(std::vector<int32_t> positions, int32_t length) {
  // Only a run that reaches the sequence's end can be continued by the next append.
  size_t first_of_run = positions.size();
  while (first_of_run > 0 && positions[first_of_run - 1] == length - static_cast<int32_t>(positions.size() - first_of_run) - 1) {
    --first_of_run;
  }
  run_count_ = static_cast<int32_t>(positions.size() - first_of_run);
  run_begin_ = length - run_count_;
  ascending_ = std::is_sorted(positions.begin(), positions.end());
  positions.resize(first_of_run);
  chosen_ = std::move(positions);
}

void PositionPlane::Overwrite(std::span<const std::pair<int32_t, int32_t>> moves, int size, int32_t length) {
  for (int i = 0; i < run_count_; ++i) chosen_.push_back(run_begin_ + i);
  run_begin_ = length;
  run_count_ = 0;
  for (const auto& [to, from] : moves) chosen_[static_cast<size_t>(to)] = chosen_[static_cast<size_t>(from)];
  chosen_.resize(static_cast<size_t>(size));
  ascending_ &= moves.empty();
}

void PositionPlane::DropFront(int count) {
  LOUPE_CHECK_LE(count, size());
  const int from_chosen = std::min(count, static_cast<int>(chosen_.size()));
  chosen_.erase(chosen_.begin(), chosen_.begin() + from_chosen);
  run_begin_ += count - from_chosen;
  run_count_ -= count - from_chosen;
}

EntryPlace KvList::Locate(int entry) const {
  if (regular()) return {entry / kPageEntries, entry % kPageEntries};
  return EntryWalk(pages).At(entry);
}

std::vector<ListRun> KvList::Runs() const {
  std::vector<ListRun> runs;
  int entry = 0;
  for (int page = 0; page < static_cast<int>(pages.size()); ++page) {
    const PageRef& ref = pages[static_cast<size_t>(page)];
    if (runs.empty() || runs.back().format != ref.page_class().format) runs.push_back({ref.page_class().format, page, page, entry, entry});
    runs.back().end_page = page + 1;
    runs.back().end_entry = entry += ref.count;
  }
  return runs;
}

std::vector<float> SpreadOverPages(std::span<const float> by_entry, std::span<const PageRef> pages) {
  std::vector<float> by_number(pages.size() * kPageEntries, 0.f);
  size_t entry = 0;
  for (size_t page = 0; page < pages.size() && entry < by_entry.size(); ++page) {
    const size_t count = std::min(size_t{pages[page].count}, by_entry.size() - entry);
    std::copy_n(by_entry.data() + entry, count, by_number.data() + page * kPageEntries);
    entry += count;
  }
  return by_number;
}

void GatherFromPages(const float* by_number, std::span<const PageRef> pages, int width, std::vector<float>* by_entry) {
  by_entry->clear();
  for (size_t page = 0; page < pages.size(); ++page) {
    const float* first = by_number + page * kPageEntries * static_cast<size_t>(width);
    by_entry->insert(by_entry->end(), first, first + size_t{pages[page].count} * static_cast<size_t>(width));
  }
}

}  // namespace loupe
