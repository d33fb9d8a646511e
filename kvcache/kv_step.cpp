// Running a reserved step: the two ops, and the end of it. Nothing here can fail.
#include <algorithm>
#include <utility>

#include "kernels/check.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {

void KvCache::Impl::Begin(KvBatch::State* state, Stream& stream) {
  LOUPE_CHECK(state->in_flight) << "begin of a batch that is not reserved";
  if (std::exchange(state->begun, true)) return;
  if (state->advances) {
    AdvanceArrays(state, stream);
  } else {
    state->row_buffer.Upload(backend, 0, state->row_bytes, stream);
    state->page_buffer.Upload(backend, 0, state->page_begin.back() * static_cast<int64_t>(sizeof(PageRef)), stream);
  }
  // Open pages that moved (a small one grew, a shared one is written) take their entries along first.
  CopyEntriesArgs copy;
  copy.copies = state->copies.data();
  copy.num_copies = static_cast<int64_t>(state->copies.size());
  copy.head_dim = shape.head_dim;
  copy.arena = arena->data();
  if (copy.num_copies > 0) backend.CopyEntries(copy, stream);
}

void KvCache::Impl::Append(KvBatch::State* state, int layer, const Tensor& k, const Tensor& v, Stream& stream,
                           const Rotation& rotation) {
  LOUPE_CHECK(state->in_flight && layer >= 0 && layer < shape.num_layers) << "append to layer " << layer;
  const size_t at = static_cast<size_t>(layer);
  LOUPE_CHECK(!state->appended[at]) << "layer " << layer << " was appended in this step already";
  LOUPE_CHECK(k.rows() == state->num_rows && v.rows() == state->num_rows)
      << k.rows() << " keys and " << v.rows() << " values for " << state->num_rows << " rows";
  state->appended[at] = 1;
  Begin(state, stream);
  AppendKvArgs args;
  args.k = k;
  args.v = v;
  PageRef* slots = state->Device(state->slots + int64_t{layer} * state->num_rows * shape.num_kv_heads);
  args.slots = MakeTensor(slots, DType::kBytes, state->num_rows, shape.num_kv_heads);
  args.arena = arena->data();
  args.rotation = rotation;
  args.rotation.positions = MakeTensor(state->Device(state->positions), DType::kI32, state->num_rows);
  args.mean_keys = MeanKeys(layer);
  if (state->coded) args.faults = Faults();
  backend.AppendKv(args, stream);
  if (!state->wants_entries) return;
  for (size_t item = 0; item < state->items.size(); ++item) CaptureEntries(*state, static_cast<int>(item), layer, k, v, stream);
}

void KvCache::Impl::Attend(KvBatch::State* state, int layer, const Tensor& q, const Tensor& out, Stream& stream) {
  LOUPE_CHECK(state->in_flight && layer >= 0 && layer < shape.num_layers) << "attend in layer " << layer;
  const size_t at = static_cast<size_t>(layer);
  LOUPE_CHECK(state->appended[at]) << "layer " << layer << " attends before its rows were appended";
  LOUPE_CHECK(q.rows() == state->num_rows && out.rows() == state->num_rows) << q.rows() << " queries for " << state->num_rows << " rows";
  const int64_t groups = shape.num_kv_heads, heads = heads_per_group();
  const int64_t lists = static_cast<int64_t>(state->items.size()) * groups;
  const int64_t pages = state->page_begin.back();
  const int64_t first_row = int64_t{layer} * state->num_rows * groups;

  AttendArgs args;
  args.q = q;
  args.row_sequence = MakeTensor(state->Device(state->row_sequence), DType::kI32, state->num_rows);
  args.pages = MakeTensor(state->page_buffer.device<PageRef>(), DType::kBytes, pages);
  args.list_begin = MakeTensor(state->Device(state->list_begin + layer * (lists + 1)), DType::kI32, lists + 1);
  args.list_end = MakeTensor(state->Device(state->list_end + layer * lists), DType::kI32, lists);
  args.visible_begin = MakeTensor(state->Device(state->visible_begin + first_row), DType::kI32, state->num_rows, groups);
  args.visible_end = MakeTensor(state->Device(state->visible_end + first_row), DType::kI32, state->num_rows, groups);
  args.extra_pages = state->extra_pages[at];
  args.extra_counts = state->extra_counts[at];
  args.arena = arena->data();
  args.scale = shape.scale;
  if (sinks) args.sinks = MakeTensor(static_cast<float*>(sinks->data()) + int64_t{layer} * shape.num_heads, DType::kF32, shape.num_heads);
  args.mean_keys = MeanKeys(layer);
  args.coded = state->coded;
  args.prompt_rows = state->prompt_rows;
  args.out = out;
  if (state->wants_mass) args.page_mass = MakeTensor(state->mass_buffer.device<float>(), DType::kF32, pages, heads);
  if (state->wants_probability) {
    args.entry_probability = MakeTensor(state->probability_buffer.device<float>(), DType::kF32, pages, kPageEntries, heads);
  }
  backend.Attend(args, stream);
  if (state->wants_rows) {
    for (size_t item = 0; item < state->items.size(); ++item) ReadRows(*state, static_cast<int>(item), layer, args, stream);
  }
}

