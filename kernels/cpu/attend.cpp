// The driver of attention on the CPU: looks pages up, splits the work over threads, merges. The arithmetic is in the
// kernels of the instruction set (attend_kernels.h). Step thread; cannot fail, a violated shape is our own bug.
//
// Decode rows: a unit of work is (row, kv head, four consecutive stretches of the list) with all query heads of the group. A
// stretch is a page or the small pages in whose place there might be one. Units write triples, which are merged in list order,
// so neither threads nor other rows nor small pages can change a row's result.
// Bytes moved: all visible pages once, 4 * D a visible entry; flops 4 * R * D an entry, so memory is the limit.
//
// Prompt rows: a tile of rows of one sequence against one list, online softmax page by page in list order. Tiles are
// handed out one by one, the last (longest) first. Flops 4 * H * D a (row, entry) pair; compute is the limit.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/attend_kernels.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/spherical.h"

namespace loupe {
namespace {

using attend::DecodeUnit;
using attend::Kernels;
using attend::kUnitPages;
using attend::PageView;

// Units in flight between two merges, which bounds the scratch. One (row, kv head) may exceed it alone.
constexpr int64_t kMaxUnits = 4096;
// Blocks of 16 entries below which waking the other threads costs more than they save.
constexpr int64_t kMinCostToSplit = 24;
constexpr int kTileQueries = 96;  // (row, head) pairs of a prompt tile
constexpr int kMinTileRows = 8, kMaxTileRows = 64;

const Kernels& KernelsOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return attend::Avx512Kernels();
  if (isa == Isa::kAvx2) return attend::Avx2Kernels();
#endif
  (void)isa;
  return attend::PortableKernels();
}

// Memory that only grows, 64-byte aligned. Steps of a steady server allocate nothing.
class Scratch {
 public:
  float* Get(int64_t floats) {
    if (floats + 16 > static_cast<int64_t>(memory_.size())) memory_.resize(static_cast<size_t>(floats + floats / 2 + 16));
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<float*>((at + 63) / 64 * 64);
  }

 private:
  std::vector<float> memory_;
};

// Shapes of the call, and pages as views.
struct Problem {
  const AttendArgs& args;
  const Kernels& kernels;
  bool fast;
  int head_dim, groups, heads;  // D, G, R
  float scale_log2e;
  PageLayout layouts[2][kNumCodecs][kNumCodecs];  // by PageRef::small, key codec, value codec; with log-weights

  Problem(const AttendArgs& a, const CpuContext& context);

