// The inside of KvCache, shared by the files that implement it: kv_cache.cpp (sequences), kv_reserve.cpp (building a
// step), kv_advance.cpp (a step that is the last one again), kv_step.cpp (ops, commit), kv_policy.cpp (policies act),
// kv_signals.cpp (what they are shown), kv_repack.cpp (the repack operator), kv_repack_plan.cpp (which pages it writes),
// kv_faults.cpp (what cannot be coded), kv_rewrite.cpp (other entries, for measurements), kv_report.cpp (numbers, audit).
// Internal to kvcache/. Step thread only.
#pragma once

#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvcache/arena.h"
#include "kvcache/block_table.h"
#include "kvcache/kv_batch.h"
#include "kvcache/kv_cache.h"
#include "kvcache/page_format.h"
#include "kvcache/page_pool.h"

namespace loupe {

// A run as a repack shall leave it, and what the list has of that format now.
struct TargetRun : ListRun {
  std::vector<int32_t> records;  // in order: an entry of the list (its index) or a mean (-1 - its index)
  bool takes = false;            // entries come from other runs, or means
  bool gives = false;            // other runs or means take entries from it
  bool several = false;          // its tail may be several small pages

  bool Owns(int32_t record) const { return record >= first_entry && record < end_entry; }
};

struct KvCache::Impl {
  struct RepackedList;
  struct OverwrittenList;
  Impl(const KvConfig& config, const KvShape& shape, Backend& backend, std::unique_ptr<SlabArena> arena);

  // kv_cache.cpp
  absl::Status LoadConstants();
  absl::Status SetMeanKeys(std::span<const float> values);
  // Get's lists are up to date; Find's may lack decode rows.
  Sequence& Get(SeqId seq) const;
  Sequence& Find(SeqId seq) const;
  absl::StatusOr<SeqId> Open(const Policy& policy);
  absl::StatusOr<SeqId> Fork(SeqId parent);
  absl::StatusOr<SeqId> Fork(SeqId parent, const Policy& policy, Stream& stream);
  void Close(SeqId seq);
  // Gives one reference back and keeps the ledger; `ref.count` is the page's number of entries.
  // Entries of the prompt, or generated tokens, land in the policy's format from now on.
  void Land(Sequence* sequence, bool prompt) const;
  void ReleasePage(Sequence& sequence, const PageRef& ref);

  // kv_reserve.cpp
  absl::Status Reserve(std::span<const KvStepItem> items, KvBatch* batch);
  absl::Status ReserveAfresh(std::span<const KvStepItem> items, KvBatch::State* state);
  absl::Status LayOutRows(std::span<const KvStepItem> items, KvBatch::State* state);
  absl::Status PrepareBuffers(KvBatch::State* state);
  absl::Status PlanLists(KvBatch::State* state, bool small_tails);
  absl::Status PlanList(KvBatch::State* state, int item, int list, bool small_tails);
  void CopyTail(KvBatch::State* state, std::span<const PageRef> replaced, PageRef to);
  void FillRows(KvBatch::State* state, int item, int list, const PageRef* pages, EntryPlace place);
  absl::Status PrepareSignals(KvBatch::State* state);

  // kv_advance.cpp
  bool IsLastStepAgain(std::span<const KvStepItem> items, const KvBatch::State& state) const;
  bool ReserveAdvanced(std::span<const KvStepItem> items, KvBatch::State* state);
  bool TakeTail(KvBatch::State* state, int list);
  void LeaveRoom(KvBatch::State* state, int item, int list, const PageRef& tail);
  void AdvanceArrays(KvBatch::State* state, Stream& stream);
  // Steps that only move the last one on leave the lists behind, which would cost a look at every list and its table.
  static void Settle(Sequence& sequence);

