// The one operator that carries out what policies say. A repack is a transaction: validate, reserve, copy, swap, release.
// Until the swap nothing has changed; the released pages retire, so work given to the stream before may still read them.
// Pages that no other sequence shares are compacted where they are, after what the stream has still to read from them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kernels/spherical.h"
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

absl::Status CheckMerge(const ListAction& action, const MergedEntry& merged, const KvList& list, int num_tokens) {
  const int entries = list.entries();
  if (merged.sources.empty() || merged.weights.size() != merged.sources.size()) {
    return RefuseList(action, absl::StrFormat("merges %d entries with %d weights; give one weight an entry, at least one",
                                              merged.sources.size(), merged.weights.size()));
  }
  for (const int32_t source : merged.sources) {
    if (source < 0 || source >= entries) return RefuseList(action, absl::StrFormat("merges entry %d of [0, %d)", source, entries));
    if (IsCoded(list.pages[static_cast<size_t>(list.Locate(source).page)].page_class().format)) {
      return RefuseList(action, absl::StrFormat("merges entry %d, which is coded; only dense entries merge", source));
    }
  }
  if (merged.position >= 0 && merged.position < num_tokens) return absl::OkStatus();
  return RefuseList(action, absl::StrFormat("puts a mean at position %d of [0, %d)", merged.position, num_tokens));
}

absl::Status CheckCoded(const ListAction& action, const KvShape& shape, const PageFormat& landing, int entries) {
  std::vector<uint8_t> seen(static_cast<size_t>(entries), 0);
  for (const int32_t entry : action.keep) seen[static_cast<size_t>(entry)] = 1;
  if (!shape.windows.empty() && shape.windows[static_cast<size_t>(action.layer)] > 0) {
    return RefuseList(action, absl::StrFormat("has a sliding window of %d positions; such lists are not coded",
                                              shape.windows[static_cast<size_t>(action.layer)]));
  }
  for (size_t i = 0; i < action.coded.size(); ++i) {
    const CodedRun& run = action.coded[i];
    if (IsCoded(run.format) && shape.head_dim % spherical::kDimStep != 0) {
      return RefuseList(action, absl::StrFormat("has heads of %d dimensions; only multiples of %d are coded", shape.head_dim,
                                                spherical::kDimStep));
    }
    const bool twice = std::any_of(action.coded.begin(), action.coded.begin() + static_cast<std::ptrdiff_t>(i),
                                   [&](const CodedRun& other) { return other.format == run.format; });
    if (twice || run.format == landing) {
      return RefuseList(action, twice ? "codes two runs in one format; give it one" : "codes a run in the format in which entries land");
    }
    if (absl::Status s = CheckAscending(action, run.entries, "codes", entries); !s.ok()) return s;
    for (const int32_t entry : run.entries) {
      if (std::exchange(seen[static_cast<size_t>(entry)], 1)) return RefuseList(action, absl::StrFormat("holds entry %d twice", entry));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckAction(const ListAction& action, const KvShape& shape, const KvList& list, const PageFormat& landing, int num_tokens) {
  const int entries = list.entries();
  if (action.overwrite && (!action.keep.empty() || !action.merge.empty() || !action.coded.empty())) {
    return RefuseList(action, "overwrites and keeps; give it one of the two");
  }
  if (absl::Status s = CheckAscending(action, action.overwrite ? action.drop : action.keep, action.overwrite ? "drops" : "keeps", entries);
      !s.ok()) {
    return s;
  }
  for (const MergedEntry& merged : action.merge) {
    if (absl::Status s = CheckMerge(action, merged, list, num_tokens); !s.ok()) return s;
  }
  if (!action.merge.empty() && IsCoded(landing)) return RefuseList(action, "merges entries, but new ones are coded; means are dense");
  return action.coded.empty() ? absl::OkStatus() : CheckCoded(action, shape, landing, entries);
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
    const absl::Status s = CheckAction(action, shape, sequence.lists[list], sequence.landing, sequence.num_tokens);
    if (!s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status KvCache::Impl::Repack(Sequence& sequence, std::span<const ListAction> list_actions, Stream& stream) {
  if (const absl::Status status = CheckActions(shape, sequence, list_actions); !status.ok()) return status;
  Reservation reservation(&pool);
  if (!PlanRepack(sequence, list_actions, &reservation, true) && !PlanRepack(sequence, list_actions, &reservation, false)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("repacking %d lists of sequence %d needs %d bytes of new pages; %d are free", list_actions.size(),
                        sequence.id, reservation.bytes_asked(), pool.BytesFree(landing_class) + reservation.bytes_taken()));
  }
  RunRepack(stream);
  sequence.device_bytes += reservation.bytes_taken();
  sequence.peak_device_bytes = std::max(sequence.peak_device_bytes, sequence.device_bytes);
  for (RepackedList& plan : repacked) SwapList(sequence, &plan);
  for (const OverwrittenList& plan : overwritten) Overwrite(sequence, plan);
  reservation.Keep();
  return absl::OkStatus();
}

// Means and codes read entries that copies may write over; within pages that codes go into, what is there moves first.
void KvCache::Impl::RunRepack(Stream& stream) {
  const auto copy = [&](const std::vector<EntryCopy>& entries) {
    if (entries.empty()) return;
    CopyEntriesArgs args;
    args.copies = entries.data();
    args.num_copies = static_cast<int64_t>(entries.size());
    args.head_dim = shape.head_dim;
    args.arena = arena->data();
    backend.CopyEntries(args, stream);
  };
  copy(first_copies);
  if (!merges.empty()) {
    MergeEntriesArgs merge;
    merge.sources = merge_sources.data();
    merge.merges = merges.data();
    merge.num_merges = static_cast<int64_t>(merges.size());
    merge.head_dim = shape.head_dim;
    merge.arena = arena->data();
    backend.MergeEntries(merge, stream);
  }
  if (!transcodes.empty()) {
    TranscodeEntriesArgs transcode;
    transcode.entries = transcodes.data();
    transcode.num_entries = static_cast<int64_t>(transcodes.size());
    transcode.head_dim = shape.head_dim;
    transcode.arena = arena->data();
    if (mean_keys) transcode.mean_keys = MakeTensor(mean_keys->data(), DType::kF32, num_lists(), shape.head_dim);
    transcode.faults = Faults();
    backend.TranscodeEntries(transcode, stream);
  }
  copy(copies);
}

void KvCache::Impl::SwapList(Sequence& sequence, RepackedList* plan) {
  KvList& list = sequence.lists[static_cast<size_t>(plan->list)];
  ++sequence.version;
  const int64_t kept = std::count_if(plan->sources.begin(), plan->sources.end(), [](int32_t s) { return s >= 0; });
  const int64_t dropped = list.entries() - kept - plan->merged;
  sequence.entries_dropped += dropped;
  sequence.entries_merged += plan->merged;
  entries_dropped += dropped;
  // A page that stays may hold more or fewer entries now; it is nobody else's then.
  for (size_t page = 0; page < list.pages.size(); ++page) {
    if (plan->held[page]) {
      resident_entries -= list.pages[page].count;
    } else {
      ReleasePage(sequence, list.pages[page]);
    }
  }
  list.before_tail = 0;
  for (const PageRef& page : plan->pages) {
    resident_entries += page.count;
    sequence.coded |= IsCoded(page.page_class().format);
    if (&page != &plan->pages.back()) list.before_tail += page.count;
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
  list.before_tail = 0;
  if (pages > 0) {
    list.before_tail = (static_cast<int>(pages) - 1) * kPageEntries;
    const int left = plan.size - list.before_tail;
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
