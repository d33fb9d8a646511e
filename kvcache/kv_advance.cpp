// A decode step that is the last one again, one token on: same sequences, one row each, nothing else has touched their
// lists. Its arrays are the last step's, moved on by one op (kernels/ops.h, AdvanceLists), so the host's work is a look at
// one byte a list and the pages that begin.
#include <algorithm>
#include <utility>

#include "kernels/check.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {

bool KvCache::Impl::IsLastStepAgain(std::span<const KvStepItem> items, const KvBatch::State& state) const {
  if (items.empty() || items.size() != state.advanceable.size()) return false;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& [id, version] = state.advanceable[i];
    if (items[i].seq.value != id || items[i].num_prompt_rows != 0 || items[i].num_decode_rows != 1) return false;
    if (Find(items[i].seq).version != version) return false;
  }
  return true;
}

// False, with nothing reserved, if there are too few pages or a table is full.
bool KvCache::Impl::ReserveAdvanced(std::span<const KvStepItem> items, KvBatch::State* state) {
  state->reservation->GiveBack();
  bool fits = LayOutRows(items, state).ok() && state->can_advance;
  std::vector<uint8_t>& left = state->left_in_tail;
  for (auto at = left.begin(); fits && (at = std::find(at, left.end(), 0)) != left.end(); ++at) {
    fits = TakeTail(state, static_cast<int>(at - left.begin()));
  }
  if (!fits || state->reservation->failed()) {
    state->reservation->GiveBack();
    state->Clear();
    return false;
  }
  for (uint8_t& entries : left) --entries;  // those whose page begins were counted one too many
  state->advances = true;
  ++steps_advanced;
  return true;
}

// The row of a list goes into a fresh page: the next one, or a large one in place of a full small one. False where that
// changes the numbers of entries: behind a run's tail, or with several small pages.
bool KvCache::Impl::TakeTail(KvBatch::State* state, int list_of_step) {
  const int groups = shape.num_kv_heads, lists_of_layer = static_cast<int>(state->items.size()) * groups;
  const int item = list_of_step % lists_of_layer / groups;
  const int list_index = list_of_step / lists_of_layer * groups + list_of_step % groups;
  Sequence& sequence = *state->items[static_cast<size_t>(item)].sequence;
  Settle(sequence);
  const KvList& list = sequence.lists[static_cast<size_t>(list_index)];
  PageClass c = LandingClass(sequence, list_index / groups);
  const int old_pages = static_cast<int>(list.pages.size());
  const PageRef& last = list.pages.back();
  const bool replaces = last.small;
  if (last.page_class().format != c.format) return false;
  if (replaces && old_pages > 1 && list.pages[static_cast<size_t>(old_pages - 2)].count < kPageEntries &&
      list.pages[static_cast<size_t>(old_pages - 2)].page_class().format == c.format) {
    return false;
  }
  const int open = replaces ? last.count : 0;
  uint8_t& left_in_table = state->left_in_table[static_cast<size_t>(list_of_step)];
  if (!replaces && left_in_table-- == 0) return false;
  c.log_weights = replaces && last.log_weights;
  c.small = !replaces;
  c.small = c.small && pool.CanTake(c);
  const PageRef page = MakePageRef(state->reservation->Take(c).value_or(0), open + 1, c);
  if (replaces) CopyTail(state, std::span(&last, 1), page);
  const int new_begin = static_cast<int>(state->new_pages.size());
  state->new_pages.push_back(page);
  const int before_tail = list.entries() - open;
  state->deltas.push_back({item, list_index, replaces ? old_pages - 1 : old_pages, new_begin, 1, replaces ? 1 : 0, open, 0, before_tail});
  state->tail_buffer.host<TailPage>()[state->num_tails++] = {list_of_step, page};
  state->left_in_tail[static_cast<size_t>(list_of_step)] = static_cast<uint8_t>(c.entries() - open);
  return true;
}

// After a step that was built afresh: `tail` is the list's last page, the step's row is in it.
void KvCache::Impl::LeaveRoom(KvBatch::State* state, int item, int list_index, const PageRef& tail) {
  const int groups = shape.num_kv_heads, lists_of_layer = static_cast<int>(state->items.size()) * groups;
  const size_t at = static_cast<size_t>(list_index / groups * lists_of_layer + item * groups + list_index % groups);
  state->left_in_tail[at] = static_cast<uint8_t>(tail.page_class().entries() - tail.count);
  state->left_in_table[at] = kTableRoom;
}

void KvCache::Impl::Settle(Sequence& sequence) {
  const int rows = std::exchange(sequence.unsettled_rows, 0);
  if (rows == 0) return;
  constexpr size_t kAhead = 8;  // lists; their tables lie anywhere
  for (size_t i = 0; i < sequence.lists.size(); ++i) {
    if (i + kAhead < sequence.lists.size()) __builtin_prefetch(&sequence.lists[i + kAhead].pages.back(), 1);
    KvList& list = sequence.lists[i];
    list.positions.Append(sequence.num_tokens - rows, rows);
    list.pages.back().count = static_cast<uint16_t>(list.entries() - list.before_tail);
  }
}

void KvCache::Impl::AdvanceArrays(KvBatch::State* state, Stream& stream) {
  const int64_t layers = shape.num_layers, rows = state->num_rows, groups = shape.num_kv_heads, lists = rows * groups;
  state->tail_buffer.Upload(backend, 0, state->num_tails * static_cast<int64_t>(sizeof(TailPage)), stream);
  AdvanceListsArgs args;
  args.positions = MakeTensor(state->Device(state->positions), DType::kI32, rows);
  args.slots = MakeTensor(state->Device(state->slots), DType::kBytes, layers, rows, groups);
  args.visible_end = MakeTensor(state->Device(state->visible_end), DType::kI32, layers, rows, groups);
  args.list_begin = MakeTensor(state->Device(state->list_begin), DType::kI32, layers, lists + 1);
  args.list_end = MakeTensor(state->Device(state->list_end), DType::kI32, layers, lists);
  args.pages = MakeTensor(state->page_buffer.device<PageRef>(), DType::kBytes, state->page_begin.back());
  if (state->num_tails > 0) args.tails = MakeTensor(state->tail_buffer.device<char>(), DType::kBytes, state->num_tails);
  backend.AdvanceLists(args, stream);
}

}  // namespace loupe
