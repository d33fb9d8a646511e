// Which pages a repack writes, and which entries go where. A list's target is runs, each of one format; what the list has
// of that format already stays where it is as far as it can: leading pages that hold the same entries are not touched and may
// stay shared; pages that nobody shares are compacted in place; everything else goes to new pages.
#include <algorithm>
#include <numeric>

#include "kernels/check.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {
namespace {

// What a list will hold in the landing format, in order: an entry of its own (its index) or a mean (-1 - its index).
std::vector<int32_t> LandingRecords(const ListAction& action, const KvList& list) {
  std::vector<int32_t> records = action.keep;
  for (size_t m = 0; m < action.merge.size(); ++m) records.push_back(-1 - static_cast<int32_t>(m));
  const auto position = [&](int32_t r) { return r >= 0 ? list.positions[r] : action.merge[static_cast<size_t>(-1 - r)].position; };
  if (!action.merge.empty()) {
    std::stable_sort(records.begin(), records.end(), [&](int32_t a, int32_t b) { return position(a) < position(b); });
  }
  return records;
}

// The runs that the list shall have. Those that it has already, under any order, know their pages.
std::vector<TargetRun> Targets(const ListAction& action, const KvList& list, const PageFormat& landing) {
  const std::vector<ListRun> present = list.Runs();
  std::vector<TargetRun> targets;
  const auto add = [&](const PageFormat& format, std::vector<int32_t> records) {
    TargetRun& run = targets.emplace_back();
    const auto same = std::find_if(present.begin(), present.end(), [&](const ListRun& p) { return p.format == format; });
    if (same != present.end()) static_cast<ListRun&>(run) = *same;
    run.format = format;
    run.records = std::move(records);
  };
  if (action.overwrite) {
    size_t next = 0;
    for (const ListRun& run : present) {
      std::vector<int32_t> left;
      for (int32_t e = run.first_entry; e < run.end_entry; ++e) {
        const bool goes = next < action.drop.size() && action.drop[next] == e;
        goes ? static_cast<void>(++next) : left.push_back(e);
      }
      add(run.format, std::move(left));
    }
    return targets;
  }
  for (const CodedRun& coded : action.coded) add(coded.format, coded.entries);
  add(landing, LandingRecords(action, list));
  return targets;
}

// Who takes entries from whom.
void Relate(const ListAction& action, std::vector<TargetRun>* targets) {
  const auto owner = [&](int32_t entry) {
    return std::find_if(targets->begin(), targets->end(), [&](const TargetRun& r) { return r.Owns(entry); });
  };
  for (TargetRun& run : *targets) {
    for (const int32_t record : run.records) {
      if (run.Owns(record)) continue;
      run.takes = true;
      if (const auto from = owner(record); record >= 0 && from != targets->end()) from->gives = true;
    }
  }
  for (const MergedEntry& merged : action.merge) {
    for (const int32_t source : merged.sources) {
      if (const auto from = owner(source); from != targets->end()) from->gives = true;
    }
  }
}

bool IsComplete(const std::vector<TargetRun>& targets, const KvList& list) {
  int32_t next = 0;
  for (const TargetRun& run : targets) {
    if (!run.records.empty() && run.first_entry != next) return false;
    for (const int32_t record : run.records) {
      if (record != next || next >= run.end_entry) return false;
      ++next;
    }
  }
  return next == list.entries();
}

}  // namespace

// Whether the list's pages may be written where they are: nobody shares them, and all can hold the same.
bool KvCache::Impl::OwnsPages(const Sequence& sequence, const KvList& list) const {
  for (const PageRef& page : list.pages) {
    if (sequence.may_share && pool.references(page.unit) > 1) return false;
    if (page.log_weights != list.pages[0].log_weights) return false;
  }
  return true;
}

// Fills `repacked`, `overwritten` and what goes where. False if a page is missing.
bool KvCache::Impl::PlanRepack(const Sequence& sequence, std::span<const ListAction> list_actions, Reservation* reservation,
                               bool small_tails) {
  repacked.clear();
  overwritten.clear();
  first_copies.clear();
  copies.clear();
  transcodes.clear();
  merges.clear();
  merge_sources.clear();
  reservation->GiveBack();
  for (const ListAction& action : list_actions) {
    if (PlanInSlots(sequence, action)) continue;
    const int list_index = action.layer * shape.num_kv_heads + action.kv_head;
    const KvList& list = sequence.lists[static_cast<size_t>(list_index)];
    std::vector<TargetRun> targets = Targets(action, list, LandingClass(sequence, action.layer).format);
    if (action.merge.empty() && IsComplete(targets, list)) continue;  // nothing to do
    Relate(action, &targets);
    RepackedList plan;
    plan.list = list_index;
    plan.held.assign(list.pages.size(), 0);
    for (TargetRun& run : targets) {
      run.several = targets.size() > 1 || IsCoded(run.format);
      PlanRun(sequence, action, run, small_tails, reservation, &plan);
    }
    repacked.push_back(std::move(plan));
  }
  return !reservation->failed();
}

// Overwriting: false if the list is one that has to be repacked. A window finds its entries by their order.
bool KvCache::Impl::PlanInSlots(const Sequence& sequence, const ListAction& action) {
  const KvList& list = sequence.lists[static_cast<size_t>(action.layer * shape.num_kv_heads + action.kv_head)];
  if (!action.overwrite || window(action.layer) > 0 || !list.regular() || !OwnsPages(sequence, list)) return false;
  if (action.drop.empty()) return true;
  const auto other = [&](const PageRef& page) { return page.page_class().format != list.pages[0].page_class().format; };
  if (std::any_of(list.pages.begin(), list.pages.end(), other)) return false;
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
  return true;
}

