// What policies are shown of queries, keys and attention. Read in Attend or computed when a policy is called, for sequences
// whose policy asks. Sums over prompt rows are kept beside the lists and follow their entries through repacks.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/check.h"
#include "kernels/half.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {

// What `sequence` has collected becomes what `wanted` would have collected: a shorter window, or nothing.
void KvCache::Impl::NarrowSignals(Sequence* sequence, const Signals& wanted) const {
  const Signals& has = sequence->signals;
  LOUPE_CHECK(wanted.window_query_rows <= has.window_query_rows)
      << wanted.window_query_rows << " of " << has.window_query_rows << " window rows";
  LOUPE_CHECK(wanted.columns.stride == 0 || wanted.columns == has.columns)
      << "every " << wanted.columns.stride << ". row and from " << wanted.columns.dense_from << ", not every " << has.columns.stride
      << ". and from " << has.columns.dense_from;
  LOUPE_CHECK(has.output_norms || !wanted.output_norms) << "output norms were not collected";
  LOUPE_CHECK(has.surprisal || !wanted.surprisal) << "surprisal was not collected";
  LOUPE_CHECK(has.entries || !wanted.entries) << "keys and values were not collected";
  if (wanted.columns.stride == 0) sequence->columns.clear(), sequence->next_columns.clear();
  if (!wanted.output_norms) sequence->output_norms.clear();
  if (!wanted.surprisal) sequence->surprisal.clear();
  if (!wanted.entries) sequence->keys.clear(), sequence->values.clear();
  // The row of position p lies at p % rows, so a shorter ring is another order.
  const QueryWindow old = std::move(sequence->window);
  QueryWindow& window = sequence->window;
  const size_t row = static_cast<size_t>(shape.num_heads) * static_cast<size_t>(shape.head_dim);
  window.rows = wanted.window_query_rows;
  window.values.assign(static_cast<size_t>(shape.num_layers) * static_cast<size_t>(window.rows) * row, 0.f);
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int position = std::max(0, sequence->num_prompt - window.rows); position < sequence->num_prompt; ++position) {
      const auto at = [&](int rows) {
        return (static_cast<size_t>(layer) * static_cast<size_t>(rows) + static_cast<size_t>(position % rows)) * row;
      };
      std::memcpy(window.values.data() + at(window.rows), old.values.data() + at(old.rows), row * sizeof(float));
    }
  }
  sequence->signals = wanted;
}

// Rows [first, first + rows) of a tensor of the device as f32 on the host, without a stride. Only policies that ask pay
// for the wait; a device that has failed says so at the end of the step.
const float* KvCache::Impl::RowsOnHost(const Tensor& t, int first, int rows, Stream& stream) {
  const auto row_values = static_cast<size_t>(t.row_elements());
  const int64_t element_bytes = DTypeBytes(t.dtype), bytes = ((rows - 1) * t.row_stride + t.row_elements()) * element_bytes;
  host_rows.resize(static_cast<size_t>(rows) * row_values);
  if (rows <= 0) return host_rows.data();
  raw_rows.resize(static_cast<size_t>(bytes));
  backend.Copy(raw_rows.data(), t.as<char>() + first * t.row_stride * element_bytes, bytes, stream);
  stream.Synchronize().IgnoreError();
  for (int r = 0; r < rows; ++r) {
    const char* from = raw_rows.data() + r * t.row_stride * element_bytes;
    float* to = host_rows.data() + static_cast<size_t>(r) * row_values;
    if (t.dtype == DType::kF32) {
      std::memcpy(to, from, row_values * sizeof(float));
      continue;
    }
    LOUPE_CHECK(t.dtype == DType::kF16) << "rows are neither f32 nor fp16";
    for (size_t i = 0; i < row_values; ++i) {
      uint16_t bits;
      std::memcpy(&bits, from + 2 * i, sizeof bits);
      to[i] = HalfToFloat(bits);
    }
  }
  return host_rows.data();
}

