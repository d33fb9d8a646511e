// Policies act, and the one operator that carries out what they say. A repack is a transaction: validate, reserve, copy,
// swap, release. Until the swap nothing has changed; the released pages retire, so work given to the stream before may
// still read them.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {

void KvCache::Impl::RunPolicy(const KvBatch::State& state, int item_index, Stream& stream) {
  const StepItem& item = state.items[static_cast<size_t>(item_index)];
  Sequence& sequence = *item.sequence;
  sequence.prefill_pending |= item.ends_prefill;
  const bool after_prefill = sequence.prefill_pending;
  if (!after_prefill && item.num_decode == 0) return;
  if (!sequence.policy->keeps_everything()) {
    BuildViews(state, item_index, after_prefill);
    actions.clear();
    if (after_prefill) {
      sequence.policy->AfterPrefill(views, &actions);
    } else {
      sequence.policy->AfterDecode(views, &actions);
    }
    const absl::Status status = Repack(sequence, actions, stream);
    if (absl::IsResourceExhausted(status)) return;
    LOUPE_CHECK(status.ok()) << "policy " << sequence.policy->name() << ": " << status.ToString();
  }
  if (!after_prefill) return;
  sequence.prefill_pending = false;
  sequence.prompt_tokens = sequence.window.num_prompt;
  sequence.prompt_device_bytes = sequence.device_bytes;
}

void KvCache::Impl::BuildViews(const KvBatch::State& state, int item_index, bool after_prefill) {
  const StepItem& item = state.items[static_cast<size_t>(item_index)];
  const Sequence& sequence = *item.sequence;
  const size_t groups = static_cast<size_t>(shape.num_kv_heads), heads = static_cast<size_t>(heads_per_group());
  const size_t head_values = heads * static_cast<size_t>(shape.head_dim);
  const QueryWindow& window = sequence.window;
  const int query_rows = after_prefill ? std::min(window.rows, window.num_prompt) : 0;
  const size_t query_values = static_cast<size_t>(query_rows) * head_values;
  gathered_queries.resize(query_values * static_cast<size_t>(num_lists()));
  flattened.resize(static_cast<size_t>(num_lists()));
  views.assign(static_cast<size_t>(num_lists()), ListView{});
  while (static_cast<int>(counting.size()) < sequence.num_tokens) counting.push_back(static_cast<int32_t>(counting.size()));

  const Signals signals = sequence.policy->signals();
  const bool has_masses = !after_prefill && item.num_decode == 1;
  for (size_t i = 0; i < views.size(); ++i) {
    ListView& view = views[i];
    const KvList& list = sequence.lists[i];
    const PositionPlane& positions = list.positions;
    const size_t layer = i / groups, g = i % groups;
    view.layer = static_cast<int>(layer);
    view.kv_head = static_cast<int>(g);
    const std::span<const int32_t> run(counting.data() + (positions.run_count() > 0 ? positions.run_begin() : 0),
                                       static_cast<size_t>(positions.run_count()));
    if (positions.chosen().empty()) {
      view.positions = run;
    } else {
      flattened[i].assign(positions.chosen().begin(), positions.chosen().end());
      flattened[i].insert(flattened[i].end(), run.begin(), run.end());
      view.positions = flattened[i];
    }
    for (int r = 0; r < query_rows; ++r) {
      const size_t slot = static_cast<size_t>((window.num_prompt - query_rows + r) % window.rows);
      const float* from = window.values.data() + (layer * static_cast<size_t>(window.rows) + slot) * groups * head_values + g * head_values;
      std::copy_n(from, head_values, gathered_queries.data() + i * query_values + static_cast<size_t>(r) * head_values);
    }
    view.window_queries = {gathered_queries.data() + i * query_values, query_values};
    if (!has_masses) continue;
    const size_t lists_of_layer = state.items.size() * groups;
    const int32_t* list_begin = state.list_begin + layer * (lists_of_layer + 1) + static_cast<size_t>(item_index) * groups + g;
    const size_t first_page = static_cast<size_t>(state.page_begin[layer] + *list_begin);
    if (signals.page_mass) {
      view.page_mass = {state.mass_buffer.as<float>() + first_page * heads, list.pages.size() * heads};
    }
    if (signals.entry_probability) {
      view.entry_probability = {state.probability_buffer.as<float>() + first_page * kPageEntries * heads,
                                static_cast<size_t>(list.entries()) * heads};
    }
  }
}

