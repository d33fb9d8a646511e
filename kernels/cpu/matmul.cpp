// Decides which kernel multiplies which rows and shares the work among the threads. Speed limits: with few rows the
// weights' bytes over the memory's bandwidth; with many rows 2 * T * rows * cols flops.
//
// The kernel is chosen by phase, element type and instruction set, never by the number of rows.
#include <algorithm>

#include "kernels/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/matmul_kernels.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/scratch.h"

namespace loupe {
namespace {

// Strips that are multiplied with one tile of rows after the other stay in the second-level cache.
constexpr int64_t kGroupBytes = 256 << 10;
// Up to so many rows every thread quantises all of them for itself, which is shorter than a barrier.
constexpr int64_t kRowsWithoutBarrier = 2;
// Rows whose sums of a panel are kept at a time (128 KiB).
constexpr int64_t kPanelGroupRows = 510;
static_assert(kPanelGroupRows % kPanelRows == 0);

enum class Path { kFloat, kExpanded, kQuantised, kPanel };

const MatMulKernels& KernelsOf(Isa isa) {
  const MatMulKernels& own = isa == Isa::kAvx512 ? kAvx512MatMul : isa == Isa::kAvx2 ? kAvx2MatMul : kPortableMatMul;
  return own.f32 != nullptr ? own : kPortableMatMul;
}

Path ChoosePath(const MatMulKernels& kernels, WeightType type, bool exact, bool prompt) {
  if (type == WeightType::kF32) return Path::kFloat;
  if (exact) return Path::kExpanded;
  if (prompt && kernels.panels && type != WeightType::kF16) return Path::kPanel;
  if (prompt && kernels.expand_prompts && IsQuantised(type)) return Path::kExpanded;
  if (IsQuantised(type)) return kernels.quantised_tile > 0 ? Path::kQuantised : Path::kExpanded;
  return (type == WeightType::kF16 ? kernels.f16 : kernels.bf16) != nullptr ? Path::kFloat : Path::kExpanded;
}

int64_t QuantBlocks(int64_t cols) { return (cols + 63) / 64 * 2; }  // padded to pairs, as strips are

// Elements between bf16 rows: padded to what fill_panel may read, and off the powers of two, whose rows would compete
// for the same cache sets.
int64_t RoundedStride(int64_t cols) {
  const int64_t stride = (cols + 63) / 64 * 64;
  return stride % 512 == 0 ? stride + 64 : stride;
}

// The rows of one phase.
class PhaseMatMul {
 public:
  PhaseMatMul(const MatMulArgs& args, CpuContext context, int64_t begin, int64_t end, bool prompt)
      : args_(args),
        context_(context),
        kernels_(KernelsOf(context.isa)),
        weight_(static_cast<const PackedWeight&>(*args.weight)),
        begin_(begin),
        rows_(end - begin),
        cols_(weight_.cols()) {
    for (const WeightPart& part : weight_.parts()) {
      const Path path = ChoosePath(kernels_, part.type, context.exact, prompt);
      quantise_ |= path == Path::kQuantised;
      round_ |= path == Path::kPanel;
      expand_ |= path == Path::kExpanded;
    }
    prompt_ = prompt;
  }

  void Run() {
    ReserveScratch();
    context_.pool.Run([this](int thread) {
      Prepare(thread);
      for (const WeightPart& part : weight_.parts()) {
        const Path path = ChoosePath(kernels_, part.type, context_.exact, prompt_);
        if (path == Path::kPanel) {
          MultiplyPanels(part, thread);
        } else {
          MultiplyStrips(part, path, thread);
        }
      }
    });
  }

 private:
  bool every_thread_quantises() const { return rows_ <= kRowsWithoutBarrier && !round_; }
  int64_t quantised_bytes() const { return rows_ * QuantBlocks(cols_) * static_cast<int64_t>(sizeof(ActivationBlock)); }
  int64_t rounded_rows() const { return (rows_ + kPanelRows - 1) / kPanelRows * kPanelRows; }
  int64_t group_strips(int64_t strip_bytes) const { return std::max<int64_t>(1, kGroupBytes / strip_bytes); }

  // Shared: quantised rows, then bf16 rows. A thread's own: a panel and its sums, or expanded strips, or quantised
  // rows.
  void ReserveScratch() {
    CpuScratch& scratch = *context_.scratch;
    rounded_offset_ = quantise_ ? (quantised_bytes() + 63) / 64 * 64 : 0;
    const int64_t rounded = round_ ? rounded_rows() * RoundedStride(cols_) * 2 : 0;
    if (!every_thread_quantises()) scratch.activations.Reserve(rounded_offset_ + rounded);
    int64_t own = every_thread_quantises() && quantise_ ? quantised_bytes() : 0;
    if (round_) own = kPanelCols * kPanelOutputs * 2 + std::min(rounded_rows(), kPanelGroupRows) * kPanelOutputs * 4;
    if (expand_) {
      const int64_t f32_bytes = StripBytes(WeightType::kF32, cols_);
      own = std::max(own, group_strips(f32_bytes) * f32_bytes);
    }
    for (ScratchBuffer& buffer : scratch.thread) buffer.Reserve(own);
  }