  PageView View(const PageRef& ref, int first, bool extra) const {
    PageView view;
    const auto* page = static_cast<const uint8_t*>(args.arena) + int64_t{ref.unit} * kPageAlignment;
    view.keys = page;
    const PageLayout& layout = layouts[ref.small][ref.key_codec][ref.value_codec];
    view.values = page + layout.value_offset;
    if (ref.log_weights) view.log_weights = reinterpret_cast<const float*>(page + layout.log_weight_offset);
    view.key_scales = reinterpret_cast<const uint16_t*>(page + layout.key_scale_offset);
    view.value_scales = reinterpret_cast<const uint16_t*>(page + layout.value_scale_offset);
    view.count = ref.count;
    view.first = first;
    view.key_codec = ref.key_codec;
    view.value_codec = ref.value_codec;
    view.extra = extra;
    return view;
  }
  // The pages of a list, [begin, end) into args.pages.
  std::pair<int, int> List(int list) const {
    const int32_t* at = args.list_begin.as<int32_t>() + list;
    return {at[0], args.list_end.defined() ? args.list_end.as<int32_t>()[list] : at[1]};
  }
  int ExtraCount(int list) const { return args.extra_pages.defined() ? args.extra_counts.as<int32_t>()[list] : 0; }
  const PageRef* ExtraPages(int list) const { return args.extra_pages.row<PageRef>(list); }
  int Visible(const Tensor& bound, int64_t row, int g) const { return bound.row<int32_t>(row)[g]; }
  const float* Mean(int g) const { return args.mean_keys.defined() ? args.mean_keys.row<float>(g) : nullptr; }
  const float* Sinks(int g) const { return args.sinks.defined() ? args.sinks.as<float>() + g * heads : nullptr; }
};

Problem::Problem(const AttendArgs& a, const CpuContext& context)
    : args(a), kernels(KernelsOf(context.isa)), fast(!context.exact) {
  head_dim = static_cast<int>(a.q.shape[2]);
  groups = static_cast<int>(a.visible_begin.shape[1]);
  LOUPE_CHECK(head_dim > 0 && head_dim % 8 == 0 && head_dim <= attend::kMaxHeadDim)
      << "head size " << head_dim << " is not a multiple of 8 up to " << attend::kMaxHeadDim;
  LOUPE_CHECK(groups > 0 && a.q.shape[1] % groups == 0) << a.q.shape[1] << " query heads, " << groups << " kv heads";
  heads = static_cast<int>(a.q.shape[1]) / groups;
  LOUPE_CHECK_LE(heads, attend::kMaxGroup) << "query heads a kv head";
  LOUPE_CHECK(a.prompt_rows >= 0 && a.prompt_rows <= a.q.rows()) << a.prompt_rows << " of " << a.q.rows() << " rows";
  LOUPE_CHECK(!a.coded || head_dim % spherical::kDimStep == 0) << "codes of head size " << head_dim;
  scale_log2e = a.scale * 1.44269504088896341f;
  for (int i = 0; i < 2 * kNumCodecs * kNumCodecs; ++i) {
    const int small = i / (kNumCodecs * kNumCodecs), key = i / kNumCodecs % kNumCodecs, value = i % kNumCodecs;
    const PageFormat format{static_cast<Codec>(key), static_cast<Codec>(value)};
    layouts[small][key][value] = MakePageLayout({format, small != 0, true}, head_dim);
  }
}

// ---- decode

// Whether `next` goes on with the stretch of `page`.
bool Joins(const PageRef& page, const PageRef& next) {
  return page.small && next.small && page.count == kSmallPageEntries && page.key_codec == next.key_codec &&
         page.value_codec == next.value_codec;
}

// Pages of a unit that begins with the first of `left` pages.
int PagesOfUnit(const PageRef* pages, int left) {
  int n = 0;
  for (int stretch = 0; stretch < kUnitPages && n < left; ++stretch) {
    const int first = n++;
    while (n < left && n - first < attend::kMaxStretch && Joins(pages[n - 1], pages[n])) ++n;
  }
  return n;
}

// What a unit is, before its pages are looked up.
struct UnitPlan {
  int32_t task;        // index of its (row, kv head)
  int32_t page;        // first page: into args.pages, or into the list's extra pages
  int32_t num_pages;
  int32_t first;       // table number of its first entry; -1 for extra pages
  int64_t cost_begin;  // blocks of all units before it
};
struct TaskPlan {
  int64_t row;
  int32_t g, list;
  int32_t unit_begin, unit_end;
  bool probabilities;
};

class Decode {
 public:
  Decode(const Problem& problem, ThreadPool& pool) : p_(problem), pool_(pool) {}
  void Run();

 private:
  void Plan(int64_t row, bool only_row);
  void PlanUnit(const UnitPlan& unit, int64_t entries);
  void Flush();
  void RunUnits(const UnitPlan* from, const UnitPlan* to) const;
  void ViewPages(const UnitPlan& plan, PageView* pages) const;
  void RunUnit(const UnitPlan& plan, DecodeUnit* unit) const;
  void MergeTask(const TaskPlan& task) const;
  void Probabilities(const TaskPlan& task, const float* factors) const;
  attend::Group GroupOf(const TaskPlan& task) const {
    return {p_.args.q.row<float>(task.row) + int64_t{task.g} * p_.heads * p_.head_dim, p_.heads, p_.head_dim, p_.scale_log2e};
  }