absl::Status KvCache::Impl::ValidateActions(const Sequence& sequence, std::span<const ListAction> list_actions) {
  std::vector<uint8_t> seen(static_cast<size_t>(num_lists()), 0);
  for (const ListAction& action : list_actions) {
    if (action.layer < 0 || action.layer >= shape.num_layers || action.kv_head < 0 || action.kv_head >= shape.num_kv_heads) {
      return absl::InvalidArgumentError(absl::StrFormat("list (layer %d, kv head %d) is outside %d layers and %d kv heads",
                                                        action.layer, action.kv_head, shape.num_layers, shape.num_kv_heads));
    }
    const size_t list = static_cast<size_t>(action.layer * shape.num_kv_heads + action.kv_head);
    if (seen[list]) {
      return absl::InvalidArgumentError(
          absl::StrFormat("list (layer %d, kv head %d) has two actions; give it one", action.layer, action.kv_head));
    }
    seen[list] = 1;
    const int entries = sequence.lists[list].entries();
    int32_t previous = -1;
    for (int32_t entry : action.keep) {
      if (entry <= previous || entry >= entries) {
        return absl::InvalidArgumentError(
            absl::StrFormat("list (layer %d, kv head %d) keeps entry %d after %d; entries ascend and lie in [0, %d)", action.layer,
                            action.kv_head, entry, previous, entries));
      }
      previous = entry;
    }
  }
  return absl::OkStatus();
}

// Fills `repacked` and `copies`. False if a page is missing.
bool KvCache::Impl::PlanRepack(const Sequence& sequence, std::span<const ListAction> list_actions, Reservation* reservation,
                               bool small_tails) {
  repacked.clear();
  copies.clear();
  reservation->GiveBack();
  for (const ListAction& action : list_actions) {
    const int list_index = action.layer * shape.num_kv_heads + action.kv_head;
    const KvList& list = sequence.lists[static_cast<size_t>(list_index)];
    const std::vector<int32_t>& keep = action.keep;
    const int total = static_cast<int>(keep.size());
    if (total == list.entries()) continue;  // ascending and complete: nothing to do
    RepackedList plan;
    plan.list = list_index;
    // Leading pages that are kept whole stay where they are. Entries ascend, so the last one of a page says it all.
    const auto stays = [&](int page) {
      const int last = (page + 1) * kPageEntries - 1;
      return last < total && keep[static_cast<size_t>(last)] == last;
    };
    while (stays(plan.num_reused)) ++plan.num_reused;
    PageClass c = landing_class;
    for (size_t page = static_cast<size_t>(plan.num_reused); page < list.pages.size(); ++page) {
      const PageClass old = list.pages[page].page_class();
      LOUPE_CHECK(old.format == c.format) << "a repack copies entries of one format only";
      c.log_weights |= old.log_weights;
    }
    for (int entry = plan.num_reused * kPageEntries; entry < total; ++entry) {
      const int slot = entry % kPageEntries;
      if (slot == 0) {
        const int count = std::min(total - entry, kPageEntries);
        c.small = small_tails && count <= kSmallPageEntries;
        plan.new_pages.push_back(MakePageRef(reservation->Take(c).value_or(0), count, c));
      }
      const int from = keep[static_cast<size_t>(entry)];
      EntryCopy copy{list.pages[static_cast<size_t>(from / kPageEntries)], plan.new_pages.back()};
      copy.from.count = static_cast<uint16_t>(from % kPageEntries);
      copy.to.count = static_cast<uint16_t>(slot);
      copies.push_back(copy);
    }
    plan.positions.reserve(keep.size());
    for (int32_t entry : keep) plan.positions.push_back(list.positions[entry]);
    repacked.push_back(std::move(plan));
  }
  return !reservation->failed();
}

absl::Status KvCache::Impl::Repack(Sequence& sequence, std::span<const ListAction> list_actions, Stream& stream) {
  if (const absl::Status status = ValidateActions(sequence, list_actions); !status.ok()) return status;
  Reservation reservation(&pool);
  if (!PlanRepack(sequence, list_actions, &reservation, true) && !PlanRepack(sequence, list_actions, &reservation, false)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("repacking %d lists of sequence %d needs %d bytes of new pages; %d are free", list_actions.size(),
                        sequence.id, reservation.bytes_asked(), pool.BytesFree(landing_class) + reservation.bytes_taken()));
  }
  CopyEntriesArgs args;
  args.copies = copies.data();
  args.num_copies = static_cast<int64_t>(copies.size());
  args.head_dim = shape.head_dim;
  args.arena = arena->data();
  if (args.num_copies > 0) backend.CopyEntries(args, stream);

  sequence.device_bytes += reservation.bytes_taken();
  sequence.peak_device_bytes = std::max(sequence.peak_device_bytes, sequence.device_bytes);
  for (RepackedList& plan : repacked) {
    KvList& list = sequence.lists[static_cast<size_t>(plan.list)];
    const int64_t dropped = list.entries() - static_cast<int64_t>(plan.positions.size());
    sequence.entries_dropped += dropped;
    entries_dropped += dropped;
    for (size_t page = static_cast<size_t>(plan.num_reused); page < list.pages.size(); ++page) ReleasePage(sequence, list.pages[page]);
    list.pages.resize(static_cast<size_t>(plan.num_reused));
    for (const PageRef& ref : plan.new_pages) {
      list.pages.push_back(ref);
      resident_entries += ref.count;
    }
    list.positions.Assign(std::move(plan.positions), sequence.num_tokens);
  }
  reservation.Keep();
  return absl::OkStatus();
}

}  // namespace loupe