// One item's rows of a step in one layer.
void KvCache::Impl::ReadRows(const KvBatch::State& state, int item_index, int layer, const AttendArgs& args, Stream& stream) {
  const StepItem& item = state.items[static_cast<size_t>(item_index)];
  Sequence& sequence = *item.sequence;
  const Signals& signals = sequence.signals;
  if (signals.window_query_rows > 0) {
    CaptureQueries(sequence, layer, args.q, item.prompt_begin, sequence.num_tokens, item.num_prompt, stream);
    if (signals.window_goes_on) {
      CaptureQueries(sequence, layer, args.q, item.decode_begin, sequence.num_tokens + item.num_prompt, item.num_decode, stream);
    }
  }
  if (item.num_prompt == 0) return;
  if (signals.columns.stride > 0) SumColumns(state, item_index, layer, args, stream);
  if (!signals.output_norms) return;
  std::vector<float>& norms = sequence.output_norms[static_cast<size_t>(layer)];
  norms.resize(static_cast<size_t>(sequence.num_prompt * shape.num_heads));  // forgets a step that was abandoned
  const float* out = RowsOnHost(args.out, item.prompt_begin, item.num_prompt, stream);
  for (int r = 0; r < item.num_prompt; ++r) {
    for (int h = 0; h < shape.num_heads; ++h, out += shape.head_dim) {
      float square = 0;
      for (int d = 0; d < shape.head_dim; ++d) square += out[d] * out[d];
      norms.push_back(std::sqrt(square));
    }
  }
}

void KvCache::Impl::CaptureQueries(Sequence& sequence, int layer, const Tensor& q, int first_row, int first_position, int rows,
                                   Stream& stream) {
  QueryWindow& window = sequence.window;
  const size_t row_values = static_cast<size_t>(shape.num_heads) * static_cast<size_t>(shape.head_dim);
  const int skipped = std::max(0, rows - window.rows);
  const float* from = RowsOnHost(q, first_row + skipped, rows - skipped, stream);
  for (int r = skipped; r < rows; ++r, from += row_values) {
    const int slot = (first_position + r) % window.rows;
    const size_t to = (static_cast<size_t>(layer) * static_cast<size_t>(window.rows) + static_cast<size_t>(slot)) * row_values;
    std::memcpy(window.values.data() + to, from, row_values * sizeof(float));
  }
}

// An item's prompt rows as they are appended.
void KvCache::Impl::CaptureEntries(const KvBatch::State& state, int item_index, int layer, const Tensor& k, const Tensor& v,
                                   Stream& stream) {
  const StepItem& item = state.items[static_cast<size_t>(item_index)];
  Sequence& sequence = *item.sequence;
  if (!sequence.signals.entries) return;
  const size_t row_values = static_cast<size_t>(shape.num_kv_heads) * static_cast<size_t>(shape.head_dim);
  for (const auto& [rows, all] : {std::pair{&k, &sequence.keys}, {&v, &sequence.values}}) {
    std::vector<float>& to = (*all)[static_cast<size_t>(layer)];
    to.resize(static_cast<size_t>(sequence.num_prompt) * row_values);  // forgets a step that was abandoned
    const float* from = RowsOnHost(*rows, item.prompt_begin, item.num_prompt, stream);
    to.insert(to.end(), from, from + static_cast<size_t>(item.num_prompt) * row_values);
  }
}

