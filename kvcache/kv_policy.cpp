// Policies act: when one is due, what it is shown, and what happens if its repack finds no room.
#include <algorithm>
#include <utility>

#include "kernels/check.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {

void KvCache::Impl::RunPolicy(const KvBatch::State& state, int item_index, Stream& stream) {
  const StepItem& item = state.items[static_cast<size_t>(item_index)];
  Sequence& sequence = *item.sequence;
  const Policy& policy = *sequence.policy;
  sequence.prefill_pending |= item.ends_prefill;
  const bool after_prefill = sequence.prefill_pending;
  if (!policy.keeps_everything() && item.num_decode > 0) AddProbabilities(state, item_index);
  const int interval = policy.decode_interval();
  const int generated = sequence.num_tokens - sequence.num_prompt;
  const bool after_decode = interval > 0 && item.num_decode > 0 && generated / interval > (generated - item.num_decode) / interval;
  const bool after_chunk = item.num_prompt > 0 && policy.acts_in_prefill();
  if (!after_prefill && !after_decode && !after_chunk) return;
  Settle(sequence);
  if (after_prefill) {
    (void)EndPrefill(sequence, stream);  // without room it is due again after the next step
    return;
  }
  if (!after_decode) {
    AfterChunk(sequence, stream);
    return;
  }
  const SequenceView view = BuildViews(sequence, sequence.signals, false, stream);
  for (size_t i = 0; item.num_decode == 1 && i < views.size(); ++i) ViewMasses(state, item_index, i, &views[i]);
  actions.clear();
  policy.AfterDecode(view, &actions);
  const absl::Status status = Repack(sequence, actions, stream);
  LOUPE_CHECK(status.ok() || absl::IsResourceExhausted(status)) << "policy " << policy.name() << ": " << status.ToString();
  if (!status.ok()) sequence.pending = std::move(actions);
}

absl::Status KvCache::Impl::Retry(Sequence& sequence, Stream& stream) {
  if (sequence.prefill_pending) return EndPrefill(sequence, stream);
  const absl::Status status = Repack(sequence, sequence.pending, stream);
  if (status.ok()) sequence.pending.clear();
  return status;
}

// Without room the chunk stays as it is; the next one is looked at together with it.
void KvCache::Impl::AfterChunk(Sequence& sequence, Stream& stream) {
  actions.clear();
  sequence.policy->AfterChunk(BuildViews(sequence, {}, false, stream), &actions);
  const absl::Status status = Repack(sequence, actions, stream);
  LOUPE_CHECK(status.ok() || absl::IsResourceExhausted(status)) << "policy " << sequence.policy->name() << ": " << status.ToString();
}

absl::Status KvCache::Impl::EndPrefill(Sequence& sequence, Stream& stream) {
  const Policy& policy = *sequence.policy;
  const PageFormat landed = sequence.landing;
  Land(&sequence, /*prompt=*/false);
  if (!policy.keeps_everything()) {
    const SequenceView view = BuildViews(sequence, sequence.signals, true, stream);
    actions.clear();
    policy.AfterPrefill(view, &actions);
    const absl::Status status = Repack(sequence, actions, stream);
    if (absl::IsResourceExhausted(status)) {
      sequence.landing = landed;
      return status;
    }
    LOUPE_CHECK(status.ok()) << "policy " << policy.name() << ": " << status.ToString();
  }
  sequence.prefill_pending = false;
  sequence.prompt_tokens = sequence.num_prompt;
  sequence.prompt_device_bytes = sequence.device_bytes;
  return absl::OkStatus();
}

absl::StatusOr<SeqId> KvCache::Impl::Fork(SeqId parent, const Policy& policy, Stream& stream) {
  const Sequence& from = Get(parent);
  LOUPE_CHECK(!from.prefill_pending && from.prompt_tokens == from.num_tokens)
      << "sequence " << parent.value << " is not at the end of its prompt";
  absl::StatusOr<SeqId> id = Fork(parent);
  if (!id.ok()) return id;
  Sequence& sequence = Get(*id);
  sequence.policy = &policy;
  Land(&sequence, /*prompt=*/true);
  NarrowSignals(&sequence, policy.keeps_everything() ? Signals{} : policy.signals());
  sequence.prefill_pending = true;
  if (const absl::Status status = EndPrefill(sequence, stream); !status.ok()) {
    Close(*id);
    return status;
  }
  return id;
}