// Whether the tail of `count` entries is made of small pages: as many as the list has there, or as can be had. Coded ones are
// always to be had, so that the numbers of entries, and thereby how attention adds up, do not depend on who else is there.
bool KvCache::Impl::SmallTail(const PageClass& page_class, int count, bool several, int small_there, bool small_tails) const {
  const PageClass small{page_class.format, true, page_class.log_weights}, large{page_class.format, false, page_class.log_weights};
  const int pages = (count + kSmallPageEntries - 1) / kSmallPageEntries;
  if (pages > (several ? 3 : 1) || pages * pool.PageBytes(small) >= pool.PageBytes(large)) return false;
  return IsCoded(page_class.format) || small_there >= pages || (small_tails && pool.CanTake(small));
}

void KvCache::Impl::PlanRun(const Sequence& sequence, const ListAction& action, const TargetRun& run, bool small_tails,
                            Reservation* reservation, RepackedList* plan) {
  const KvList& list = sequence.lists[static_cast<size_t>(plan->list)];
  const int total = static_cast<int>(run.records.size());
  const std::span<const PageRef> present = std::span(list.pages).subspan(static_cast<size_t>(run.first_page),
                                                                         static_cast<size_t>(run.end_page - run.first_page));
  PageClass c{run.format, false, false};
  EntryWalk walk(list.pages);
  bool merges_here = false, forward = true;
  int same = 0;
  for (const PageRef& page : present) c.log_weights |= page.log_weights;
  for (int i = 0; i < total; ++i) {
    const int32_t record = run.records[static_cast<size_t>(i)];
    merges_here |= record < 0;
    forward &= !run.Owns(record) || record >= run.first_entry + i;
    if (same == i && run.Owns(record) && record == run.first_entry + i) ++same;
    if (record >= 0 && !run.Owns(record)) c.log_weights |= list.pages[static_cast<size_t>(walk.At(record).page)].log_weights;
  }
  c.log_weights |= merges_here;
  const bool in_place = !merges_here && forward && !(run.takes && run.gives);
  const auto owned = [&](const PageRef& page) { return !sequence.may_share || pool.references(page.unit) == 1; };

  size_t at = 0;       // of the pages that are there, the one at `begin` if there is one
  int at_begin = 0;    // entry of the run that it begins with
  for (int begin = 0; begin < total;) {
    while (at < present.size() && at_begin < begin) at_begin += present[at++].count;
    const bool there = at < present.size() && at_begin == begin;
    int small_there = 0;
    for (size_t p = at; there && p < present.size() && present[p].small; ++p) ++small_there;
    const int rest = total - begin;
    c.small = rest < kPageEntries && SmallTail(c, rest, run.several, small_there, small_tails);
    const int count = std::min(rest, c.entries());
    const bool fits = there && present[at].small == c.small;
    const bool untouched = fits && begin + count <= same && (present[at].count == count || owned(present[at]));
    const bool rewritten = fits && in_place && owned(present[at]) && present[at].log_weights == c.log_weights;
    PageRef page;
    if (untouched || rewritten) {
      page = present[at];
      page.count = static_cast<uint16_t>(count);
      plan->held[static_cast<size_t>(run.first_page) + at] = 1;
    } else {
      page = MakePageRef(reservation->Take(c).value_or(0), count, c);
    }
    plan->pages.push_back(page);
    for (int i = begin; i < begin + count; ++i) {
      const int32_t record = run.records[static_cast<size_t>(i)];
      const bool stays = (untouched || rewritten) && run.Owns(record) && record == run.first_entry + i;
      PageRef to = page;
      to.count = static_cast<uint16_t>(i - begin);
      if (!stays) PlanEntry(action, run, record, to, list, &walk, plan);
      plan->sources.push_back(std::max(record, -1));
      plan->positions.push_back(record >= 0 ? list.positions[record] : action.merge[static_cast<size_t>(-1 - record)].position);
    }
    begin += count;
  }
}

// One entry, or one mean, goes to its place.
void KvCache::Impl::PlanEntry(const ListAction& action, const TargetRun& run, int32_t record, const PageRef& to, const KvList& list,
                              EntryWalk* walk, RepackedList* plan) {
  const auto place = [&](int32_t entry) {
    const EntryPlace at = walk->At(entry);
    PageRef from = list.pages[static_cast<size_t>(at.page)];
    from.count = static_cast<uint16_t>(at.slot);
    return from;
  };
  if (run.Owns(record)) {
    (run.takes ? first_copies : copies).push_back({place(record), to});
  } else if (record >= 0) {
    transcodes.push_back({place(record), to, plan->list});
  } else {
    const MergedEntry& merged = action.merge[static_cast<size_t>(-1 - record)];
    merges.push_back({static_cast<int32_t>(merge_sources.size()), static_cast<int32_t>(merged.sources.size()), merged.log_weight, to});
    for (size_t s = 0; s < merged.sources.size(); ++s) merge_sources.push_back({place(merged.sources[s]), merged.weights[s]});
    plan->merged += static_cast<int64_t>(merged.sources.size());
  }
}

}  // namespace loupe
