// What the driver of attention (attend.cpp) asks of one instruction set: pure compute on pages that the driver has
// already looked up. Each instruction set fills one table; the bodies are templates in attend_body.h. Nothing here
// allocates, fails or knows of threads. Logits are in base 2: queries carry scale * log2(e), log-weights log2(e).
#pragma once

#include <cstdint>

namespace loupe::attend {

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxGroup = 16;      // query heads per kv head
inline constexpr int kUnitPages = 4;      // stretches of one unit of decode work: fixed, so results do not depend on threads
inline constexpr int kUnitEntries = 256;  // kUnitPages * 64
inline constexpr int kMaxStretch = 4;     // small pages that count as one page
inline constexpr int kUnitViews = kUnitPages * kMaxStretch;
inline constexpr int kEverything = 1 << 30;

// Outputs under way are kept in whole vectors of 16 lanes.
[[gnu::always_inline]] inline constexpr int PaddedDim(int head_dim) { return (head_dim + 15) / 16 * 16; }

// A turned query and, behind it, what its instruction set makes of it for its own use.
[[gnu::always_inline]] inline constexpr int TurnedFloats(int head_dim) { return head_dim + head_dim / 2 + 16; }

// A page with its planes looked up.
struct PageView {
  const uint8_t* keys = nullptr;
  const uint8_t* values = nullptr;
  const uint16_t* key_scales = nullptr;    // [count] fp16, if keys are coded
  const uint16_t* value_scales = nullptr;  // if values are
  const float* log_weights = nullptr;  // [count], natural logarithm; null: all zero
  int32_t count = 0;                   // entries in use
  int32_t first = 0;                   // number of its first entry in the list's table
  uint8_t key_codec = 0;
  uint8_t value_codec = 0;
  bool extra = false;  // not of the table: all its entries are seen
  bool joins = false;  // a small page that makes a stretch with the full small page before it
};

// Queries of one row and one kv head: R heads that share keys and values.
struct Group {
  const float* q = nullptr;  // [R, D]
  int heads = 0;             // R
  int head_dim = 0;          // D, a multiple of 8
  float scale_log2e = 0;
};

// The same for keys that are coded (spherical.h): q * scale_log2e, turned, and its product with the mean key.
struct TurnQueries {
  Group group;
  const float* mean = nullptr;  // [D] or null: zero
  float* turned = nullptr;      // [R, TurnedFloats(D)]
  float* shift = nullptr;       // [R]
};

// At most kUnitPages stretches of one list for one row. Whether a stretch is one page or several changes no bit.
struct DecodeUnit {
  Group group;
  PageView pages[kUnitViews];
  int num_pages = 0;
  int visible_begin = 0;
  int visible_end = 0;
  const PageView* next = nullptr;  // the pages of the unit after this one, to be fetched meanwhile; or null
  int num_next = 0;
  float* max = nullptr;           // [R], -inf if nothing is seen
  float* sum = nullptr;           // [R]
  float* out = nullptr;           // [R, PaddedDim(D)], not divided by the sum
  // If the step has coded pages.
  const float* turned = nullptr;  // [R, TurnedFloats(D)], of TurnQueries
  const float* shift = nullptr;   // [R]
  float* out_turned = nullptr;    // [R, PaddedDim(D)]: what coded values add, still turned
  // Wanted by few. Relative to the unit's maximum here; the merge's factors make them probabilities.
  float* page_mass = nullptr;          // [num_pages, R]
  float* entry_probability = nullptr;  // [num_pages, 64, R]
};

// The triples of one row and one kv head, in the order of merging.
struct Merge {
  const float* max = nullptr;    // [units, R]
  const float* sum = nullptr;    // [units, R]
  const float* out = nullptr;    // [units, R, PaddedDim(D)]
  const float* out_turned = nullptr;  // the same, or null
  const float* sinks = nullptr;  // [R] logits in base e, or null
  int units = 0;
  int heads = 0;
  int head_dim = 0;
  float* result = nullptr;   // [R, D]
  float* factors = nullptr;  // [units, R] or null: what makes a unit's exponentials probabilities
};

// Consecutive prompt rows of one sequence against one list.
struct PromptTile {
  Group group;           // q of the first row
  int64_t q_stride = 0;  // elements between rows
  float* out = nullptr;  // [R, D] of the first row
  int64_t out_stride = 0;
  int rows = 0;
  const PageView* pages = nullptr;  // in order of merging
  int num_pages = 0;
  const int32_t* visible_begin = nullptr;  // of the first row; visible_stride elements between rows
  const int32_t* visible_end = nullptr;
  int64_t visible_stride = 0;
  const float* sinks = nullptr;  // [R] or null
  bool coded = false;            // some page is
  const float* mean = nullptr;   // [D] what coded keys lack, or null
  float* scratch = nullptr;      // PromptScratchFloats(...) floats, 64-byte aligned
};

// Floats of scratch that a tile of `rows` rows needs, whatever the kernel.
inline constexpr int64_t PromptScratchFloats(int rows, int heads, int head_dim, bool coded) {
  const int64_t queries = int64_t{rows} * heads;
  const int64_t padded = PaddedDim(head_dim);
  // Query, output, sum by lane, maximum, bounds; turned ones and the shift.
  const int64_t per_query = 2 * padded + 16 + 3 + (coded ? padded + TurnedFloats(head_dim) + 1 : 0);
  return queries * per_query + 64 * padded + 5 * 16;  // a page in bf16, alignment
}

// Rows of one query head against one list; its pages need not be full.
struct ColumnJob {
  const float* q = nullptr;  // [D] of the first row
  int64_t q_stride = 0;
  int rows = 0;
  int head_dim = 0;
  float scale_log2e = 0;
  const PageView* pages = nullptr;
  int num_pages = 0;
  const int32_t* visible_begin = nullptr;  // of the first row
  const int32_t* visible_end = nullptr;
  int64_t visible_stride = 0;
  const float* sink = nullptr;  // a logit in base e, or null
  bool coded = false;           // some page is
  const float* mean = nullptr;  // [D] what coded keys lack, or null
  float* scratch = nullptr;     // ColumnScratchFloats(...) floats, 64-byte aligned
  float* column = nullptr;      // [num_pages * 64], added to
};
inline constexpr int kColumnRows = 8;  // rows that share a pass over the keys
inline constexpr int64_t ColumnScratchFloats(int num_pages) {
  return kColumnRows * (int64_t{64} * num_pages + kMaxHeadDim + TurnedFloats(kMaxHeadDim));
}

struct Kernels {
  void (*turn_queries)(const TurnQueries& queries) = nullptr;
  void (*decode_unit)(const DecodeUnit& unit) = nullptr;
  void (*merge)(const Merge& merge) = nullptr;
  void (*prompt_tile)(const PromptTile& tile) = nullptr;       // f32 arithmetic
  void (*prompt_tile_fast)(const PromptTile& tile) = nullptr;  // may round queries, keys, values, weights to bf16
  void (*columns)(const ColumnJob& job) = nullptr;
  void (*to_half)(const float* x, uint16_t* y, int n) = nullptr;  // n a multiple of 8; saturates at 65504
};

const Kernels& PortableKernels();
#if defined(__x86_64__)
const Kernels& Avx2Kernels();
const Kernels& Avx512Kernels();
#endif

}  // namespace loupe::attend
