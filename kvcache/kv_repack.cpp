// The one operator that carries out what policies say. A repack is a transaction: validate, reserve, copy, swap, release.
// Until the swap nothing has changed; the released pages retire, so work given to the stream before may still read them.
// Pages that no other sequence shares are compacted where they are, after what the stream has still to read from them.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {
namespace {

absl::Status RefuseList(const ListAction& action, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrFormat("list (layer %d, kv head %d) %s", action.layer, action.kv_head, why));
}

absl::Status CheckAscending(const ListAction& action, const std::vector<int32_t>& indexes, const char* verb, int entries) {
  int32_t previous = -1;
  for (const int32_t entry : indexes) {
    if (entry <= previous || entry >= entries) {
      return RefuseList(action, absl::StrFormat("%s entry %d after %d; entries ascend and lie in [0, %d)", verb, entry, previous, entries));
    }
    previous = entry;
  }
  return absl::OkStatus();
}

absl::Status CheckMerge(const ListAction& action, const MergedEntry& merged, int entries, int num_tokens) {
  if (merged.sources.empty() || merged.weights.size() != merged.sources.size()) {
    return RefuseList(action, absl::StrFormat("merges %d entries with %d weights; give one weight an entry, at least one",
                                              merged.sources.size(), merged.weights.size()));
  }
  for (const int32_t source : merged.sources) {
    if (source < 0 || source >= entries) return RefuseList(action, absl::StrFormat("merges entry %d of [0, %d)", source, entries));
  }
  if (merged.position >= 0 && merged.position < num_tokens) return absl::OkStatus();
  return RefuseList(action, absl::StrFormat("puts a mean at position %d of [0, %d)", merged.position, num_tokens));
}