// Adds the sampled rows of a prompt chunk. Written beside the sums that are valid, which Commit replaces.
void KvCache::Impl::SumColumns(const KvBatch::State& state, int item_index, int layer, const AttendArgs& attend, Stream& stream) {
  const StepItem& item = state.items[static_cast<size_t>(item_index)];
  Sequence& sequence = *item.sequence;
  const int groups = shape.num_kv_heads, group_heads = heads_per_group();
  sequence.next_columns.resize(sequence.columns.size());
  SumAttentionArgs args;
  args.pages = attend.pages;
  args.list_begin = MakeTensor(attend.list_begin.as<int32_t>() + item_index * groups, DType::kI32, groups + 1);
  const int32_t* list_begin =
      state.list_begin + layer * (static_cast<int64_t>(state.items.size()) * groups + 1) + item_index * groups;  // on the host
  args.arena = attend.arena;
  args.scale = attend.scale;
  args.sinks = attend.sinks;
  args.mean_keys = attend.mean_keys;
  const PageRef* table = state.page_buffer.host<PageRef>();
  std::vector<float*> columns;
  for (int h = 0; h < shape.num_heads; ++h) {
    const int g = h / group_heads;
    const size_t at = static_cast<size_t>(layer * shape.num_heads + h);
    std::vector<float>& next = sequence.next_columns[at];
    next = SpreadOverPages(sequence.columns[at], {table + list_begin[g], table + list_begin[g + 1]});
    columns.push_back(next.data());
  }
  args.columns = columns.data();
  const auto sum_rows = [&](int first, int rows, int stride) {  // rows of the chunk
    if (rows <= 0) return;
    const auto sampled = [&](Tensor t) {
      t.data = t.as<char>() + (item.prompt_begin + first) * t.row_stride * DTypeBytes(t.dtype);
      t.shape[0] = rows;
      t.row_stride *= stride;
      return t;
    };
    args.q = sampled(attend.q);
    args.visible_begin = sampled(attend.visible_begin);
    args.visible_end = sampled(attend.visible_end);
    backend.SumAttention(args, stream);
  };
  const SampledRows& wanted = sequence.signals.columns;
  const int dense = std::clamp(wanted.dense_from - sequence.num_tokens, 0, item.num_prompt);  // the first row of the dense end
  const int first = wanted.stride - 1 - sequence.num_tokens % wanted.stride;                  // and of the sampled ones
  sum_rows(first, (dense - first + wanted.stride - 1) / wanted.stride, wanted.stride);
  sum_rows(dense, item.num_prompt - dense, 1);
}

// The step's rows are in the lists now.
void KvCache::Impl::CommitSignals(Sequence& sequence, const StepItem& item) {
  if (sequence.columns.empty()) return;
  if (item.num_prompt > 0) {
    LOUPE_CHECK_EQ(sequence.next_columns.size(), sequence.columns.size()) << "a prompt step without attention";
    for (size_t i = 0; i < sequence.columns.size(); ++i) {
      GatherFromPages(sequence.next_columns[i].data(), sequence.lists[i / static_cast<size_t>(heads_per_group())].pages, 1,
                      &sequence.columns[i]);
    }
  }
  for (size_t i = 0; i < sequence.columns.size(); ++i) {
    sequence.columns[i].resize(static_cast<size_t>(sequence.lists[i / static_cast<size_t>(heads_per_group())].entries()), 0.f);
  }
}

// A generated token's row joins the column sums.
void KvCache::Impl::AddProbabilities(const KvBatch::State& state, int item_index) {
  const StepItem& item = state.items[static_cast<size_t>(item_index)];
  Sequence& sequence = *item.sequence;
  if (!sequence.signals.columns_go_on || !sequence.signals.entry_probability || item.num_decode != 1) return;
  const size_t heads = static_cast<size_t>(heads_per_group());
  for (size_t i = 0; i < sequence.lists.size(); ++i) {
    ListView view;
    ViewMasses(state, item_index, i, &view);
    for (size_t r = 0; r < heads; ++r) {
      std::vector<float>& sums = sequence.columns[i * heads + r];
      for (size_t e = 0; e < sums.size(); ++e) sums[e] += view.entry_probability[e * heads + r];
    }
  }
}