  ActivationBlock* quantised_rows(int thread) const {
    CpuScratch& scratch = *context_.scratch;
    ScratchBuffer& buffer =
        every_thread_quantises() ? scratch.thread[static_cast<size_t>(thread)] : scratch.activations;
    return buffer.as<ActivationBlock>();
  }
  uint16_t* rounded(int64_t row) const {
    return reinterpret_cast<uint16_t*>(context_.scratch->activations.as<uint8_t>() + rounded_offset_) +
           row * RoundedStride(cols_);
  }
  const float* x_row(int64_t row) const { return args_.x.row<float>(begin_ + row); }

  // Where the tile that starts at `row` keeps its blocks, and how many rows it has.
  int64_t TileRows(int64_t row, int tile) const { return std::min<int64_t>(tile, rows_ - row); }

  void Quantise(int64_t row, ActivationBlock* blocks) {
    const int64_t first = row / kernels_.quantised_tile * kernels_.quantised_tile;
    const int64_t stride = TileRows(first, kernels_.quantised_tile);
    kernels_.quantise(x_row(row), cols_, blocks + first * QuantBlocks(cols_) + (row - first), static_cast<int>(stride));
  }

  void Prepare(int thread) {
    if (!quantise_ && !round_) return;
    const bool all = every_thread_quantises();
    const auto [begin, end] = all ? std::pair<int64_t, int64_t>(0, rows_) : context_.pool.Share(rows_, thread);
    for (int64_t row = begin; row < end; ++row) {
      if (quantise_) Quantise(row, quantised_rows(thread));
      if (round_) kernels_.round_rows(x_row(row), cols_, rounded(row));
    }
    if (!all) context_.pool.Barrier();
  }

  void MultiplyStrips(const WeightPart& part, Path path, int thread) {
    const auto [begin, end] = context_.pool.Share(part.num_strips(), thread);
    const int tile = path == Path::kQuantised ? kernels_.quantised_tile : kernels_.float_tile;
    const int64_t f32_bytes = StripBytes(WeightType::kF32, cols_);
    const int64_t group = path != Path::kExpanded && rows_ <= tile
                              ? end - begin
                              : group_strips(path == Path::kExpanded ? f32_bytes : part.strip_bytes);
    for (int64_t first = begin; first < end; first += group) {
      const int64_t last = std::min(first + group, end);
      uint8_t* expanded = context_.scratch->thread[static_cast<size_t>(thread)].as<uint8_t>();
      if (path == Path::kExpanded) {
        for (int64_t s = first; s < last; ++s) {
          kernels_.expand(part.type, part.strip(s), cols_,
                          reinterpret_cast<float*>(expanded + (s - first) * f32_bytes));
        }
      }
      for (int64_t row = 0; row < rows_; row += tile) {
        StripCall call{};
        call.cols = cols_;
        call.num_rows = static_cast<int>(TileRows(row, tile));
        call.rows = path == Path::kQuantised
                        ? static_cast<const void*>(quantised_rows(thread) + row * QuantBlocks(cols_))
                        : x_row(row);
        call.row_stride = args_.x.row_stride;
        for (int64_t s = first; s < last; ++s) {
          call.strip = path == Path::kExpanded ? expanded + (s - first) * f32_bytes : part.strip(s);
          MultiplyTile(part, path, row, s, call);
        }
      }
    }
  }

  // Fills in where the results go. The last strip of a part may have fewer rows than lanes: it goes through a buffer.
  void MultiplyTile(const WeightPart& part, Path path, int64_t row, int64_t strip, StripCall& call) {
    const int64_t output = part.first_row + strip * kStripRows;
    const int64_t valid = std::min<int64_t>(kStripRows, part.rows - strip * kStripRows);
    float* out = args_.out.row<float>(begin_ + row) + output;
    const float* bias = args_.bias.defined() ? args_.bias.as<float>() + output : nullptr;
    const float* add = args_.add.defined() ? args_.add.row<float>(begin_ + row) + output : nullptr;
    float buffer[kMaxTile * kStripRows];
    const bool whole = valid == kStripRows;
    call.out = whole ? out : buffer;
    call.out_stride = whole ? args_.out.row_stride : kStripRows;
    call.bias = whole ? bias : nullptr;
    call.add = whole ? add : nullptr;
    call.add_stride = args_.add.row_stride;
    Dispatch(part.type, path, call);
    if (whole) return;
    for (int r = 0; r < call.num_rows; ++r) {
      for (int64_t lane = 0; lane < valid; ++lane) {
        float value = buffer[r * kStripRows + lane];
        if (bias) value += bias[lane];
        if (add) value += add[r * args_.add.row_stride + lane];
        out[r * args_.out.row_stride + lane] = value;
      }
    }
  }