  const Problem& p_;
  ThreadPool& pool_;
  int64_t cost_ = 0;
  float *max_ = nullptr, *sum_ = nullptr, *out_ = nullptr, *factors_ = nullptr;
  float *turned_ = nullptr, *shift_ = nullptr, *out_turned_ = nullptr;  // of a step with coded pages: by task, by unit
  // The step thread's, kept between calls.
  static thread_local std::vector<TaskPlan> tasks_;
  static thread_local std::vector<UnitPlan> units_;
  static thread_local Scratch scratch_;
  // A call's view of them, for the other threads.
  const TaskPlan* tasks_at_ = nullptr;
  const UnitPlan* units_at_ = nullptr;
};
thread_local std::vector<TaskPlan> Decode::tasks_;
thread_local std::vector<UnitPlan> Decode::units_;
thread_local Scratch Decode::scratch_;

void Decode::Run() {
  const int64_t rows = p_.args.q.rows();
  const int32_t* sequence = p_.args.row_sequence.as<int32_t>();
  tasks_.clear(), units_.clear(), cost_ = 0;
  for (int64_t row = p_.args.prompt_rows; row < rows; ++row) {
    const bool first = row == p_.args.prompt_rows || sequence[row - 1] != sequence[row];
    const bool last = row + 1 == rows || sequence[row + 1] != sequence[row];
    Plan(row, first && last);
    if (static_cast<int64_t>(units_.size()) >= kMaxUnits) Flush();
  }
  if (!tasks_.empty()) Flush();
}

void Decode::PlanUnit(const UnitPlan& unit, int64_t entries) {
  units_.push_back(unit);
  units_.back().cost_begin = cost_;
  cost_ += 2 + entries / kBlockEntries;  // a unit costs something however short
}

// The units of a row: those of the table that hold something in sight, then the extra pages.
void Decode::Plan(int64_t row, bool only_row) {
  const AttendArgs& a = p_.args;
  const PageRef* pages = a.pages.as<PageRef>();
  for (int g = 0; g < p_.groups; ++g) {
    const int list = a.row_sequence.as<int32_t>()[row] * p_.groups + g;
    const int begin = p_.Visible(a.visible_begin, row, g), end = p_.Visible(a.visible_end, row, g);
    const auto task = static_cast<int32_t>(tasks_.size());
    const auto unit_begin = static_cast<int32_t>(units_.size());
    const auto [from, to] = p_.List(list);
    for (int page = from, first = 0; page < to && first < end;) {
      const int n = PagesOfUnit(pages + page, to - page);
      int entries = 0;
      for (int i = 0; i < n; ++i) entries += pages[page + i].count;
      if (first + n * kPageEntries > begin) PlanUnit({task, page, n, first, 0}, std::min(entries, end - first));
      page += n, first += n * kPageEntries;
    }
    const int extra = p_.ExtraCount(list);
    for (int page = 0; page < extra; page += kUnitPages) {
      PlanUnit({task, page, std::min(kUnitPages, extra - page), -1, 0}, kUnitPages * kPageEntries);
    }
    tasks_.push_back({row, g, list, unit_begin, static_cast<int32_t>(units_.size()), only_row});
  }
}

void Decode::Flush() {
  const auto units = static_cast<int64_t>(units_.size());
  const int64_t outputs = units * p_.heads * attend::PaddedDim(p_.head_dim), scalars = units * p_.heads;
  const auto tasks = static_cast<int64_t>(tasks_.size());
  const int64_t queries = tasks * p_.heads;
  out_ = scratch_.Get(outputs + 3 * scalars + (p_.args.coded ? outputs + queries * (attend::TurnedFloats(p_.head_dim) + 1) : 0));
  max_ = out_ + outputs, sum_ = max_ + scalars, factors_ = sum_ + scalars;
  const int64_t turned = attend::TurnedFloats(p_.head_dim);
  if (p_.args.coded) out_turned_ = factors_ + scalars, turned_ = out_turned_ + outputs, shift_ = turned_ + queries * turned;
  tasks_at_ = tasks_.data(), units_at_ = units_.data();
  const auto turn_queries = [this](int64_t from, int64_t to) {
    for (int64_t task = from; p_.args.coded && task < to; ++task) {
      const int64_t at = task * p_.heads;
      const TaskPlan& plan = tasks_at_[task];
      p_.kernels.turn_queries({GroupOf(plan), p_.Mean(plan.g), turned_ + at * attend::TurnedFloats(p_.head_dim), shift_ + at});
    }
  };
  const auto merge_tasks = [this](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; ++task) MergeTask(tasks_at_[task]);
  };
  if (cost_ <= kMinCostToSplit) {
    turn_queries(0, tasks);
    RunUnits(units_at_, units_at_ + units);
    merge_tasks(0, tasks);
  } else {
    pool_.Run([&](int thread) {
      const auto [task_from, task_to] = pool_.Share(tasks, thread);
      if (p_.args.coded) {
        turn_queries(task_from, task_to);
        pool_.Barrier();
      }
      // Contiguous shares of equal cost: a thread takes the units that begin inside its share.
      const auto [cost_from, cost_to] = pool_.Share(cost_, thread);
      const auto before = [](const UnitPlan& unit, int64_t cost) { return unit.cost_begin < cost; };
      RunUnits(std::lower_bound(units_at_, units_at_ + units, cost_from, before),
                std::lower_bound(units_at_, units_at_ + units, cost_to, before));
      pool_.Barrier();
      merge_tasks(task_from, task_to);
    });
  }
  tasks_.clear(), units_.clear(), cost_ = 0;
}

