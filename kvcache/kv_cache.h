// The KV cache as the engine sees it: sequences of ragged lists, one per (layer, kv head), in pages of one byte arena.
// Owned by the engine; every call comes from the step thread, so there are no locks inside.
//
// A step: Reserve (may fail, changes nothing then) -> for each layer Append, Attend (cannot fail) -> Commit (positions
// advance, policies act). A reserved batch that will not run is given back by Abandon. Close gives all pages back; pages
// shared with a fork live until their last owner goes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kvcache/kv_config.h"
#include "kvcache/policies/policy.h"
#include "kvcache/policies/registry.h"

namespace loupe {

struct SeqId {
  int32_t value = -1;
  auto operator<=>(const SeqId&) const = default;
};

// What one sequence adds in a step. Rows of the batch: first all prompt rows, in the order of items, then all decode
// rows, in the order of items; positions go on from the sequence's length.
struct KvStepItem {
  SeqId seq;
  int num_prompt_rows = 0;
  int num_decode_rows = 0;     // > 1 only when generated tokens are recomputed after a preemption
  bool ends_prefill = false;   // the prompt is complete after this step: Policy::AfterPrefill is due
};

// A reserved step. Filled by Reserve, opaque to the engine but for the public members; reused from step to step.
class KvBatch {
 public:
  KvBatch();
  ~KvBatch();
  KvBatch(KvBatch&&) noexcept;
  KvBatch& operator=(KvBatch&&) noexcept;

  int num_rows = 0;
  int prompt_rows = 0;
  int num_items = 0;
  Tensor positions;  // [T] i32 position of each row in its sequence, on the device; valid from Begin until commit or abandon

  // Whether the step's ops may be recorded: they read nothing but arrays at fixed places. `place` tells such steps apart:
  // equal places and numbers of rows mean equal pointers and readers.
  bool recordable() const;
  std::pair<const void*, const void*> place() const;
  // Begin is nothing but one op on arrays at fixed places, which may be recorded with the others.
  bool only_advances() const;

 private:
  friend class KvCache;
  struct State;
  std::unique_ptr<State> state_;
};

struct KvStats {
  int64_t capacity_bytes = 0;      // arena, whole slabs
  int64_t resident_bytes = 0;      // pages in use, counted once however many share them; reserved ones included
  int64_t retired_bytes = 0;       // no longer in use, free from the next step on
  int64_t slab_bytes = 0;          // slabs taken by page classes: resident + retired + free inside taken slabs
  int64_t resident_entries = 0;    // entries in pages in use (shared pages once)
  int64_t pages = 0;               // pages in use
  int64_t small_pages = 0;         // of them small
  int num_sequences = 0;
  int64_t reserve_failures = 0;    // since start
  int64_t entries_dropped = 0;     // by policies, since start
  int64_t entries_expired = 0;     // whole pages that no later row of a sliding window sees, since start
  int64_t steps_advanced = 0;      // decode steps whose arrays were the last one's, moved on, since start
  int64_t encode_faults = 0;       // keys and values that were not finite when they were to be coded, since start
};

// What a sequence holds in one format.
struct KvFormatUse {
  PageFormat format;
  int64_t entries = 0;               // sum over lists
  int64_t read_bytes_per_token = 0;  // that attention reads for the next token
};

// What one sequence holds now, for usage.kv.
struct KvSequenceReport {
  int num_tokens = 0;            // positions appended
  int64_t device_bytes = 0;      // pages, slack included; shared pages in full
  int64_t full_bytes = 0;        // all positions in all lists as dense entries, without slack
  int64_t peak_device_bytes = 0;
  int64_t lists = 0;
  int64_t entries_kept = 0;      // sums over lists
  int64_t entries_dropped = 0;
  int64_t entries_merged = 0;
  std::vector<KvFormatUse> formats;  // that are in use
  double key_bits = 0, value_bits = 0;  // of a coordinate, scales included: means over entries
  int64_t read_bytes_per_token = 0;  // KV bytes that attention reads for the next token
  int64_t table_bytes = 0;           // page references as kernels see them, beside device_bytes
  int prompt_tokens = 0;             // at the end of prefill, when the policy had acted; 0 before
  int64_t prompt_device_bytes = 0;   // at that moment: prompt_device_bytes / prompt_full_bytes is the budget's ratio
  int64_t prompt_full_bytes = 0;
};

class KvCache {
 public:
  // RESOURCE_EXHAUSTED if the arena cannot be had, INVALID_ARGUMENT if it is smaller than one slab, with the numbers.
  static absl::StatusOr<std::unique_ptr<KvCache>> Create(const KvConfig& config, const KvShape& shape, Backend& backend);
  ~KvCache();

  // What is subtracted from keys that are coded, [L, G, D]; zero without it. Before the first sequence is opened.
  absl::Status SetMeanKeys(std::span<const float> mean_keys);