SequenceView KvCache::Impl::BuildViews(const Sequence& sequence, const Signals& signals, bool after_prefill, Stream& stream) {
  const size_t heads = static_cast<size_t>(heads_per_group());
  SequenceView view;
  view.num_tokens = sequence.num_tokens;
  view.num_prompt = sequence.num_prompt;
  view.num_kv_heads = shape.num_kv_heads;
  view.landing = sequence.landing;
  view.surprisal = sequence.surprisal;
  view.keys = sequence.keys;
  view.values = sequence.values;
  const bool sees_window = after_prefill || signals.window_goes_on;
  const int window_rows =
      sees_window ? std::min(sequence.window.rows, signals.window_goes_on ? sequence.num_tokens : sequence.num_prompt) : 0;
  if (signals.window_mass && sees_window) {
    view.window_rows = window_rows;
    for (int layer = 0; layer < shape.num_layers; ++layer) SumWindow(sequence, layer, window_rows, &window_mass, stream);
  }
  if (signals.last_row_mass && sees_window) {
    for (int layer = 0; layer < shape.num_layers; ++layer) SumWindow(sequence, layer, std::min(1, window_rows), &last_row_mass, stream);
  }
  if (signals.key_norms || signals.key_alignment) SummariseKeys(sequence, stream);
  if (signals.output_norms) {
    flat_norms.clear();
    for (const std::vector<float>& layer : sequence.output_norms) flat_norms.insert(flat_norms.end(), layer.begin(), layer.end());
    view.output_norms = flat_norms;
  }
  flattened.resize(static_cast<size_t>(num_lists()));
  format_runs.resize(static_cast<size_t>(num_lists()));
  views.assign(static_cast<size_t>(num_lists()), ListView{});
  while (static_cast<int>(counting.size()) < sequence.num_tokens) counting.push_back(static_cast<int32_t>(counting.size()));
  const bool shows_queries = !signals.window_mass && !signals.last_row_mass;
  if (shows_queries) {
    gathered_queries.resize(static_cast<size_t>(window_rows) * heads * static_cast<size_t>(shape.head_dim) * views.size());
  }
  for (size_t i = 0; i < views.size(); ++i) {
    ListView& list = views[i];
    const size_t entries = static_cast<size_t>(sequence.lists[i].entries());
    list.layer = static_cast<int>(i) / shape.num_kv_heads;
    list.kv_head = static_cast<int>(i) % shape.num_kv_heads;
    ViewPositions(sequence.lists[i], i, &list);
    ViewRuns(sequence.lists[i], i, &list);
    if (shows_queries) ViewQueries(sequence, i, window_rows, &list);
    for (size_t r = 0; r < heads; ++r) {
      if (signals.window_mass && sees_window) list.window_mass.push_back({window_mass[i * heads + r].data(), entries});
      if (signals.last_row_mass && sees_window) list.last_row_mass.push_back({last_row_mass[i * heads + r].data(), entries});
      if (signals.columns.stride > 0) list.column_sums.push_back(sequence.columns[i * heads + r]);
    }
    if (signals.key_norms || signals.key_alignment) list.key_norms = key_norms[i];
    if (signals.key_alignment) list.key_alignment = key_alignment[i];
  }
  view.lists = views;
  return view;
}

void KvCache::Impl::ViewPositions(const KvList& list, size_t index, ListView* view) {
  const PositionPlane& positions = list.positions;
  const std::span<const int32_t> run(counting.data() + (positions.run_count() > 0 ? positions.run_begin() : 0),
                                     static_cast<size_t>(positions.run_count()));
  view->positions = run;
  if (positions.chosen().empty()) return;
  flattened[index].assign(positions.chosen().begin(), positions.chosen().end());
  flattened[index].insert(flattened[index].end(), run.begin(), run.end());
  view->positions = flattened[index];
}

void KvCache::Impl::ViewRuns(const KvList& list, size_t index, ListView* view) {
  std::vector<FormatRun>& runs = format_runs[index];
  runs.clear();
  for (const ListRun& run : list.Runs()) runs.push_back({run.format, run.first_entry, run.end_entry});
  view->runs = runs;
}

void KvCache::Impl::ViewQueries(const Sequence& sequence, size_t index, int rows, ListView* view) {
  const size_t groups = static_cast<size_t>(shape.num_kv_heads);
  const size_t head_values = static_cast<size_t>(heads_per_group()) * static_cast<size_t>(shape.head_dim);
  const size_t query_values = static_cast<size_t>(rows) * head_values;
  const QueryWindow& window = sequence.window;
  const int end = sequence.signals.window_goes_on ? sequence.num_tokens : sequence.num_prompt;
  for (int r = 0; r < rows; ++r) {
    const size_t slot = static_cast<size_t>((end - rows + r) % window.rows);
    const float* from = window.values.data() +
                        (index / groups * static_cast<size_t>(window.rows) + slot) * groups * head_values + index % groups * head_values;
    std::copy_n(from, head_values, gathered_queries.data() + index * query_values + static_cast<size_t>(r) * head_values);
  }
  view->window_queries = {gathered_queries.data() + index * query_values, query_values};
}

// The last decode row's masses. Numbered by the table that attention has read, so policies are called before it changes.
void KvCache::Impl::ViewMasses(const KvBatch::State& state, int item_index, size_t index, ListView* view) {
  const Sequence& sequence = *state.items[static_cast<size_t>(item_index)].sequence;
  const size_t groups = static_cast<size_t>(shape.num_kv_heads), heads = static_cast<size_t>(heads_per_group());
  const size_t layer = index / groups, lists_of_layer = state.items.size() * groups;
  const int32_t* list_begin = state.list_begin + layer * (lists_of_layer + 1) + static_cast<size_t>(item_index) * groups + index % groups;
  const size_t first_page = static_cast<size_t>(*list_begin);
  const KvList& list = sequence.lists[index];
  if (sequence.signals.page_mass) {
    view->page_mass = {state.mass_buffer.host<float>() + first_page * heads, list.pages.size() * heads};
    page_begins.resize(sequence.lists.size());
    std::vector<int32_t>& begins = page_begins[index];
    begins.clear();
    int32_t entry = 0;
    for (const PageRef& page : list.pages) begins.push_back(entry), entry += page.count;
    view->page_begin = begins;
  }
  if (!sequence.signals.entry_probability) return;
  const float* by_number = state.probability_buffer.host<float>() + first_page * kPageEntries * heads;
  view->entry_probability = {by_number, static_cast<size_t>(list.entries()) * heads};
  if (list.regular()) return;
  gathered_probability.resize(sequence.lists.size());
  GatherFromPages(by_number, list.pages, static_cast<int>(heads), &gathered_probability[index]);
  view->entry_probability = gathered_probability[index];
}

}  // namespace loupe