// A unit's pages are looked up one unit ahead, so that memory has the time of a whole unit to bring them.
void Decode::RunUnits(const UnitPlan* from, const UnitPlan* to) const {
  DecodeUnit units[2];
  if (from < to) ViewPages(*from, units[0].pages);
  for (const UnitPlan* plan = from; plan < to; ++plan) {
    DecodeUnit &unit = units[(plan - from) % 2], &next = units[(plan - from + 1) % 2];
    unit.num_next = plan + 1 < to ? plan[1].num_pages : 0;
    unit.next = next.pages;
    if (unit.num_next > 0) ViewPages(plan[1], next.pages);
    RunUnit(*plan, &unit);
  }
}

void Decode::ViewPages(const UnitPlan& plan, PageView* pages) const {
  const bool extra = plan.first < 0;
  const PageRef* refs = (extra ? p_.ExtraPages(tasks_at_[plan.task].list) : p_.args.pages.as<PageRef>()) + plan.page;
  for (int i = 0, first = 0; i < plan.num_pages; ++i) {
    pages[i] = p_.View(refs[i], extra ? 0 : plan.first + i * kPageEntries, extra);
    pages[i].joins = !extra && i > 0 && i - first < attend::kMaxStretch && Joins(refs[i - 1], refs[i]);
    if (!pages[i].joins) first = i;
  }
}

void Decode::RunUnit(const UnitPlan& plan, DecodeUnit* out) const {
  const TaskPlan& task = tasks_at_[plan.task];
  const AttendArgs& a = p_.args;
  DecodeUnit& unit = *out;
  unit.group = GroupOf(task);
  unit.num_pages = plan.num_pages;
  unit.visible_begin = p_.Visible(a.visible_begin, task.row, task.g);
  unit.visible_end = p_.Visible(a.visible_end, task.row, task.g);
  const int64_t at = (&plan - units_at_) * p_.heads;
  unit.max = max_ + at, unit.sum = sum_ + at, unit.out = out_ + at * attend::PaddedDim(p_.head_dim);
  if (a.coded) {
    const int64_t of_task = int64_t{plan.task} * p_.heads;
    unit.turned = turned_ + of_task * attend::TurnedFloats(p_.head_dim), unit.shift = shift_ + of_task;
    unit.out_turned = out_turned_ + at * attend::PaddedDim(p_.head_dim);
  }
  const bool wanted = plan.first >= 0 && task.probabilities;
  unit.page_mass = wanted && a.page_mass.defined() ? a.page_mass.row<float>(plan.page) : nullptr;
  unit.entry_probability = wanted && a.entry_probability.defined() ? a.entry_probability.row<float>(plan.page) : nullptr;
  p_.kernels.decode_unit(unit);
}

void Decode::MergeTask(const TaskPlan& task) const {
  const int64_t at = int64_t{task.unit_begin} * p_.heads;
  attend::Merge merge;
  merge.max = max_ + at, merge.sum = sum_ + at, merge.out = out_ + at * attend::PaddedDim(p_.head_dim);
  if (p_.args.coded) merge.out_turned = out_turned_ + at * attend::PaddedDim(p_.head_dim);
  merge.sinks = p_.Sinks(task.g);
  merge.units = task.unit_end - task.unit_begin;
  merge.heads = p_.heads, merge.head_dim = p_.head_dim;
  merge.result = p_.args.out.row<float>(task.row) + int64_t{task.g} * p_.heads * p_.head_dim;
  const bool wanted = task.probabilities && (p_.args.page_mass.defined() || p_.args.entry_probability.defined());
  if (wanted) merge.factors = factors_ + at;
  p_.kernels.merge(merge);
  if (wanted) Probabilities(task, merge.factors);
}

// Exponentials relative to a unit's maximum become probabilities; pages without a unit are out of sight and get 0.
void Decode::Probabilities(const TaskPlan& task, const float* factors) const {
  const AttendArgs& a = p_.args;
  const auto scale = [&](int page, const float* by) {
    if (a.page_mass.defined()) {
      float* x = a.page_mass.row<float>(page);
      for (int h = 0; h < p_.heads; ++h) x[h] = by != nullptr ? x[h] * by[h] : 0;
    }
    if (a.entry_probability.defined()) {
      float* x = a.entry_probability.row<float>(page);
      for (int e = 0; e < kPageEntries; ++e, x += p_.heads) {
        for (int h = 0; h < p_.heads; ++h) x[h] = by != nullptr ? x[h] * by[h] : 0;
      }
    }
  };
  auto [page, to] = p_.List(task.list);
  for (int u = task.unit_begin; u < task.unit_end && units_at_[u].first >= 0; ++u, factors += p_.heads) {
    const UnitPlan& unit = units_at_[u];
    for (; page < unit.page; ++page) scale(page, nullptr);
    for (; page < unit.page + unit.num_pages; ++page) scale(page, factors);
  }
  for (; page < to; ++page) scale(page, nullptr);
}