  // kv_step.cpp
  void Begin(KvBatch::State* state, Stream& stream);
  void Append(KvBatch::State* state, int layer, const Tensor& k, const Tensor& v, Stream& stream, const Rotation& rotation);
  void Attend(KvBatch::State* state, int layer, const Tensor& q, const Tensor& out, Stream& stream);
  void Commit(KvBatch::State* state, Stream& stream);
  void ApplyDelta(const KvBatch::State& state, const ListDelta& delta);
  void Abandon(KvBatch::State* state);
  void FreeExpired(Sequence& sequence);
  Tensor MeanKeys(int layer) const;
  Tensor Faults() const;
  std::vector<SeqId> TakeFaults(Stream& stream);
  bool HoldsFault(const Sequence& sequence, Stream& stream);

  // kv_signals.cpp
  void NarrowSignals(Sequence* sequence, const Signals& wanted) const;
  void ReadRows(const KvBatch::State& state, int item, int layer, const AttendArgs& args, Stream& stream);
  const float* RowsOnHost(const Tensor& t, int first, int rows, Stream& stream);
  void CaptureQueries(Sequence& sequence, int layer, const Tensor& q, int first_row, int first_position, int rows, Stream& stream);
  void SumColumns(const KvBatch::State& state, int item, int layer, const AttendArgs& args, Stream& stream);
  void CommitSignals(Sequence& sequence, const StepItem& item);
  void AddProbabilities(const KvBatch::State& state, int item);
  void SumWindow(const Sequence& sequence, int layer, int rows, std::vector<std::vector<float>>* mass, Stream& stream);
  void CaptureEntries(const KvBatch::State& state, int item, int layer, const Tensor& k, const Tensor& v, Stream& stream);
  void SummariseKeys(const Sequence& sequence, Stream& stream);

  // kv_policy.cpp
  void RunPolicy(const KvBatch::State& state, int item, Stream& stream);
  // The policy acts on a complete prompt. RESOURCE_EXHAUSTED: no room for its repack, nothing has changed.
  absl::Status EndPrefill(Sequence& sequence, Stream& stream);
  absl::Status Retry(Sequence& sequence, Stream& stream);
  // What a policy sees when `signals` is what it asked for and still gets.
  SequenceView BuildViews(const Sequence& sequence, const Signals& signals, bool after_prefill, Stream& stream);
  void ViewPositions(const KvList& list, size_t index, ListView* view);
  void ViewRuns(const KvList& list, size_t index, ListView* view);
  void AfterChunk(Sequence& sequence, Stream& stream);
  void ViewMasses(const KvBatch::State& state, int item, size_t index, ListView* view);
  void ViewQueries(const Sequence& sequence, size_t index, int rows, ListView* view);

  // kv_repack.cpp
  absl::Status Repack(Sequence& sequence, std::span<const ListAction> actions, Stream& stream);
  void RunRepack(Stream& stream);
  void SwapList(Sequence& sequence, RepackedList* plan);
  void Overwrite(Sequence& sequence, const OverwrittenList& plan);

  // kv_repack_plan.cpp
  bool PlanRepack(const Sequence& sequence, std::span<const ListAction> actions, Reservation* reservation, bool small_tails);
  bool PlanInSlots(const Sequence& sequence, const ListAction& action);
  void PlanRun(const Sequence& sequence, const ListAction& action, const TargetRun& run, bool small_tails, Reservation* reservation,
               RepackedList* plan);
  void PlanEntry(const ListAction& action, const TargetRun& run, int32_t record, const PageRef& to, const KvList& list, EntryWalk* walk,
                 RepackedList* plan);
  bool SmallTail(const PageClass& page_class, int count, bool several, int small_there, bool small_tails) const;
  bool OwnsPages(const Sequence& sequence, const KvList& list) const;

  // kv_rewrite.cpp
  absl::Status Rewrite(Sequence& sequence, int list_index, std::span<const float> keys, std::span<const float> values, Stream& stream);

  // kv_report.cpp
  KvSequenceReport Report(const Sequence& sequence) const;
  KvStats Stats() const;
  void Audit() const;
  void AuditList(const Sequence& sequence, int list, std::unordered_map<uint32_t, std::pair<int, int>>* owners) const;
  std::string Dump() const;

