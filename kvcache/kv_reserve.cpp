// Building a step: everything that can fail happens here, before anything changes. One pass over the lists takes the
// pages and writes the flat arrays; a failed pass gives its pages back and leaves the very same state.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {
namespace {

// How a list takes further entries: into its last page, into new ones, or into a new one that takes the place of the last
// page or of the small ones at the end.
struct Growth {
  int kept = 0;    // pages that stay
  int filled = 0;  // entries that go into the last of them
  int copied = 0;  // entries of those that are replaced
};

Growth GrowthOf(const KvList& list, const PageFormat& landing, int rows, bool shared_tail) {
  Growth growth;
  growth.kept = static_cast<int>(list.pages.size());
  if (growth.kept == 0 || list.pages.back().page_class().format != landing) return growth;
  const PageRef& last = list.pages.back();
  const int room = last.page_class().entries() - last.count;
  if (last.small && rows > room) {
    while (growth.kept > 0) {
      const PageRef& page = list.pages[static_cast<size_t>(growth.kept - 1)];
      if (!page.small || page.page_class().format != landing) break;
      growth.copied += page.count;
      --growth.kept;
    }
  } else if (room > 0 && shared_tail) {
    growth.copied = last.count;
    --growth.kept;
  } else {
    growth.filled = std::min(rows, room);
  }
  return growth;
}

}  // namespace

void KvBatch::State::Clear() {
  for (const StepItem& item : items) item.sequence->in_flight = false;
  items.clear();
  deltas.clear();
  new_pages.clear();
  copies.clear();
  appended.clear();
  extra_pages.clear();
  extra_counts.clear();
  num_rows = prompt_rows = 0;
  num_tails = 0;
  wants_mass = wants_probability = wants_rows = wants_entries = coded = in_flight = begun = can_advance = advances = false;
}

absl::Status KvCache::Impl::Reserve(std::span<const KvStepItem> step_items, KvBatch* batch) {
  KvBatch::State* state = batch->state_.get();
  LOUPE_CHECK(!state->in_flight) << "the batch is still reserved; commit or abandon it first";
  pool.DrainRetired();
  state->Clear();
  if (!state->reservation) state->reservation.emplace(&pool);
  if (!IsLastStepAgain(step_items, *state) || !ReserveAdvanced(step_items, state)) {
    if (absl::Status status = ReserveAfresh(step_items, state); !status.ok()) {
      state->reservation->GiveBack();
      state->Clear();
      batch->num_rows = batch->prompt_rows = 0;
      batch->positions = {};
      if (absl::IsResourceExhausted(status)) ++reserve_failures;
      return status;
    }
  }
  state->in_flight = true;
  in_flight.push_back(state);
  batch->num_rows = state->num_rows;
  batch->prompt_rows = state->prompt_rows;
  batch->num_items = static_cast<int>(state->items.size());
  batch->positions = MakeTensor(state->Device(state->positions), DType::kI32, state->num_rows);
  return absl::OkStatus();
}

absl::Status KvCache::Impl::ReserveAfresh(std::span<const KvStepItem> step_items, KvBatch::State* state) {
  state->advanceable.clear();
  absl::Status status = LayOutRows(step_items, state);
  for (const StepItem& item : state->items) Settle(*item.sequence);
  if (status.ok()) status = PrepareBuffers(state);
  if (status.ok()) {
    status = PlanLists(state, /*small_tails=*/true);
    // A small tail may cost a slab of its own. Large pages throughout never need more slabs than BytesForTokens says.
    if (state->reservation->failed()) status = PlanLists(state, /*small_tails=*/false);
  }
  return status.ok() ? PrepareSignals(state) : status;
}

