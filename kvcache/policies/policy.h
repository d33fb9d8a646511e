// A policy says what a list keeps, in which format, and what becomes of the rest. It decides and never touches memory:
// it sees read-only views and returns actions; the same inputs give the same actions. Immutable, made for one request
// (registry.h) and shared by all sequences of that request. Called by the step thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/page_layout.h"

namespace loupe {

// Which rows of a prompt are summed: every n-th, those at positions n - 1, 2n - 1, ... (1: all, 0: none), and from position
// `dense_from` on all of them, since few of the others see the last entries.
struct SampledRows {
  int stride = 0;
  int dense_from = std::numeric_limits<int>::max();

  // Those at positions below `end`.
  int Below(int end) const { return std::min(end, dense_from) / stride + std::max(0, end - dense_from); }
  bool operator==(const SampledRows&) const = default;
};

// What a policy wants to know. Every field costs something when asked for and nothing otherwise. Whatever is summed over
// rows adds up over the chunks of a prompt to the same bits.
struct Signals {
  // The last w query rows. Of the prompt; with `window_goes_on` of the sequence, whenever the policy is called.
  int window_query_rows = 0;
  bool window_goes_on = false;
  bool window_mass = false;    // what entries get from these rows
  bool last_row_mass = false;  // and from the last of them alone
  SampledRows columns;         // what entries get from these rows
  bool columns_go_on = false;  // and from every generated token's row
  bool key_norms = false;
  bool key_alignment = false;
  bool output_norms = false;       // of attention's output, per prompt row
  bool surprisal = false;          // of prompt tokens, if the engine supplies it
  bool entries = false;            // keys and values of prompt rows, for calibration
  bool page_mass = false;          // probability per page at decode
  bool entry_probability = false;  // probability per entry at decode
};

// Entries [begin, end) of a list, which are stored in one format.
struct FormatRun {
  PageFormat format;
  int begin = 0;
  int end = 0;
};

// One list as a policy sees it. Entries are in list order: run by run, positional within a run after a repack, not after an
// overwrite.
struct ListView {
  int layer = 0;
  int kv_head = 0;
  std::span<const int32_t> positions;  // [entries] position of each entry in the sequence
  std::span<const FormatRun> runs;     // all entries in order, no format twice
  // Present only if asked for by Signals; R heads of the group.
  std::span<const float> window_queries;     // [w, R, D] after RoPE, oldest row first
  std::vector<std::span<const float>> window_mass;  // [R][entries] sums over the window's rows
  std::vector<std::span<const float>> last_row_mass;  // [R][entries]
  std::vector<std::span<const float>> column_sums;  // [R][entries] sums over the sampled rows
  std::span<const float> key_norms;          // [entries]
  std::span<const float> key_alignment;      // [entries] cosine of a key with the mean of all keys at length 1
  std::span<const float> page_mass;          // [pages, R] of the last decode step
  std::span<const int32_t> page_begin;       // [pages] the first entry of each, with page_mass
  std::span<const float> entry_probability;  // [entries, R] of the last decode step
};

// One sequence as a policy sees it.
struct SequenceView {
  int num_tokens = 0;        // positions appended
  int num_prompt = 0;        // of them prompt
  int num_kv_heads = 0;
  PageFormat landing;        // in which new entries are stored from now on
  int window_rows = 0;       // rows behind window_mass: those at the last so many positions
  std::span<const ListView> lists;      // all lists, layer by layer, kv heads within; a list may be empty
  std::span<const float> output_norms;  // [layers, prompt, H]
  std::span<const float> surprisal;     // [prompt] nats, 0 for the first token
  std::span<const std::vector<float>> keys, values;  // [layers][prompt, G, D] f32, keys after RoPE

  std::span<const ListView> layer(int index) const {
    return lists.subspan(static_cast<size_t>(index * num_kv_heads), static_cast<size_t>(num_kv_heads));
  }
  int num_layers() const { return static_cast<int>(lists.size()) / num_kv_heads; }
};

// Several entries that become one: the weighted mean of their keys and values, with a log-weight.
struct MergedEntry {
  std::vector<int32_t> sources;  // indexes into the list's entries
  std::vector<float> weights;    // one a source
  float log_weight = 0;
  int32_t position = 0;  // at which it stands from now on; differs from those of the other entries
};

// Entries of a list that are stored in one format, behind each other.
struct CodedRun {
  PageFormat format;
  std::vector<int32_t> entries;  // indexes into the list's entries, ascending
};

// What a list shall hold from now on. Either `coded`, `keep` and `merge`: these entries in these formats, in this order,
// then copies of those of `keep` and the means in the format in which new entries land; everything else is dropped. Or,
// with `overwrite`, everything but the entries of `drop`, whose slots are taken by the list's last entries: cheap, for a
// policy that drops an entry at every step. (Tiers are further kinds of records.)
struct ListAction {
  int layer = 0;
  int kv_head = 0;
  std::vector<int32_t> keep;        // indexes into the list's entries, ascending; none of them in `coded`
  std::vector<MergedEntry> merge = {};
  bool overwrite = false;
  std::vector<int32_t> drop = {};   // ascending
  std::vector<CodedRun> coded = {};  // no entry twice, no format twice
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  virtual Signals signals() const { return {}; }
  // True if this policy never acts: the cache then builds no views for it, and a step costs nothing for it.
  virtual bool keeps_everything() const { return false; }
  // AfterDecode is due whenever so many further tokens were generated; 0: never. A step may bring no more tokens of a
  // sequence than are missing to that.
  virtual int decode_interval() const { return 0; }
  // In which format rows of the prompt, and later generated tokens, are stored as they come; nothing: dense. Layers with a
  // sliding window are always dense.
  virtual std::optional<PageFormat> landing_format(bool /*prompt*/) const { return std::nullopt; }
  // AfterChunk is due after every step with prompt rows that does not end the prompt. Its view has no signals.
  virtual bool acts_in_prefill() const { return false; }
  virtual void AfterChunk(const SequenceView& /*sequence*/, std::vector<ListAction>* /*actions*/) const {}
  // Most bytes that a sequence holds until its prompt is complete and the policy has acted on it, page slack included; -1:
  // as much as if all of it were dense.
  virtual int64_t MaxPromptBytes() const { return -1; }
  // Most bytes that a sequence holds between steps once its prompt is complete and `num_generated` tokens later, page slack
  // included; -1: as much as if nothing were dropped.
  virtual int64_t MaxBytes(int /*num_generated*/) const { return -1; }
  // The prompt is complete and its last row computed. Lists without an action stay as they are; a list has one action at
  // most.
  virtual void AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const = 0;
  virtual void AfterDecode(const SequenceView& sequence, std::vector<ListAction>* actions) const = 0;
};

// Keeps everything, dense: the default and the yardstick. Lives for ever.
const Policy& FullPolicy();

}  // namespace loupe