absl::Status CheckAction(const ListAction& action, int entries, int num_tokens) {
  if (action.overwrite && (!action.keep.empty() || !action.merge.empty())) {
    return RefuseList(action, "overwrites and keeps; give it one of the two");
  }
  if (absl::Status s = CheckAscending(action, action.overwrite ? action.drop : action.keep, action.overwrite ? "drops" : "keeps", entries);
      !s.ok()) {
    return s;
  }
  for (const MergedEntry& merged : action.merge) {
    if (absl::Status s = CheckMerge(action, merged, entries, num_tokens); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status CheckActions(const KvShape& shape, const Sequence& sequence, std::span<const ListAction> actions) {
  std::vector<uint8_t> seen(sequence.lists.size(), 0);
  for (const ListAction& action : actions) {
    if (action.layer < 0 || action.layer >= shape.num_layers || action.kv_head < 0 || action.kv_head >= shape.num_kv_heads) {
      return RefuseList(action, absl::StrFormat("is outside %d layers and %d kv heads", shape.num_layers, shape.num_kv_heads));
    }
    const size_t list = static_cast<size_t>(action.layer * shape.num_kv_heads + action.kv_head);
    if (seen[list]) return RefuseList(action, "has two actions; give it one");
    seen[list] = 1;
    if (absl::Status s = CheckAction(action, sequence.lists[list].entries(), sequence.num_tokens); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// What a list will hold, in order: an entry of its own (its index) or a mean (-1 - its index).
std::vector<int32_t> Records(const ListAction& action, const KvList& list) {
  const int entries = list.entries();
  if (!action.overwrite) {
    std::vector<int32_t> records = action.keep;
    for (size_t m = 0; m < action.merge.size(); ++m) records.push_back(-1 - static_cast<int32_t>(m));
    const auto position = [&](int32_t r) { return r >= 0 ? list.positions[r] : action.merge[static_cast<size_t>(-1 - r)].position; };
    if (!action.merge.empty()) {
      std::stable_sort(records.begin(), records.end(), [&](int32_t a, int32_t b) { return position(a) < position(b); });
    }
    return records;
  }
  std::vector<int32_t> records;
  size_t next = 0;
  for (int32_t e = 0; e < entries; ++e) {
    if (next < action.drop.size() && action.drop[next] == e) {
      ++next;
    } else {
      records.push_back(e);
    }
  }
  return records;
}

}  // namespace

// Whether the pages from `first_page` on may be written where they are: nobody shares them, and all can hold the same.
bool KvCache::Impl::OwnsPages(const Sequence& sequence, const KvList& list, int first_page) const {
  for (size_t page = static_cast<size_t>(first_page); page < list.pages.size(); ++page) {
    if (sequence.may_share && pool.references(list.pages[page].unit) > 1) return false;
    if (list.pages[page].log_weights != list.pages[0].log_weights) return false;
  }
  return true;
}

// Fills `repacked`, `overwritten`, `copies` and `merges`. False if a page is missing.
bool KvCache::Impl::PlanRepack(const Sequence& sequence, std::span<const ListAction> list_actions, Reservation* reservation,
                               bool small_tails) {
  repacked.clear();
  overwritten.clear();
  copies.clear();
  merges.clear();
  merge_sources.clear();
  reservation->GiveBack();
  for (const ListAction& action : list_actions) {
    const int list_index = action.layer * shape.num_kv_heads + action.kv_head;
    const KvList& list = sequence.lists[static_cast<size_t>(list_index)];
    // A window finds its entries by their order.
    if (action.overwrite && window(action.layer) == 0 && OwnsPages(sequence, list, 0)) {
      if (!action.drop.empty()) PlanOverwrite(action, list);
      continue;
    }
    RepackedList plan;
    plan.list = list_index;
    plan.sources = Records(action, list);
    const int total = static_cast<int>(plan.sources.size());
    if (total == list.entries() && action.merge.empty()) continue;  // complete: nothing to do
    int same = 0;  // leading entries that stay where they are
    while (same < total && plan.sources[static_cast<size_t>(same)] == same) ++same;
    // Leading pages that are kept whole are not touched and may stay shared; those after them are written.
    const bool in_place = action.merge.empty() && OwnsPages(sequence, list, same / kPageEntries);
    PlanPages(action, list, same, in_place, small_tails, reservation, &plan);
    repacked.push_back(std::move(plan));
  }
  return !reservation->failed();
}

void KvCache::Impl::PlanOverwrite(const ListAction& action, const KvList& list) {
  OverwrittenList plan;
  plan.list = action.layer * shape.num_kv_heads + action.kv_head;
  plan.size = list.entries() - static_cast<int>(action.drop.size());
  const auto slot = [&](int32_t entry) {
    PageRef ref = list.pages[static_cast<size_t>(entry / kPageEntries)];
    ref.count = static_cast<uint16_t>(entry % kPageEntries);
    return ref;
  };
  // The entries behind the new end that stay, in order, fill the holes before it, in order.
  auto gone = std::lower_bound(action.drop.begin(), action.drop.end(), plan.size);
  int32_t from = plan.size;
  for (const int32_t hole : action.drop) {
    if (hole >= plan.size) break;
    while (gone != action.drop.end() && *gone == from) ++gone, ++from;
    plan.moves.emplace_back(hole, from);
    copies.push_back({slot(from), slot(hole)});
    ++from;
  }
  overwritten.push_back(std::move(plan));
}

// Where each record of a list goes: into the list's own pages if it may, else into new ones.
void KvCache::Impl::PlanPages(const ListAction& action, const KvList& list, int same, bool in_place, bool small_tails,
                              Reservation* reservation, RepackedList* plan) {
  const int total = static_cast<int>(plan->sources.size());
  PageClass c = landing_class;
  for (const PageRef& page : list.pages) {
    LOUPE_CHECK(page.page_class().format == c.format) << "a repack copies entries of one format only";
    c.log_weights |= page.page_class().log_weights;
  }
  c.log_weights |= !action.merge.empty();
  const auto fits_small_page = [&](int count) {
    return small_tails && count <= kSmallPageEntries && pool.CanTake({c.format, true, c.log_weights});
  };
  plan->num_held = same / kPageEntries;
  if (in_place) {
    plan->num_held = (total + kPageEntries - 1) / kPageEntries;
    const int tail = total % kPageEntries;
    // A tail that fits a small page moves into one.
    if (tail > 0 && fits_small_page(tail) && !list.pages[static_cast<size_t>(plan->num_held - 1)].small) {
      --plan->num_held;
    }
  }
  plan->pages.assign(list.pages.begin(), list.pages.begin() + plan->num_held);
  for (int page = 0; page < plan->num_held; ++page) {
    plan->pages[static_cast<size_t>(page)].count = static_cast<uint16_t>(std::min(total - page * kPageEntries, kPageEntries));
  }
  for (int entry = std::min(same, plan->num_held * kPageEntries); entry < total; ++entry) {
    const int slot = entry % kPageEntries;
    if (slot == 0 && entry / kPageEntries >= plan->num_held) {
      const int count = std::min(total - entry, kPageEntries);
      c.small = fits_small_page(count);
      plan->pages.push_back(MakePageRef(reservation->Take(c).value_or(0), count, c));
    }
    PageRef to = plan->pages[static_cast<size_t>(entry / kPageEntries)];
    to.count = static_cast<uint16_t>(slot);
    const int32_t source = plan->sources[static_cast<size_t>(entry)];
    if (source == entry && entry / kPageEntries < plan->num_held) continue;
    const auto entry_at = [&](int32_t index) {
      PageRef from = list.pages[static_cast<size_t>(index / kPageEntries)];
      from.count = static_cast<uint16_t>(index % kPageEntries);
      return from;
    };
    if (source >= 0) {
      copies.push_back({entry_at(source), to});
      continue;
    }
    const MergedEntry& merged = action.merge[static_cast<size_t>(-1 - source)];
    merges.push_back({static_cast<int32_t>(merge_sources.size()), static_cast<int32_t>(merged.sources.size()), merged.log_weight, to});
    for (size_t s = 0; s < merged.sources.size(); ++s) merge_sources.push_back({entry_at(merged.sources[s]), merged.weights[s]});
    plan->merged += static_cast<int64_t>(merged.sources.size());
  }
  for (int32_t& source : plan->sources) {
    plan->positions.push_back(source >= 0 ? list.positions[source] : action.merge[static_cast<size_t>(-1 - source)].position);
    source = std::max(source, -1);
  }
}

absl::Status KvCache::Impl::Repack(Sequence& sequence, std::span<const ListAction> list_actions, Stream& stream) {
  if (const absl::Status status = CheckActions(shape, sequence, list_actions); !status.ok()) return status;
  Reservation reservation(&pool);
  if (!PlanRepack(sequence, list_actions, &reservation, true) && !PlanRepack(sequence, list_actions, &reservation, false)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("repacking %d lists of sequence %d needs %d bytes of new pages; %d are free", list_actions.size(),
                        sequence.id, reservation.bytes_asked(), pool.BytesFree(landing_class) + reservation.bytes_taken()));
  }
  // Means first: they read entries, and copies may write over those.
  MergeEntriesArgs merge;
  merge.sources = merge_sources.data();
  merge.merges = merges.data();
  merge.num_merges = static_cast<int64_t>(merges.size());
  merge.head_dim = shape.head_dim;
  merge.arena = arena->data();
  if (merge.num_merges > 0) backend.MergeEntries(merge, stream);
  CopyEntriesArgs args;
  args.copies = copies.data();
  args.num_copies = static_cast<int64_t>(copies.size());
  args.head_dim = shape.head_dim;
  args.arena = arena->data();
  if (args.num_copies > 0) backend.CopyEntries(args, stream);

  sequence.device_bytes += reservation.bytes_taken();
  sequence.peak_device_bytes = std::max(sequence.peak_device_bytes, sequence.device_bytes);
  for (RepackedList& plan : repacked) SwapList(sequence, &plan);
  for (const OverwrittenList& plan : overwritten) Overwrite(sequence, plan);
  reservation.Keep();
  return absl::OkStatus();
}

void KvCache::Impl::SwapList(Sequence& sequence, RepackedList* plan) {
  KvList& list = sequence.lists[static_cast<size_t>(plan->list)];
  ++sequence.version;
  const int64_t kept = std::count_if(plan->sources.begin(), plan->sources.end(), [](int32_t s) { return s >= 0; });
  const int64_t dropped = list.entries() - kept - plan->merged;
  sequence.entries_dropped += dropped;
  sequence.entries_merged += plan->merged;
  entries_dropped += dropped;
  for (size_t page = static_cast<size_t>(plan->num_held); page < list.pages.size(); ++page) ReleasePage(sequence, list.pages[page]);
  for (size_t page = 0; page < plan->pages.size(); ++page) {
    const bool held = page < static_cast<size_t>(plan->num_held);
    resident_entries += plan->pages[page].count - (held ? list.pages[page].count : 0);
  }
  list.pages = std::move(plan->pages);
  list.positions.Assign(std::move(plan->positions), sequence.num_tokens);
  if (sequence.columns.empty()) return;
  const size_t heads = static_cast<size_t>(heads_per_group());
  std::vector<float> moved(plan->sources.size());
  for (size_t r = 0; r < heads; ++r) {
    std::vector<float>& sums = sequence.columns[static_cast<size_t>(plan->list) * heads + r];
    for (size_t e = 0; e < moved.size(); ++e) moved[e] = plan->sources[e] >= 0 ? sums[static_cast<size_t>(plan->sources[e])] : 0.f;
    sums = moved;
  }
}

void KvCache::Impl::Overwrite(Sequence& sequence, const OverwrittenList& plan) {
  KvList& list = sequence.lists[static_cast<size_t>(plan.list)];
  ++sequence.version;
  const int dropped = list.entries() - plan.size;
  sequence.entries_dropped += dropped;
  entries_dropped += dropped;
  const size_t pages = static_cast<size_t>((plan.size + kPageEntries - 1) / kPageEntries);
  for (size_t page = pages; page < list.pages.size(); ++page) ReleasePage(sequence, list.pages[page]);
  list.pages.resize(pages);
  if (pages > 0) {
    const int left = plan.size - (static_cast<int>(pages) - 1) * kPageEntries;
    resident_entries += left - list.pages.back().count;
    list.pages.back().count = static_cast<uint16_t>(left);
  }
  list.positions.Overwrite(plan.moves, plan.size, sequence.num_tokens);
  if (sequence.columns.empty()) return;
  const size_t heads = static_cast<size_t>(heads_per_group());
  for (size_t r = 0; r < heads; ++r) {
    std::vector<float>& sums = sequence.columns[static_cast<size_t>(plan.list) * heads + r];
    for (const auto& [to, from] : plan.moves) sums[static_cast<size_t>(to)] = sums[static_cast<size_t>(from)];
    sums.resize(static_cast<size_t>(plan.size));
  }
}

}  // namespace loupe