  void Dispatch(WeightType type, Path path, const StripCall& call) {
    if (path == Path::kQuantised) return kernels_.quantised(type, call);
    if (path == Path::kExpanded || type == WeightType::kF32) return kernels_.f32(call);
    return type == WeightType::kF16 ? kernels_.f16(call) : kernels_.bf16(call);
  }

  // Threads share the line of (panel, tile of rows) evenly: a thread may start and end in the middle of a panel's rows.
  void MultiplyPanels(const WeightPart& part, int thread) {
    const int64_t panels = (part.num_strips() + kPanelStrips - 1) / kPanelStrips;
    const int64_t tiles = rounded_rows() / kPanelRows;
    const auto [begin, end] = context_.pool.Share(panels * tiles, thread);
    constexpr int64_t kGroupTiles = kPanelGroupRows / kPanelRows;
    for (int64_t at = begin; at < end;) {
      const int64_t panel = at / tiles;
      const int64_t first = at % tiles;
      const int64_t count = std::min({tiles - first, end - at, kGroupTiles});
      MultiplyPanel(part, panel, first, count, thread);
      at += count;
    }
  }

  void MultiplyPanel(const WeightPart& part, int64_t panel, int64_t first_tile, int64_t num_tiles, int thread) {
    uint16_t* expanded = context_.scratch->thread[static_cast<size_t>(thread)].as<uint16_t>();
    float* sums = reinterpret_cast<float*>(expanded + kPanelCols * kPanelOutputs);
    const int64_t first_strip = panel * kPanelStrips;
    const int64_t last_strip = std::min(first_strip + kPanelStrips, part.num_strips());
    for (int64_t begin = 0; begin < cols_; begin += kPanelCols) {
      const int64_t end = std::min<int64_t>(begin + kPanelCols, cols_);
      for (int64_t s = first_strip; s < last_strip; ++s) {
        kernels_.fill_panel(part.type, part.strip(s), begin, end, expanded + (s - first_strip) * 2 * kStripRows);
      }
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t row = (first_tile + t) * kPanelRows;
        float* tile_sums = sums + t * kPanelRows * kPanelOutputs;
        const int pairs = static_cast<int>((end - begin + 1) / 2);
        const PanelStore store = StoreOf(part, first_strip, row);
        kernels_.panel({rounded(row) + begin, static_cast<int>(TileRows(row, kPanelRows)), RoundedStride(cols_), expanded, pairs,
                        tile_sums, begin == 0, end == cols_ ? &store : nullptr});
      }
    }
  }

  PanelStore StoreOf(const WeightPart& part, int64_t first_strip, int64_t row) const {
    const int64_t output = part.first_row + first_strip * kStripRows;
    PanelStore store{};
    store.num_outputs = static_cast<int>(std::min<int64_t>(kPanelOutputs, part.rows - first_strip * kStripRows));
    store.out = args_.out.row<float>(begin_ + row) + output;
    store.out_stride = args_.out.row_stride;
    store.bias = args_.bias.defined() ? args_.bias.as<float>() + output : nullptr;
    store.add = args_.add.defined() ? args_.add.row<float>(begin_ + row) + output : nullptr;
    store.add_stride = args_.add.row_stride;
    return store;
  }

  static constexpr int kMaxTile = 16;

  const MatMulArgs& args_;
  const CpuContext context_;
  const MatMulKernels& kernels_;
  const PackedWeight& weight_;
  const int64_t begin_;
  const int64_t rows_;
  const int64_t cols_;
  bool prompt_ = false;
  bool quantise_ = false;
  bool round_ = false;
  bool expand_ = false;
  int64_t rounded_offset_ = 0;
};

void CheckShapes(const MatMulArgs& args) {
  LOUPE_CHECK(args.weight != nullptr) << "MatMul without weight";
  const int64_t rows = args.x.rows();
  LOUPE_CHECK_EQ(args.x.row_elements(), args.weight->cols());
  LOUPE_CHECK_EQ(args.out.row_elements(), args.weight->rows());
  LOUPE_CHECK_EQ(args.out.rows(), rows);
  LOUPE_CHECK(args.prompt_rows >= 0 && args.prompt_rows <= rows) << args.prompt_rows << " prompt rows of " << rows;
  if (args.add.defined()) {
    LOUPE_CHECK_EQ(args.add.rows(), rows);
    LOUPE_CHECK_EQ(args.add.row_elements(), args.weight->rows());
  }
}

}  // namespace

void MatMulCpu(const MatMulArgs& args, CpuContext context) {
  CheckShapes(args);
  LOUPE_CHECK(context.scratch != nullptr) << "MatMul without scratch";
  const int64_t rows = args.x.rows();
  // Where both phases use the same kernels, one pass over the weights serves both.
  const MatMulKernels& kernels = KernelsOf(context.isa);
  const bool split = (kernels.panels || kernels.expand_prompts) && !context.exact;
  const int64_t prompt_rows = split ? args.prompt_rows : 0;
  if (prompt_rows > 0) PhaseMatMul(args, context, 0, prompt_rows, true).Run();
  if (prompt_rows < rows) PhaseMatMul(args, context, prompt_rows, rows, false).Run();
}

}  // namespace loupe