// What the entries of a layer get from the last `rows` rows.
void KvCache::Impl::SumWindow(const Sequence& sequence, int layer, int rows, std::vector<std::vector<float>>* all_mass, Stream& stream) {
  all_mass->resize(sequence.lists.size() * static_cast<size_t>(heads_per_group()));
  const int groups = shape.num_kv_heads, group_heads = heads_per_group();
  const QueryWindow& window = sequence.window;
  const int end = sequence.signals.window_goes_on ? sequence.num_tokens : sequence.num_prompt;
  const size_t row_values = static_cast<size_t>(shape.num_heads) * static_cast<size_t>(shape.head_dim);
  gathered_queries.resize(static_cast<size_t>(rows) * row_values);
  std::vector<PageRef> pages;
  std::vector<int32_t> list_begin{0}, visible_begin, visible_end;
  std::vector<float*> columns;
  for (int g = 0; g < groups; ++g) {
    const size_t list_index = static_cast<size_t>(layer * groups + g);
    const KvList& list = sequence.lists[list_index];
    pages.insert(pages.end(), list.pages.begin(), list.pages.end());
    list_begin.push_back(static_cast<int32_t>(pages.size()));
    for (int r = 0; r < group_heads; ++r) {
      std::vector<float>& mass = (*all_mass)[list_index * static_cast<size_t>(group_heads) + static_cast<size_t>(r)];
      mass.assign(list.pages.size() * kPageEntries, 0.f);
      columns.push_back(mass.data());
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int position = end - rows + r;
    const size_t slot = static_cast<size_t>(layer) * static_cast<size_t>(window.rows) + static_cast<size_t>(position % window.rows);
    std::memcpy(gathered_queries.data() + static_cast<size_t>(r) * row_values, window.values.data() + slot * row_values,
                row_values * sizeof(float));
    for (int g = 0; g < groups; ++g) {
      const KvList& list = sequence.lists[static_cast<size_t>(layer * groups + g)];
      const int layer_window = this->window(layer);
      visible_begin.push_back(layer_window > 0 ? list.positions.LowerBound(position - layer_window + 1) : 0);
      visible_end.push_back(list.NumberBehind(list.positions.VisibleTo(position)));
    }
  }
  SumAttentionArgs args;
  args.q = MakeTensor(gathered_queries.data(), DType::kF32, rows, shape.num_heads, shape.head_dim);
  args.pages = MakeTensor(pages.data(), DType::kBytes, static_cast<int64_t>(pages.size()));
  args.list_begin = MakeTensor(list_begin.data(), DType::kI32, groups + 1);
  args.visible_begin = MakeTensor(visible_begin.data(), DType::kI32, rows, groups);
  args.visible_end = MakeTensor(visible_end.data(), DType::kI32, rows, groups);
  args.arena = arena->data();
  args.scale = shape.scale;
  if (sinks) args.sinks = MakeTensor(static_cast<float*>(sinks->data()) + int64_t{layer} * shape.num_heads, DType::kF32, shape.num_heads);
  args.mean_keys = MeanKeys(layer);
  args.columns = columns.data();
  if (rows > 0) backend.SumAttention(args, stream);
  std::vector<float> by_entry;
  for (int g = 0; g < groups; ++g) {
    const size_t list_index = static_cast<size_t>(layer * groups + g);
    const KvList& list = sequence.lists[list_index];
    for (int r = 0; !list.regular() && r < group_heads; ++r) {
      std::vector<float>& mass = (*all_mass)[list_index * static_cast<size_t>(group_heads) + static_cast<size_t>(r)];
      GatherFromPages(mass.data(), list.pages, 1, &by_entry);
      mass.swap(by_entry);
    }
  }
}

void KvCache::Impl::SummariseKeys(const Sequence& sequence, Stream& stream) {
  key_norms.resize(sequence.lists.size());
  key_alignment.resize(sequence.lists.size());
  for (size_t i = 0; i < sequence.lists.size(); ++i) {
    const KvList& list = sequence.lists[i];
    key_norms[i].resize(static_cast<size_t>(list.entries()));
    SummariseKeysArgs args;
    args.pages = list.pages.data();
    args.num_pages = static_cast<int>(list.pages.size());
    args.head_dim = shape.head_dim;
    args.arena = arena->data();
    const Tensor mean = MeanKeys(static_cast<int>(i) / shape.num_kv_heads);
    const int64_t kv_head = static_cast<int64_t>(i) % shape.num_kv_heads;
    if (mean.defined()) args.mean_key = mean.as<float>() + kv_head * shape.head_dim;
    args.norms = key_norms[i].data();
    if (sequence.signals.key_alignment) {
      key_alignment[i].resize(static_cast<size_t>(list.entries()));
      args.alignment = key_alignment[i].data();
    }
    backend.SummariseKeys(args, stream);
  }
}

}  // namespace loupe