// ---- prompt

struct TilePlan {
  int64_t row;
  int32_t rows, g;
};

// The pages of a tile's list that any of its rows may see, then the extra pages.
void TilePages(const Problem& p, const TilePlan& tile, std::vector<PageView>* views) {
  const AttendArgs& a = p.args;
  int begin = attend::kEverything, end = 0;
  for (int64_t row = tile.row; row < tile.row + tile.rows; ++row) {
    begin = std::min(begin, p.Visible(a.visible_begin, row, tile.g));
    end = std::max(end, p.Visible(a.visible_end, row, tile.g));
  }
  const int list = a.row_sequence.as<int32_t>()[tile.row] * p.groups + tile.g;
  const auto [from, to] = p.List(list);
  views->clear();
  for (int page = from, first = 0; page < to && first < end; ++page, first += kPageEntries) {
    const PageRef& ref = a.pages.as<PageRef>()[page];
    if (first + ref.count > begin && ref.count > 0) views->push_back(p.View(ref, first, false));
  }
  for (int i = 0; i < p.ExtraCount(list); ++i) {
    if (p.ExtraPages(list)[i].count > 0) views->push_back(p.View(p.ExtraPages(list)[i], 0, true));
  }
}

void RunTile(const Problem& p, const TilePlan& plan) {
  static thread_local std::vector<PageView> views;
  static thread_local Scratch scratch;
  const AttendArgs& a = p.args;
  TilePages(p, plan, &views);
  const int64_t column = int64_t{plan.g} * p.heads * p.head_dim;
  attend::PromptTile tile;
  tile.group = {a.q.row<float>(plan.row) + column, p.heads, p.head_dim, p.scale_log2e};
  tile.q_stride = a.q.row_stride;
  tile.out = a.out.row<float>(plan.row) + column;
  tile.out_stride = a.out.row_stride;
  tile.rows = plan.rows;
  tile.pages = views.data();
  tile.num_pages = static_cast<int>(views.size());
  tile.visible_begin = a.visible_begin.row<int32_t>(plan.row) + plan.g;
  tile.visible_end = a.visible_end.row<int32_t>(plan.row) + plan.g;
  LOUPE_CHECK_EQ(a.visible_begin.row_stride, a.visible_end.row_stride);
  tile.visible_stride = a.visible_end.row_stride;
  tile.sinks = p.Sinks(plan.g);
  tile.coded = a.coded && std::any_of(views.begin(), views.end(), [](const PageView& view) {
    return IsCoded(static_cast<Codec>(view.key_codec)) || IsCoded(static_cast<Codec>(view.value_codec));
  });
  tile.mean = p.Mean(plan.g);
  tile.scratch = scratch.Get(attend::PromptScratchFloats(plan.rows, p.heads, p.head_dim, tile.coded));
  (p.fast ? p.kernels.prompt_tile_fast : p.kernels.prompt_tile)(tile);
}

void RunPrompt(const Problem& p, ThreadPool& pool) {
  static thread_local std::vector<TilePlan> tiles;
  tiles.clear();
  const int32_t* sequence = p.args.row_sequence.as<int32_t>();
  const int64_t rows = p.args.prompt_rows;
  const int tile_rows = std::clamp(kTileQueries / p.heads, kMinTileRows, kMaxTileRows);
  for (int64_t row = 0; row < rows;) {
    int n = 1;
    while (n < tile_rows && row + n < rows && sequence[row + n] == sequence[row]) ++n;
    for (int g = 0; g < p.groups; ++g) tiles.push_back({row, n, g});
    row += n;
  }
  std::atomic<int64_t> left{static_cast<int64_t>(tiles.size())};
  const TilePlan* plans = tiles.data();
  pool.Run([&](int) {
    for (int64_t i; (i = left.fetch_sub(1, std::memory_order_relaxed) - 1) >= 0;) RunTile(p, plans[i]);
  });
}

}  // namespace

void AttendCpu(const AttendArgs& args, CpuContext context) {
  const Problem problem(args, context);
  if (args.prompt_rows > 0) RunPrompt(problem, context.pool);
  if (args.prompt_rows < args.q.rows()) Decode(problem, context.pool).Run();
}

}  // namespace loupe
