// One argument struct per op. Shapes are documented here and nowhere else. Letters: T rows (tokens) of the step,
// B sequences of the step, H query heads, G key/value heads, R = H / G, D head size, E model width, F feed-forward
// width, V vocabulary, N pages of all lists of the step, P = 64 entries of a page.
//
// The rows of a step are ordered: first `prompt_rows` rows of phase prompt, then the rows of phase decode. A backend may
// compute the two phases with different kernels, never choose by the number of rows: a row's result depends on its
// inputs and its phase alone, not on the other rows, the order of calls or the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/page_layout.h"
#include "kernels/tensor.h"

namespace loupe {

// ---- weights

// How a matrix is stored in a model file. Block formats are GGUF's.
enum class WeightType : uint8_t { kF32, kF16, kBF16, kQ8_0, kQ4_0, kQ4_1 };

// A matrix in a model file, row-major by output: `rows` outputs of `cols` inputs each.
struct HostMatrix {
  WeightType type = WeightType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  const void* data = nullptr;
};

// A matrix in the layout of its backend's inner loops. Immutable, shared by all threads.
class Weight {
 public:
  virtual ~Weight() = default;
  virtual int64_t rows() const = 0;
  virtual int64_t cols() const = 0;
  virtual int64_t bytes() const = 0;  // resident bytes, read once a step at decode
};

// ---- ops

struct EmbedArgs {
  const Weight* table = nullptr;  // [V, E]
  Tensor ids;                     // [T] i32
  Tensor out;                     // [T, E] f32
};

struct RmsNormArgs {
  Tensor x;       // [T, E] f32 (or [T, H, D]: each row of D is normalised, for per-head norms)
  Tensor weight;  // [E] (or [D]) f32
  float eps = 0;
  Tensor out;  // shape of x, may be x
};

struct MatMulArgs {
  const Weight* weight = nullptr;  // [rows, cols]
  Tensor x;                        // [T, cols] f32
  Tensor bias;                     // [rows] f32, optional
  Tensor add;                      // [T, rows] f32, optional residual; may be `out`
  Tensor out;                      // [T, rows] f32
  int prompt_rows = 0;

  // Ops around the product, which a backend may fuse with it. Both are optional.
  RmsNormArgs norm;  // before it: norm.out is x, whose contents are lost
  Tensor gated;      // [T, rows / 2] f32, after it: SiluMul of out, whose contents are lost
};

struct SiluMulArgs {
  Tensor gate_up;  // [T, 2F] f32: gate in the first F columns, up in the rest
  Tensor out;      // [T, F] f32 = silu(gate) * up
};

// Rotary position embedding (Su et al., arXiv 2104.09864). `interleaved` pairs (2i, 2i+1), as GGUF's llama tensors are
// stored; otherwise pairs (i, i + D/2), as in Hugging Face files.
struct RopeArgs {
  Tensor x;            // [T, H, D] f32, rotated in place; row_stride may exceed H * D
  Tensor positions;    // [T] i32
  Tensor frequencies;  // [rotary / 2] f32: angle of pair i at position p is p * frequencies[i]
  float scale = 1;     // multiplies the rotated pair (YaRN's attention factor)
  bool interleaved = true;
};

// Queries to be rotated together with the keys that are appended: RopeArgs for both.
struct Rotation {
  Tensor q;            // [T, H, D] f32, rotated in place
  Tensor positions;    // [T] i32
  Tensor frequencies;  // [rotary / 2] f32
  float scale = 1;
  bool interleaved = true;
};

// Writes one key and one value per (row, kv head) into its slot, encoding on the way: nothing dense is written for a coded
// slot, and its codes are those of spherical.h, bit by bit.
struct AppendKvArgs {
  Tensor k;       // [T, G, D] f32, after RoPE; or before it, if there is a rotation: then its contents are lost
  Tensor v;       // [T, G, D] f32
  Tensor slots;   // [T, G] PageRef; `count` is the slot's index in the page. log_weights set: the slot's beta becomes 0
  void* arena = nullptr;
  Rotation rotation;  // optional
  Tensor mean_keys;   // [G, D] f32, subtracted from keys that are coded; undefined: zero
  Tensor faults;      // [1] i32, one more for every coded key or value that is not finite; optional
};

// Attention of every row over its lists, exact softmax over all pages whatever their format:
//   x_e = scale * q . k_e + beta_e,  out = sum_e softmax(x)_e v_e
// A list's entries are numbered through its pages in the order of the table, 64 numbers a page, even where it holds fewer
// (numbers without an entry are never seen). A row sees entries [visible_begin, visible_end) of the table, and all entries
// of the extra pages. A row that sees nothing gives zeros.
// Partial (max, sum, output) triples are merged in list order; a sink adds exp(sink) to the denominator.
struct AttendArgs {
  Tensor q;              // [T, H, D] f32, after RoPE
  Tensor row_sequence;   // [T] i32 in [0, B); rows of one sequence are contiguous within a phase, positions ascending
  Tensor pages;          // [N] PageRef, the lists' pages concatenated in order (sequence, kv head)
  Tensor list_begin;     // [B * G + 1] i32 into pages
  Tensor list_end;       // [B * G] i32, optional: where each list's pages end, if there is room before the next list's
  Tensor visible_begin;  // [T, G] i32
  Tensor visible_end;    // [T, G] i32
  Tensor extra_pages;    // [B * G, M] PageRef, optional: pages that may differ at every step (written on the device)
  Tensor extra_counts;   // [B * G] i32, how many of them count now
  const void* arena = nullptr;
  float scale = 1;
  Tensor sinks;      // [H] f32, optional: a logit per head that has no value
  Tensor mean_keys;  // [G, D] f32: what coded keys lack; undefined: zero
  bool coded = false;  // some page of the step is coded: without it the coded readers are never looked for
  int prompt_rows = 0;
  Tensor out;  // [T, H, D] f32