// Rows are ordered by phase, then by item.
absl::Status KvCache::Impl::LayOutRows(std::span<const KvStepItem> step_items, KvBatch::State* state) {
  for (const KvStepItem& item : step_items) {
    Sequence& sequence = Find(item.seq);
    LOUPE_CHECK(!sequence.in_flight) << "sequence " << item.seq.value << " is already part of a reserved step";
    if (item.num_prompt_rows < 0 || item.num_decode_rows < 0 || item.num_prompt_rows + item.num_decode_rows == 0) {
      return absl::InvalidArgumentError(absl::StrFormat("a step item has %d prompt and %d decode rows; give it one at least",
                                                        item.num_prompt_rows, item.num_decode_rows));
    }
    const Signals& signals = sequence.signals;
    const bool wants_rows = signals.page_mass || signals.entry_probability;
    if (wants_rows && item.num_decode_rows > 1) {
      return absl::InvalidArgumentError(absl::StrFormat("policy %s looks at the attention of each decode row, the step has %d of "
                                                        "one sequence; give them in steps of one",
                                                        std::string(sequence.policy->name()), item.num_decode_rows));
    }
    if (wants_rows && item.num_decode_rows > 0) {
      state->wants_mass |= signals.page_mass;
      state->wants_probability |= signals.entry_probability;
    }
    const bool reads_prompt = signals.window_query_rows > 0 || signals.columns.stride > 0 || signals.output_norms;
    state->wants_rows |= (reads_prompt && item.num_prompt_rows > 0) || (signals.window_goes_on && item.num_decode_rows > 0);
    state->wants_entries |= signals.entries && item.num_prompt_rows > 0;
    state->coded |= sequence.coded;
    sequence.in_flight = true;
    sequence.pending.clear();
    state->items.push_back({&sequence, item.num_prompt_rows, item.num_decode_rows, 0, 0, item.ends_prefill});
  }
  int64_t row = 0;
  for (StepItem& item : state->items) item.prompt_begin = static_cast<int>(row), row += item.num_prompt;
  state->prompt_rows = static_cast<int>(row);
  for (StepItem& item : state->items) item.decode_begin = static_cast<int>(row), row += item.num_decode;
  if (row > config.max_step_rows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the step has %d rows, the cache was made for %d; plan smaller steps", row, config.max_step_rows));
  }
  state->num_rows = static_cast<int>(row);
  const auto is_decode_row = [](const StepItem& item) { return item.num_prompt == 0 && item.num_decode == 1; };
  state->can_advance = shape.windows.empty() && !state->wants_mass && !state->wants_probability && !state->wants_rows &&
                       std::all_of(state->items.begin(), state->items.end(), is_decode_row);
  const size_t num_layers = static_cast<size_t>(shape.num_layers);
  state->appended.assign(num_layers, 0);
  state->extra_pages.assign(num_layers, Tensor{});
  state->extra_counts.assign(num_layers, Tensor{});
  return absl::OkStatus();
}

absl::Status KvCache::Impl::PrepareBuffers(KvBatch::State* state) {
  const int64_t layers = shape.num_layers, groups = shape.num_kv_heads;
  const int64_t rows = state->num_rows, lists = static_cast<int64_t>(state->items.size()) * groups;
  const int64_t per_row = layers * rows * groups;
  const int64_t integers = 2 * rows + layers * (2 * lists + 1) + 2 * per_row;
  const int64_t slot_offset = (integers * 4 + 7) / 8 * 8;
  state->row_bytes = slot_offset + per_row * static_cast<int64_t>(sizeof(PageRef));
  // Room for tables of all pages that there are, and for what is left free in them: a step grows them only where many
  // forks share pages.
  const int64_t all_pages =
      arena->bytes() / pool.PageBytes(landing_class) + int64_t{kTableRoom} * num_lists() * config.max_sequences;
  absl::Status status = state->row_buffer.Ensure(backend, state->row_bytes);
  if (status.ok()) status = state->page_buffer.Ensure(backend, all_pages * static_cast<int64_t>(sizeof(PageRef)));
  if (status.ok() && state->can_advance) {
    status = state->tail_buffer.Ensure(backend, layers * lists * static_cast<int64_t>(sizeof(TailPage)));
    state->left_in_tail.resize(static_cast<size_t>(layers * lists));
    state->left_in_table.resize(static_cast<size_t>(layers * lists));
  }
  if (!status.ok()) return status;
  state->positions = state->row_buffer.host<int32_t>();
  state->row_sequence = state->positions + rows;
  state->list_begin = state->row_sequence + rows;
  state->list_end = state->list_begin + layers * (lists + 1);
  state->visible_begin = state->list_end + layers * lists;
  state->visible_end = state->visible_begin + per_row;
  state->slots = reinterpret_cast<PageRef*>(state->row_buffer.host<char>() + slot_offset);
  for (size_t i = 0; i < state->items.size(); ++i) {
    const StepItem& item = state->items[i];
    for (int r = 0; r < item.rows(); ++r) {
      const int row = r < item.num_prompt ? item.prompt_begin + r : item.decode_begin + r - item.num_prompt;
      state->positions[row] = item.sequence->num_tokens + r;
      state->row_sequence[row] = static_cast<int32_t>(i);
    }
  }
  return absl::OkStatus();
}