  int num_lists() const { return shape.num_layers * shape.num_kv_heads; }
  int heads_per_group() const { return shape.num_heads / shape.num_kv_heads; }
  // The class of pages for new entries of a layer.
  PageClass LandingClass(const Sequence& sequence, int layer) const {
    return window(layer) > 0 ? landing_class : PageClass{sequence.landing, false, false};
  }
  int window(int layer) const { return shape.windows.empty() ? 0 : shape.windows[static_cast<size_t>(layer)]; }
  // Key and value of one entry as the backend codes dense pages.
  int64_t dense_entry_bytes() const {
    return CodecBytes(landing_class.format.key, shape.head_dim) + CodecBytes(landing_class.format.value, shape.head_dim);
  }

  // What a planned repack does to one list.
  struct RepackedList {
    int list = 0;
    std::vector<uint8_t> held;       // [pages that the list has] which of them stay: untouched, or compacted in place
    std::vector<int32_t> sources;    // where each entry comes from, for what is kept beside pages; -1: a mean
    std::vector<PageRef> pages;      // all pages, counts included
    std::vector<int32_t> positions;
    int64_t merged = 0;              // entries that went into means
  };


  // A list some of whose entries go while its last ones take their slots.
  struct OverwrittenList {
    int list = 0;
    int size = 0;  // entries left
    std::vector<std::pair<int32_t, int32_t>> moves;  // to, from
  };

  KvConfig config;
  KvShape shape;
  Backend& backend;
  // Where a policy does not say otherwise, new tokens land in pages of this class, a list's tail in its small variant where
  // 16 entries are enough.
  const PageClass landing_class;
  std::unique_ptr<SlabArena> arena;
  PagePool pool;
  std::unique_ptr<DeviceBuffer> sinks;  // [layers, H] f32, or null
  std::unique_ptr<DeviceBuffer> mean_keys;  // [layers * G, D] f32, or null: zero
  std::unique_ptr<DeviceBuffer> faults;     // i32: keys and values that could not be coded, since start
  int32_t faults_on_host = 0;               // as of the last commit, once the stream has got there
  int32_t faults_told = 0;
  std::unordered_map<int32_t, std::unique_ptr<Sequence>> sequences;
  std::vector<const KvBatch::State*> in_flight;
  int32_t next_id = 0;
  int64_t resident_entries = 0;
  int64_t reserve_failures = 0;
  int64_t entries_dropped = 0;
  int64_t entries_expired = 0;
  int64_t steps_advanced = 0;
  int64_t encode_faults = 0;

  // Scratch of policies and repacks, reused.
  std::vector<ListView> views;
  std::vector<ListAction> actions;
  std::vector<std::vector<float>> window_mass;  // [lists * R]
  std::vector<std::vector<float>> last_row_mass;  // [lists * R]
  std::vector<std::vector<float>> key_norms, key_alignment;  // [lists]
  std::vector<float> flat_norms;
  std::vector<int32_t> counting;                 // 0, 1, 2, ...: the positions of all lists that nobody has thinned
  std::vector<std::vector<int32_t>> flattened;   // [lists] positions of lists that a policy has thinned
  std::vector<std::vector<FormatRun>> format_runs;     // [lists]
  std::vector<std::vector<int32_t>> page_begins;       // [lists]
  std::vector<std::vector<float>> gathered_probability;  // [lists], where pages are not full
  std::vector<float> gathered_queries;
  std::vector<char> raw_rows;
  std::vector<float> host_rows;
  std::vector<RepackedList> repacked;
  std::vector<OverwrittenList> overwritten;
  std::vector<EntryCopy> first_copies;  // within pages that entries of other formats go into afterwards
  std::vector<EntryCopy> copies;
  std::vector<EntryTranscode> transcodes;
  std::vector<EntryMerge> merges;
  std::vector<MergeSource> merge_sources;
};

}  // namespace loupe