  // Optional outputs, for decode rows only (prompt rows leave them alone); a sequence that asks has one decode row.
  Tensor page_mass;          // [N, R] f32: probability that a page received from each head of the group
  Tensor entry_probability;  // [N, P, R] f32: the same per entry; entries out of sight get 0
};

// Moves the arrays of a decode step of one row a sequence (T = B) on to the next such step, for L layers at once: every
// list gets one entry more, in the slot after the last one, and every position is the next. Lists whose row goes into
// another page than the last one's say which; their tables have room for it.
struct TailPage {
  int32_t list = 0;  // index into slots
  PageRef page;      // `count` includes the new row
};
struct AdvanceListsArgs {
  Tensor positions;    // [T] i32
  Tensor slots;        // [L, T, G] PageRef
  Tensor visible_end;  // [L, T, G] i32: entries of the list
  Tensor list_begin;   // [L, T * G + 1] i32
  Tensor list_end;     // [L, T * G] i32
  Tensor pages;        // PageRef; but for the last, all pages of a list are full
  Tensor tails;        // [n] TailPage, undefined if n = 0
};

// Copies single entries between pages of equal format, log-weights included (a source without them gives beta 0). In the
// order given: a copy may read what an earlier one wrote, and may write where an earlier one has read.
struct EntryCopy {
  PageRef from;  // `count` is the slot
  PageRef to;    // `count` is the slot
};
struct CopyEntriesArgs {
  const EntryCopy* copies = nullptr;  // host memory, read before the call returns
  int64_t num_copies = 0;
  int head_dim = 0;
  void* arena = nullptr;
};

// Moves single entries into slots of any format, log-weights included: equal codecs byte by byte, others by way of f32 (a
// coded side is decoded, the mean key added; then coded anew). No entry is read that an earlier one of the call has written.
struct EntryTranscode {
  PageRef from;  // `count` is the slot
  PageRef to;    // `count` is the slot
  int32_t list = 0;  // layer * G + kv head, whose mean key counts
};
struct TranscodeEntriesArgs {
  const EntryTranscode* entries = nullptr;  // host memory, read before the call returns
  int64_t num_entries = 0;
  int head_dim = 0;
  void* arena = nullptr;
  Tensor mean_keys;  // [L * G, D] f32; undefined: zero
  Tensor faults;     // [1] i32, one more for every side that was to be coded and is not finite; optional
};

// What policies want to know of attention: how much probability each entry gets from some rows of one sequence.
//   columns[h][e] += sum over rows of softmax(scale * q . k + beta)_e, over the entries that the row sees, sink included
// Rows are added in their order, each as if it were alone, so that chunks of a prompt add up to the same bits. Two passes
// over a row's scores: the maximum and the sum are only known when the row is complete. Costs one more product of query and
// key for the rows asked, nothing otherwise.
struct SumAttentionArgs {
  Tensor q;              // [T, H, D] f32, after RoPE; row_stride may skip rows
  Tensor pages;          // [N] PageRef, the lists' pages concatenated in order of kv heads
  Tensor list_begin;     // [G + 1] i32 into pages
  Tensor visible_begin;  // [T, G] i32
  Tensor visible_end;    // [T, G] i32
  const void* arena = nullptr;
  float scale = 1;
  Tensor sinks;                      // [H] f32, optional
  Tensor mean_keys;                  // [G, D] f32: what coded keys lack; undefined: zero
  float* const* columns = nullptr;   // [H] arrays of 64 floats a page of the list of the head's group
};

// What the keys of one list look like, rotated as they are stored.
struct SummariseKeysArgs {
  const PageRef* pages = nullptr;  // [num_pages], host memory, read before the call returns
  int num_pages = 0;
  int head_dim = 0;
  const void* arena = nullptr;
  float* norms = nullptr;      // [entries] Euclidean norm
  float* alignment = nullptr;  // [entries] cosine with the mean of all keys at length 1; optional
  const float* mean_key = nullptr;  // [D] on the device: what coded keys lack; null: zero
};

// Writes the weighted mean of some entries, keys and values alike, as one entry with a log-weight. Dense pages only.
struct MergeSource {
  PageRef entry;  // `count` is the slot
  float weight = 0;
};
struct EntryMerge {
  int32_t first = 0;  // into sources
  int32_t count = 0;
  float log_weight = 0;
  PageRef to;  // `count` is the slot; of a class with log-weights
};
struct MergeEntriesArgs {
  const MergeSource* sources = nullptr;  // host memory, read before the call returns
  const EntryMerge* merges = nullptr;
  int64_t num_merges = 0;
  int head_dim = 0;
  void* arena = nullptr;
};

// How unexpected a token is: out[i] = -log softmax(logits[i])[ids[i]], in nats. A maximum, then a sum in double or better.
struct SurprisalArgs {
  Tensor logits;  // [n, V] f32
  Tensor ids;     // [n] i32 in [0, V)
  Tensor out;     // [n] f32
};

// ---- choosing tokens

// What happens to a logit x before a token is chosen: x += bias; x = x > 0 ? x / repetition : x * repetition;
// x -= frequency; x -= presence. A bias of -inf takes the token out.
struct LogitChange {
  int32_t id = 0;
  float bias = 0;
  float repetition = 1;
  float frequency = 0;
  float presence = 0;
};

// How one token is chosen: mask and changes; then the best (temperature below kGreedyBelow; of equals the lowest id), or
// weights w = exp((x - best) / temperature), of which top_k keeps the best ones (of equals the lowest ids), top_p as many
// of these, best first, as hold that share of their sum, and min_p those of at least min_p times the best one's; each
// keeps one at least. The draw u walks what is kept: best first under top_k or top_p, by ids otherwise.
inline constexpr float kGreedyBelow = 1e-5f;
inline constexpr int kMaxTopTokens = 20;
struct SampleRow {
  int32_t logits = 0;  // row of the logits; may be that of the row before, otherwise the next
  int32_t first_change = 0;
  int32_t num_changes = 0;  // of distinct ids
  float temperature = 1;
  float top_p = 1;
  float min_p = 0;
  int32_t top_k = 0;     // 0: off
  int32_t num_top = -1;  // log-probabilities of the chosen token and so many best ones; -1: none
  int32_t mask = -1;     // row of the masks; -1: every token may come
  double u = 0;          // in [0, 1)
};

struct SampledRow {
  int32_t id = -1;            // kNoTokenLeft, kNoFiniteLogit
  float logprob = 0;          // of the chosen token, in nats, by the logits before mask and changes
  int32_t num_top = 0;        // fewer than asked if fewer are above -inf
  float best = 0;             // the largest logit before mask and changes, for messages
  int32_t top_ids[kMaxTopTokens];
  float top_logprobs[kMaxTopTokens];
};
inline constexpr int32_t kNoTokenLeft = -1;    // mask and changes left none
inline constexpr int32_t kNoFiniteLogit = -2;  // there was none before them

// Rows that share their logits share mask and num_top.
struct SampleArgs {
  Tensor logits;   // [n, V] f32, changed on the way and restored, but for what a mask takes out: that stays -inf
  Tensor rows;     // [m] SampleRow
  Tensor changes;  // LogitChange, undefined if no row has any
  Tensor masks;    // [k, (V + 31) / 32] i32, undefined if no row has one: token i may come if bit i % 32 of word i / 32 is set
  Tensor out;      // [m] SampledRow
};

// Copies rows: out[i] = x[rows[i]].
struct GatherRowsArgs {
  Tensor x;     // [T, E] f32
  Tensor rows;  // [n] i32
  Tensor out;   // [n, E] f32
};

}  // namespace loupe