  // `policy` outlives the sequence. RESOURCE_EXHAUSTED when max_sequences are open.
  absl::StatusOr<SeqId> Open(const Policy& policy = FullPolicy());
  // A second sequence with the same content; pages are shared until one of the two writes to them.
  absl::StatusOr<SeqId> Fork(SeqId parent);
  // A second sequence on which `policy` acts as it would have at the end of the parent's prompt, where the parent stands. The
  // parent's policy has kept everything and asked for all signals that `policy` asks for (the same sampled rows). Also
  // RESOURCE_EXHAUSTED if what the policy keeps finds no room.
  absl::StatusOr<SeqId> Fork(SeqId parent, const Policy& policy, Stream& stream);
  // Gives the sequence's pages back. No batch that holds it may be in flight.
  void Close(SeqId seq);

  int num_tokens(SeqId seq) const;

  // All pages that the step will write, or nothing: RESOURCE_EXHAUSTED with bytes asked and free. INVALID_ARGUMENT if
  // the step has more rows than max_step_rows, or several decode rows of a sequence whose policy asks for masses.
  absl::Status Reserve(std::span<const KvStepItem> items, KvBatch* batch);
  // What the step's ops read goes to the device; pages that moved take their entries along. Append does it if nobody has.
  void Begin(KvBatch& batch, Stream& stream);
  // Whether Begin, Append and Attend count as done, for all layers: a recorded run of them stands for the calls.
  void SetRun(KvBatch& batch, bool run);
  // [T, G, D] f32. `rotation`: queries that are rotated with the keys; its positions are the batch's.
  void Append(KvBatch& batch, int layer, const Tensor& k, const Tensor& v, Stream& stream, const Rotation& rotation = {});
  void Attend(KvBatch& batch, int layer, const Tensor& q, const Tensor& out, Stream& stream);  // [T, H, D] f32
  // Pages that a layer's lists attend to beside their own, in this step only (AttendArgs.extra_pages): lists in the order
  // (item, kv head). The caller owns both tensors and the pages, and keeps them until the step has run.
  void SetExtraPages(KvBatch& batch, int layer, const Tensor& pages, const Tensor& counts);
  // Positions advance, policies of the batch's sequences act. A policy whose repack finds no room leaves its lists as
  // they are (waits_for_room); at the end of a prompt it is asked again at the next commit.
  void Commit(KvBatch& batch, Stream& stream);
  void Abandon(KvBatch& batch);
  // Whether what the policy said at the last commit found no room; and once more, when somebody has left:
  // RESOURCE_EXHAUSTED: there is none yet. What finds none before the next step is forgotten, but for the end of a prompt.
  bool waits_for_room(SeqId seq) const;
  absl::Status Retry(SeqId seq, Stream& stream);
  // Sequences that hold a key or value which was not finite when it was to be coded, if the last commit has met one; they
  // are to be closed. Once the stream has been synchronised after the commit.
  std::vector<SeqId> TakeFaults(Stream& stream);

  // One transaction over any lists of a sequence: reserve new pages, copy, swap, release the old. All or nothing.
  // The pages of a list that nobody shares are compacted in place, which needs no room.
  absl::Status Repack(SeqId seq, std::span<const ListAction> actions, Stream& stream);
  // For measurements of caches that this one does not have: the dense entries of a list get other keys and values, [entries,
  // D] in list order, keys after RoPE. Waits for the stream. RESOURCE_EXHAUSTED: nothing has changed.
  absl::Status Rewrite(SeqId seq, int layer, int kv_head, std::span<const float> keys, std::span<const float> values, Stream& stream);
  // Surprisal of prompt tokens in nats, for policies that ask; in the order of the prompt, before the step that ends it.
  void AddSurprisal(SeqId seq, std::span<const float> surprisal);
  bool WantsSurprisal(SeqId seq) const;

  // Upper bound of the bytes that `num_tokens` more tokens of a full sequence take, slack included: for admission. If
  // bytes_free() is at least this much, one step that appends them to a new sequence is not refused.
  int64_t BytesForTokens(int num_tokens) const;
  int64_t bytes_free() const;
  int64_t device_bytes(SeqId seq) const;
  // What a policy for a prompt of so many tokens has to know.
  PolicyContext policy_context(int num_prompt) const;
  // Positions that one full sequence can grow to while it is alone in the cache, in whatever steps and whoever was there
  // before: no Reserve up to it is refused. 0: not even the first token fits.
  int LongestSequence() const;
  // How dense entries are coded here, and the bytes of one (key and value).
  PageFormat dense_format() const;
  int64_t dense_entry_bytes() const;
  // Bytes that one more entry of the sequence takes in a list, without slack.
  int64_t landing_entry_bytes(SeqId seq) const;

  // Positions held by a list, in list order (tests, policies, reports).
  std::vector<int32_t> ListPositions(SeqId seq, int layer, int kv_head) const;
  std::vector<PageRef> ListPages(SeqId seq, int layer, int kv_head) const;
  KvSequenceReport Report(SeqId seq) const;
  KvStats Stats() const;
  const KvShape& shape() const;
  // Recounts everything from the block tables and CHECKs it against the ledger. Slow; for tests and debug.
  void Audit() const;
  // Tables and pool as text, equal exactly if the states are (tests).
  std::string DebugDump() const;

 private:
  KvCache();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace loupe
