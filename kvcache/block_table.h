// The block table: what every list of a sequence holds. Keyed by (sequence, layer, kv head); lists are ragged. Pure host
// data: kernels see only the flattened PageRefs that a step is built from (kv_batch.h). Owned by the cache, used by the
// step thread.
//
// A list is runs of pages, each run of one format, no format twice; new entries join the last run, or begin one, in the
// format in which the sequence's entries land. Invariant, CHECKed by Audit: a run's pages are full but for its last one.
// Large pages come first. The tail of a dense list is one page, small if 16 entries are enough; that of a run in a list with
// coded pages is one large page or up to three small ones, whatever is fewer bytes.
//
// Entries have two numbers. Policies, positions and sums count entries: e in [0, entries). Kernels count 64 a page
// (ops.h): entry e at (page, slot) is number page * 64 + slot. The two agree while all pages but the last hold 64, which
// is always so in a list without coded pages.
//
// Positions ascend within a run until a policy overwrites a slot.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/page_layout.h"
#include "kvcache/policies/policy.h"

namespace loupe {

// Positions of a list's entries, the plane that only policies and windows look at. Entries that were appended one after
// the other are a run and cost nothing; positions that a policy has chosen are stored one by one before it.
class PositionPlane {
 public:
  int size() const { return static_cast<int>(chosen_.size()) + run_count_; }
  int32_t operator[](int entry) const {
    const int num_chosen = static_cast<int>(chosen_.size());
    return entry < num_chosen ? chosen_[static_cast<size_t>(entry)] : run_begin_ + (entry - num_chosen);
  }
  // First entry at `position` or after it; size() if there is none.
  int LowerBound(int32_t position) const;
  // How many entries a row at `position` sees, which are the first ones: those behind lie later in the sequence. Where
  // entries are out of order, only the last ones are looked at.
  int VisibleTo(int32_t position) const;
  // `count` new entries at positions `first`, `first` + 1, ...; `first` is the sequence's length.
  void Append(int32_t first, int count);
  // Replaces everything by positions below `length`, the sequence's length.
  void Assign(std::vector<int32_t> positions, int32_t length);
  void DropFront(int count);
  // Entry move.first gets the position of the later entry move.second; then only the first `size` entries are left. The
  // sequence has `length` positions.
  void Overwrite(std::span<const std::pair<int32_t, int32_t>> moves, int size, int32_t length);
  // False once entries stand in another order than their positions.
  bool ascending() const { return ascending_; }

  // The stored part and the run after it.
  std::span<const int32_t> chosen() const { return chosen_; }
  int32_t run_begin() const { return run_begin_; }
  int run_count() const { return run_count_; }

 private:
  std::vector<int32_t> chosen_;
  int32_t run_begin_ = 0;
  int32_t run_count_ = 0;
  bool ascending_ = true;
};

struct EntryPlace {
  int page = 0;
  int slot = 0;

  int number() const { return page * kPageEntries + slot; }
};

// Pages of a list that follow each other and have one format.
struct ListRun {
  PageFormat format;
  int first_page = 0, end_page = 0;
  int first_entry = 0, end_entry = 0;
};

struct KvList {
  std::vector<PageRef> pages;
  PositionPlane positions;
  int before_tail = 0;  // entries in all pages but the last

  int entries() const { return positions.size(); }
  // All pages but the last hold 64 entries: entries and numbers are the same.
  bool regular() const { return pages.empty() || before_tail == (static_cast<int>(pages.size()) - 1) * kPageEntries; }
  EntryPlace Locate(int entry) const;
  std::vector<ListRun> Runs() const;
  // The number behind those of the first `count` entries.
  int NumberBehind(int count) const { return count == 0 ? 0 : regular() ? count : Locate(count - 1).number() + 1; }
};

// Places of entries that are asked for in ascending order, or nearly so, at a constant cost each.
class EntryWalk {
 public:
  explicit EntryWalk(std::span<const PageRef> pages) : pages_(pages) {}
  EntryPlace At(int entry) {
    if (entry < first_) page_ = first_ = 0;
    while (entry - first_ >= pages_[static_cast<size_t>(page_)].count) first_ += pages_[static_cast<size_t>(page_++)].count;
    return {page_, entry - first_};
  }

 private:
  std::span<const PageRef> pages_;
  int page_ = 0;
  int first_ = 0;  // entry of it
};

// Values by entry to values by number (64 a page, 0 where there is no entry) and back, `width` values an entry.
std::vector<float> SpreadOverPages(std::span<const float> by_entry, std::span<const PageRef> pages);
void GatherFromPages(const float* by_number, std::span<const PageRef> pages, int width, std::vector<float>* by_entry);

// The last query rows, for policies that ask: a ring per layer, filled in Attend over prefill chunks and, if the window
// goes on, by generated tokens.
struct QueryWindow {
  int rows = 0;               // w; 0 if the policy does not ask
  std::vector<float> values;  // [layers, w, H, D]; the row of position p lies at p % w
};

struct Sequence {
  int32_t id = -1;
  const Policy* policy = nullptr;
  int num_tokens = 0;
  PageFormat landing;         // in which new entries are stored now, but for layers with a window: those are dense
  bool coded = false;         // has held coded pages
  std::vector<KvList> lists;  // [layers, G]
  Signals signals;      // what the policy asks for; nothing if it keeps everything
  int num_prompt = 0;   // prompt rows committed so far
  QueryWindow window;
  // Column sums, one array a list and head of its group, one number an entry; and as they will be after the step under way.
  std::vector<std::vector<float>> columns;       // [lists * R] if asked for
  std::vector<std::vector<float>> next_columns;
  std::vector<std::vector<float>> output_norms;  // [layers][prompt rows, H] if asked for
  std::vector<float> surprisal;                  // [prompt rows] if asked for and supplied
  std::vector<std::vector<float>> keys, values;  // [layers][prompt rows, G, D] if asked for
  uint64_t version = 0;          // another one whenever its lists have changed
  int unsettled_rows = 0;        // decode rows that are in the pages and in num_tokens, but not in the lists yet (Impl::Settle)
  bool in_flight = false;        // a reserved batch holds it
  bool may_share = false;        // was forked once: reference counts must be looked at before a write
  bool prefill_pending = false;  // AfterPrefill is due, or found no room and is asked again
  std::vector<ListAction> pending;  // what AfterDecode said at the last commit, if there was no room for it
  int64_t device_bytes = 0;
  int64_t peak_device_bytes = 0;
  int64_t prompt_device_bytes = 0;  // when AfterPrefill had run
  int prompt_tokens = 0;            // at that moment
  int64_t entries_dropped = 0;      // by the policy
  int64_t entries_merged = 0;       // into others
};

}  // namespace loupe