absl::Status KvCache::Impl::PlanLists(KvBatch::State* state, bool small_tails) {
  state->reservation->GiveBack();
  state->deltas.clear();
  state->new_pages.clear();
  state->copies.clear();
  state->page_begin.assign(1, 0);
  const int groups = shape.num_kv_heads;
  const int num_items = static_cast<int>(state->items.size());
  int32_t *list_begin = state->list_begin, *list_end = state->list_end;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    state->page_begin.push_back(state->page_begin.back());
    *list_begin++ = static_cast<int32_t>(state->page_begin.back());
    for (int item = 0; item < num_items; ++item) {
      for (int g = 0; g < groups; ++g) {
        const absl::Status status = PlanList(state, item, layer * groups + g, small_tails);
        if (!status.ok()) return status;
        *list_end++ = static_cast<int32_t>(state->page_begin.back()) - (state->can_advance ? kTableRoom : 0);
        *list_begin++ = static_cast<int32_t>(state->page_begin.back());
      }
    }
  }
  if (!state->reservation->failed()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "the step of %d rows needs %d bytes of new KV pages; %d of %d bytes are free for pages", state->num_rows,
      state->reservation->bytes_asked(), pool.BytesFree(landing_class) + state->reservation->bytes_taken(), arena->bytes()));
}

// Writes the list's table as it will be after the step, taking the pages that are missing.
absl::Status KvCache::Impl::PlanList(KvBatch::State* state, int item_index, int list_index, bool small_tails) {
  const StepItem& item = state->items[static_cast<size_t>(item_index)];
  const Sequence& sequence = *item.sequence;
  const KvList& list = sequence.lists[static_cast<size_t>(list_index)];
  PageClass c = LandingClass(sequence, list_index / shape.num_kv_heads);
  const bool shared_tail = sequence.may_share && !list.pages.empty() && pool.references(list.pages.back().unit) > 1;
  const Growth growth = GrowthOf(list, c.format, item.rows(), shared_tail);
  int rest = growth.copied + item.rows() - growth.filled;  // entries of new pages
  const int pages = growth.kept + (rest + kPageEntries - 1) / kPageEntries;

  const int64_t begin = state->page_begin.back(), end = begin + pages + (state->can_advance ? kTableRoom : 0);
  const int64_t needed = end * static_cast<int64_t>(sizeof(PageRef));
  if (needed > state->page_buffer.bytes()) {
    const absl::Status status = state->page_buffer.Ensure(backend, needed);
    if (!status.ok()) return status;
  }
  PageRef* table = state->page_buffer.host<PageRef>() + begin;
  state->page_begin.back() = end;

  std::copy_n(list.pages.begin(), growth.kept, table);
  const EntryPlace first = growth.filled > 0 ? EntryPlace{growth.kept - 1, table[growth.kept - 1].count}
                                             : EntryPlace{growth.kept, growth.copied};
  if (growth.filled > 0) table[growth.kept - 1].count = static_cast<uint16_t>(table[growth.kept - 1].count + growth.filled);
  if (rest > 0) {
    const int new_begin = static_cast<int>(state->new_pages.size()), old_pages = static_cast<int>(list.pages.size());
    for (int page = growth.kept; page < old_pages; ++page) c.log_weights |= list.pages[static_cast<size_t>(page)].log_weights;
    for (int page = growth.kept; page < pages; ++page) {
      const int count = std::min(rest, kPageEntries);
      rest -= count;
      c.small = small_tails && count <= kSmallPageEntries;
      c.small = c.small && pool.CanTake(c);
      table[page] = MakePageRef(state->reservation->Take(c).value_or(0), count, c);
      state->new_pages.push_back(table[page]);
      if (page == growth.kept) CopyTail(state, std::span(list.pages).subspan(static_cast<size_t>(growth.kept)), table[page]);
      c.log_weights = false;
    }
    const int before_tail = list.entries() + item.rows() - table[pages - 1].count;
    state->deltas.push_back({item_index, list_index, growth.kept, new_begin, pages - growth.kept, old_pages - growth.kept, growth.copied,
                             growth.filled, before_tail});
  }
  FillRows(state, item_index, list_index, table, first);
  if (state->can_advance) LeaveRoom(state, item_index, list_index, table[pages - 1]);
  return absl::OkStatus();
}

