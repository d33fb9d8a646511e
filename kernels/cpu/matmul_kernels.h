// What a file of matrix kernels for one instruction set offers to the driver (matmul.cpp). The kernels know strips and
// tiles of rows, not threads or phases. Included by files built for different instruction sets, so it holds plain
// structs only. Every kernel's result for a row is the same whatever the other rows of its tile.
#pragma once

#include <cstdint>

#include "kernels/cpu/strip_layout.h"

namespace loupe {

// 32 activations of one row, quantised to 16 bits with one scale. The order inside `codes` is the kernel's own
// (AVX-512: 32 high then 32 low signed bytes of hi * 256 + lo). Rows of a tile are interleaved: block (b, r) of a tile
// of R rows lies at b * R + r, so that a kernel reaches everything from one pointer.
struct ActivationBlock {
  int8_t codes[64];
  float scale;
  float sum;      // scale * sum of the codes: multiplies the minimum of a Q4_1 block
  int32_t total;  // sum of the codes: undoes the offset of unsigned weights
};
static constexpr float kActivationMax = 32512;  // 127 * 256: both halves stay within a signed byte

// A tile of rows times one strip: out[r][0..15] = sum + bias + add.
struct StripCall {
  const uint8_t* strip;
  int64_t cols;
  const void* rows;    // f32 rows, or ActivationBlocks of the tile
  int64_t row_stride;  // f32 rows only, in elements
  int num_rows;
  float* out;
  int64_t out_stride;
  const float* bias;  // 16 values, or null
  const float* add;   // like out, or null; may be out
  int64_t add_stride;
};

// The prompt phase of AVX-512: 64 outputs (a panel, 4 strips) of a range of columns are expanded to bf16 once, laid out
// as [column pair][64 outputs][2], and used by all rows, 6 at a time. Sums stay in `sums` between ranges.
static constexpr int kPanelStrips = 4;
static constexpr int kPanelOutputs = kPanelStrips * kStripRows;
static constexpr int kPanelRows = 6;
static constexpr int kPanelCols = 192;  // 24 KiB of bf16: most of the first-level cache

// Where a panel's tile ends: out[r][o] = sum[r][o] + bias[o] + add[r][o].
struct PanelStore {
  int num_outputs;  // up to kPanelOutputs
  float* out;
  int64_t out_stride;
  const float* bias;
  const float* add;
  int64_t add_stride;
};

struct PanelCall {
  const uint16_t* rows;  // bf16 activations, readable up to a whole tile
  int num_rows;          // up to kPanelRows
  int64_t row_stride;    // elements
  const uint16_t* panel;
  int pairs;    // of columns
  float* sums;  // [kPanelRows][kPanelOutputs]
  bool first;   // sums start at zero
  const PanelStore* store;  // the last range of columns: sums go there; otherwise null
};

struct MatMulKernels {
  int float_tile = 1;  // most rows of a StripCall with f32 rows
  void (*f32)(const StripCall&) = nullptr;
  void (*f16)(const StripCall&) = nullptr;   // null: expand first
  void (*bf16)(const StripCall&) = nullptr;  // null: expand first
  // A strip of any type as an F32 strip.
  void (*expand)(WeightType type, const uint8_t* strip, int64_t cols, float* out) = nullptr;

  int quantised_tile = 0;  // most rows of a StripCall with ActivationBlocks; 0: expand first
  // `stride`: blocks between the blocks of a row. Writes an even number of blocks: the last may be zero.
  void (*quantise)(const float* x, int64_t cols, ActivationBlock* out, int stride) = nullptr;
  void (*quantised)(WeightType type, const StripCall& call) = nullptr;

  bool expand_prompts =
      false;  // in the prompt phase, quantised weights are expanded to f32, which is faster with many rows

  bool panels = false;  // the prompt phase uses these, for quantised and BF16 weights
  void (*round_rows)(const float* x, int64_t cols, uint16_t* out) = nullptr;  // f32 to bf16
  // Columns [begin, end) of a strip (begin a multiple of 64) into one of the four 16-column quarters of a panel.
  void (*fill_panel)(WeightType type, const uint8_t* strip, int64_t begin, int64_t end, uint16_t* out) = nullptr;
  void (*panel)(const PanelCall& call) = nullptr;
};

extern const MatMulKernels kPortableMatMul;
extern const MatMulKernels kAvx2MatMul;    // empty off x86
extern const MatMulKernels kAvx512MatMul;  // empty off x86

}  // namespace loupe