void KvCache::Impl::ApplyDelta(const KvBatch::State& state, const ListDelta& delta) {
  Sequence& sequence = *state.items[static_cast<size_t>(delta.item)].sequence;
  KvList& list = sequence.lists[static_cast<size_t>(delta.list)];
  for (int i = 0; i < delta.num_replaced; ++i) {
    ReleasePage(sequence, list.pages.back());
    list.pages.pop_back();
  }
  resident_entries += delta.num_copied;
  LOUPE_CHECK_EQ(static_cast<int>(list.pages.size()), delta.first_new) << "pages of a list that changed under a step";
  if (delta.num_filled > 0) list.pages.back().count = static_cast<uint16_t>(list.pages.back().count + delta.num_filled);
  list.before_tail = delta.before_tail;
  const PageRef* pages = state.new_pages.data() + delta.new_begin;
  list.pages.insert(list.pages.end(), pages, pages + delta.new_count);
}

void KvCache::Impl::Commit(KvBatch::State* state, Stream& stream) {
  LOUPE_CHECK(state->in_flight) << "commit of a batch that is not reserved";
  for (size_t layer = 0; layer < state->appended.size(); ++layer) {
    LOUPE_CHECK(state->appended[layer]) << "layer " << layer << " was never appended";
  }
  for (const ListDelta& delta : state->deltas) {
    Sequence& sequence = *state->items[static_cast<size_t>(delta.item)].sequence;
    for (int i = 0; i < delta.new_count; ++i) {
      sequence.device_bytes += pool.PageBytes(state->new_pages[static_cast<size_t>(delta.new_begin + i)].page_class());
    }
  }
  // Old and new pages of the step were held together: the peak is before the replaced ones go.
  for (const StepItem& item : state->items) {
    item.sequence->peak_device_bytes = std::max(item.sequence->peak_device_bytes, item.sequence->device_bytes);
  }
  for (const ListDelta& delta : state->deltas) ApplyDelta(*state, delta);
  state->reservation->Keep();

  for (const StepItem& item : state->items) {
    Sequence& sequence = *item.sequence;
    resident_entries += int64_t{item.rows()} * num_lists();
    sequence.num_tokens += item.rows();
    sequence.unsettled_rows += item.rows();
    if (!state->can_advance || !sequence.columns.empty()) Settle(sequence);
    sequence.num_prompt += item.num_prompt;
    CommitSignals(sequence, item);
    ++sequence.version;
  }
  state->advanceable.clear();
  for (const StepItem& item : state->items) {
    if (state->can_advance) state->advanceable.emplace_back(item.sequence->id, item.sequence->version);
  }
  // Policies first: the step's masses are numbered by the table that attention has read.
  if (state->wants_mass || state->wants_probability) {
    const int64_t values = state->page_begin.back() * heads_per_group() * 4;
    if (state->wants_mass) state->mass_buffer.Download(backend, 0, values, stream);
    if (state->wants_probability) state->probability_buffer.Download(backend, 0, values * kPageEntries, stream);
    stream.Synchronize().IgnoreError();  // a device that has failed says so at the end of the step
  }
  for (size_t item = 0; item < state->items.size(); ++item) {
    RunPolicy(*state, static_cast<int>(item), stream);
    FreeExpired(*state->items[item].sequence);
    state->coded |= state->items[item].sequence->coded;
  }
  if (state->coded) backend.Copy(&faults_on_host, faults->data(), sizeof faults_on_host, stream);
  std::erase(in_flight, state);
  state->Clear();
}

void KvCache::Impl::Abandon(KvBatch::State* state) {
  LOUPE_CHECK(state->in_flight) << "abandon of a batch that is not reserved";
  state->advanceable.clear();
  const bool touched = std::find(state->appended.begin(), state->appended.end(), 1) != state->appended.end();
  if (touched) {
    // Ops of the step may be on a stream still, so its pages retire like all others that were in use.
    for (uint32_t unit : state->reservation->units()) pool.Release(unit);
    state->reservation->Keep();
  } else {
    state->reservation->GiveBack();
  }
  std::erase(in_flight, state);
  state->Clear();
}

// Leading pages of a windowed list whose entries no later row sees.
void KvCache::Impl::FreeExpired(Sequence& sequence) {
  for (int i = 0; i < num_lists(); ++i) {
    const int layer_window = window(i / shape.num_kv_heads);
    if (layer_window == 0) continue;
    KvList& list = sequence.lists[static_cast<size_t>(i)];
    const int expired_pages = list.positions.LowerBound(sequence.num_tokens - layer_window + 1) / kPageEntries;
    if (expired_pages == 0) continue;
    ++sequence.version;
    for (int page = 0; page < expired_pages; ++page) ReleasePage(sequence, list.pages[static_cast<size_t>(page)]);
    list.pages.erase(list.pages.begin(), list.pages.begin() + expired_pages);
    list.positions.DropFront(expired_pages * kPageEntries);
    list.before_tail -= expired_pages * kPageEntries;
    if (!sequence.columns.empty()) {
      for (int r = 0; r < heads_per_group(); ++r) {
        std::vector<float>& sums = sequence.columns[static_cast<size_t>(i * heads_per_group() + r)];
        sums.erase(sums.begin(), sums.begin() + expired_pages * kPageEntries);
      }
    }
    entries_expired += int64_t{expired_pages} * kPageEntries;
  }
}

}  // namespace loupe
