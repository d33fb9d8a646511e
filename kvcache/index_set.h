// A set of small integers with a fast smallest member: which slabs are free, which pages of a slab are. What it hands
// out depends on its members alone, never on the order in which they came, so undoing a step restores the very state.
// Owned by one structure, used by the step thread.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "kernels/check.h"

namespace loupe {

class IndexSet {
 public:
  // Members lie in [0, limit). Starts empty.
  explicit IndexSet(int limit = 0) : words_((static_cast<size_t>(limit) + 63) / 64, 0), limit_(limit) {}

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  bool Contains(int i) const { return (words_[Word(i)] >> (i & 63)) & 1; }

  void Insert(int i) {
    LOUPE_CHECK(i >= 0 && i < limit_ && !Contains(i)) << i << " of " << limit_ << " is inserted twice or out of range";
    words_[Word(i)] |= uint64_t{1} << (i & 63);
    if (Word(i) < hint_) hint_ = Word(i);
    ++size_;
  }
  void Erase(int i) {
    LOUPE_CHECK(i >= 0 && i < limit_ && Contains(i)) << i << " of " << limit_ << " is not a member";
    words_[Word(i)] &= ~(uint64_t{1} << (i & 63));
    --size_;
  }
  void InsertBelow(int end) {
    for (int i = 0; i < end; ++i) Insert(i);
  }
  // -1 when empty.
  int First() const {
    if (size_ == 0) return -1;
    while (words_[hint_] == 0) ++hint_;
    return static_cast<int>(hint_ * 64) + std::countr_zero(words_[hint_]);
  }

 private:
  static size_t Word(int i) { return static_cast<size_t>(i) / 64; }

  std::vector<uint64_t> words_;
  mutable size_t hint_ = 0;  // no member lies in a word before it
  int limit_ = 0;
  int size_ = 0;
};

}  // namespace loupe