// The entries of replaced pages move into the first slots of `to`.
void KvCache::Impl::CopyTail(KvBatch::State* state, std::span<const PageRef> replaced, PageRef to) {
  to.count = 0;
  for (const PageRef& page : replaced) {
    EntryCopy copy{page, to};
    for (copy.from.count = 0; copy.from.count < page.count; ++copy.from.count, ++to.count) {
      copy.to = to;
      state->copies.push_back(copy);
    }
  }
}

// Where each row of the item writes, and what it sees, in one list. The first row goes to `place` in the table.
void KvCache::Impl::FillRows(KvBatch::State* state, int item_index, int list_index, const PageRef* pages, EntryPlace place) {
  const StepItem& item = state->items[static_cast<size_t>(item_index)];
  const Sequence& sequence = *item.sequence;
  const PositionPlane& positions = sequence.lists[static_cast<size_t>(list_index)].positions;
  const int groups = shape.num_kv_heads;
  const int layer = list_index / groups;
  const int layer_window = window(layer);
  const int entries = positions.size();
  const int rows = item.rows();
  for (int r = 0; r < rows; ++r) {
    const int64_t row = r < item.num_prompt ? item.prompt_begin + r : item.decode_begin + r - item.num_prompt;
    const int64_t at = (int64_t{layer} * state->num_rows + row) * groups + list_index % groups;
    if (place.slot == pages[place.page].page_class().entries()) ++place.page, place.slot = 0;
    PageRef slot = pages[place.page];
    slot.count = static_cast<uint16_t>(place.slot);
    state->slots[at] = slot;
    int32_t begin = 0;
    if (layer_window > 0) {  // such a list is regular
      const int32_t oldest = sequence.num_tokens + r - layer_window + 1;
      begin = oldest > sequence.num_tokens ? entries + oldest - sequence.num_tokens : positions.LowerBound(oldest);
    }
    state->visible_begin[at] = begin;
    state->visible_end[at] = place.number() + 1;
    ++place.slot;
  }
}

absl::Status KvCache::Impl::PrepareSignals(KvBatch::State* state) {
  const int64_t values = state->page_begin.back() * heads_per_group();
  absl::Status status;
  if (state->wants_mass) status = state->mass_buffer.Ensure(backend, values * 4);
  if (status.ok() && state->wants_probability) status = state->probability_buffer.Ensure(backend, values * kPageEntries * 4);
  return status;
}

}  // namespace loupe
