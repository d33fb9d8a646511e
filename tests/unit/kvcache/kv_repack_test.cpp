// Repack as a transaction, and what policies are shown.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "tests/unit/kvcache/kv_harness.h"

namespace loupe {
namespace {

std::vector<int32_t> FirstEntries(int count) {
  std::vector<int32_t> entries(static_cast<size_t>(count));
  std::iota(entries.begin(), entries.end(), 0);
  return entries;
}

// Calls the test at each event.
class ProbePolicy final : public Policy {
 public:
  using Act = std::function<void(std::span<const ListView>, std::vector<ListAction>*)>;
  explicit ProbePolicy(Signals signals) : signals_(signals) {}
  std::string_view name() const override { return "probe"; }
  Signals signals() const override { return signals_; }
  int decode_interval() const override { return 1; }
  void AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const override {
    if (after_prefill) after_prefill(sequence.lists, actions);
    if (after_prefill_view) after_prefill_view(sequence);
  }
  void AfterDecode(const SequenceView& sequence, std::vector<ListAction>* actions) const override {
    if (after_decode) after_decode(sequence.lists, actions);
  }
  Act after_prefill, after_decode;
  std::function<void(const SequenceView&)> after_prefill_view;

 private:
  Signals signals_;
};

TEST(Repack, BadActionsAreRefusedAndChangeNothing) {
  KvHarness harness({});
  const SeqId seq = harness.Open();
  ASSERT_TRUE(harness.Step({{seq, 70, 0, false}}).ok());
  const std::string before = harness.cache().DebugDump();
  const std::vector<std::vector<ListAction>> bad = {
      {{2, 0, {0}}}, {{0, 2, {0}}}, {{-1, 0, {}}}, {{0, 0, {70}}}, {{0, 0, {-1}}}, {{0, 0, {3, 3}}}, {{0, 0, {5, 4}}},
      {{0, 0, {1}}, {0, 0, {2}}}};
  for (size_t i = 0; i < bad.size(); ++i) {
    const absl::Status status = harness.cache().Repack(seq, bad[i], harness.stream());
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << i << ": " << status.ToString();
    EXPECT_EQ(before, harness.cache().DebugDump()) << i;
  }
}

TEST(Repack, KeepingEverythingLeavesEveryByteInPlace) {
  KvHarness harness({});
  const SeqId seq = harness.Open();
  ASSERT_TRUE(harness.Step({{seq, 70, 0, false}}).ok());
  const std::string before = harness.cache().DebugDump();
  const std::vector<ListAction> all{{0, 0, FirstEntries(70)}, {1, 1, FirstEntries(70)}};
  ASSERT_TRUE(harness.cache().Repack(seq, all, harness.stream()).ok());
  EXPECT_EQ(before, harness.cache().DebugDump());
}

TEST(Repack, CopiedEntriesAreByteIdentical) {
  // Every entry moves by one slot, over the borders of pages and blocks, and comes out the same: the attention of a
  // query over the repacked list equals, bit by bit, that over a sequence which was fed the remaining entries only.
  KvHarness harness({});
  KvCache& cache = harness.cache();
  const int groups = harness.options().groups, dim = harness.options().head_dim, heads = groups * harness.options().heads_per_group;
  const int rows = 131;
  const size_t width = static_cast<size_t>(groups * dim);
  std::vector<float> kv(static_cast<size_t>(rows) * width), q(static_cast<size_t>(heads * dim)), out[2];
  for (float& x : kv) x = static_cast<float>(harness.Uniform(-4000, 4000)) / 1024;
  for (float& x : q) x = static_cast<float>(harness.Uniform(-1000, 1000)) / 512;
  for (int which = 0; which < 2; ++which) {
    const int skip = which;  // the second sequence never gets the first row
    const SeqId seq = cache.Open().value();
    KvBatch batch;
    const auto append = [&](float* values, int count, bool decode) {
      const std::vector<KvStepItem> items{{seq, decode ? 0 : count, decode ? count : 0, false}};
      ASSERT_TRUE(cache.Reserve(items, &batch).ok());
      const Tensor t = MakeTensor(values, DType::kF32, count, groups, dim);
      for (int layer = 0; layer < 2; ++layer) cache.Append(batch, layer, t, t, harness.stream());
    };
    append(kv.data() + static_cast<size_t>(skip) * width, rows - 1 - skip, false);
    cache.Commit(batch, harness.stream());
    if (which == 0) {
      std::vector<int32_t> keep = FirstEntries(rows - 1);
      keep.erase(keep.begin());
      std::vector<ListAction> actions;
      for (int list = 0; list < 2 * groups; ++list) actions.push_back({list / groups, list % groups, keep});
      ASSERT_TRUE(cache.Repack(seq, actions, harness.stream()).ok());
    }
    append(kv.data() + static_cast<size_t>(rows - 1) * width, 1, true);
    out[which].resize(q.size());
    cache.Attend(batch, 1, MakeTensor(q.data(), DType::kF32, 1, heads, dim), MakeTensor(out[which].data(), DType::kF32, 1, heads, dim),
                 harness.stream());
    cache.Commit(batch, harness.stream());
  }
  EXPECT_EQ(out[0], out[1]);
  cache.Audit();
}

TEST(Repack, WithoutRoomNothingChanges) {
  HarnessOptions options;
  options.head_dim = 128;  // 64 KiB a page, 32 a slab
  options.arena_bytes = kSlabBytes;
  KvHarness harness(options);
  const SeqId seq = harness.Open();
  ASSERT_TRUE(harness.Step({{seq, 500, 0, false}}).ok());  // 4 lists of 8 pages: the whole arena
  const SeqId fork = harness.Fork(seq).value();            // so that no page may be compacted where it is
  const std::string before = harness.cache().DebugDump();
  std::vector<int32_t> keep = FirstEntries(300);
  keep.erase(keep.begin());
  const absl::Status status = harness.cache().Repack(seq, std::vector<ListAction>{{0, 0, keep}}, harness.stream());
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status.ToString();
  EXPECT_TRUE(before == harness.cache().DebugDump());
  // Whole leading pages stay where they are, so cutting a list off at a page's end needs no page at all.
  ASSERT_TRUE(harness.cache().Repack(seq, std::vector<ListAction>{{0, 0, FirstEntries(256)}, {1, 0, {}}}, harness.stream()).ok());
  EXPECT_EQ(harness.cache().ListPages(seq, 0, 0).size(), 4u);
  EXPECT_TRUE(harness.cache().ListPages(seq, 1, 0).empty());
  EXPECT_EQ(harness.cache().Report(seq).entries_dropped, 244 + 500);
  harness.cache().Audit();
  // Without the fork a list shrinks inside its own pages.
  harness.Close(fork);
  std::vector<int32_t> odd;
  for (int32_t e = 1; e < 500; e += 2) odd.push_back(e);
  ASSERT_TRUE(harness.cache().Repack(seq, std::vector<ListAction>{{0, 1, odd}}, harness.stream()).ok());
  EXPECT_EQ(harness.cache().ListPages(seq, 0, 1).size(), 4u);
  EXPECT_EQ(harness.cache().ListPositions(seq, 0, 1), odd);
  harness.cache().Audit();
}

TEST(Repack, AForkKeepsItsContent) {
  KvHarness harness({});
  const SeqId parent = harness.Open();
  ASSERT_TRUE(harness.Step({{parent, 200, 0, false}}).ok());
  const SeqId child = harness.Fork(parent).value();
  std::vector<int32_t> keep = FirstEntries(200);
  keep.erase(keep.begin() + 100);
  ASSERT_TRUE(harness.cache().Repack(parent, std::vector<ListAction>{{0, 0, keep}}, harness.stream()).ok());
  harness.cache().Audit();
  EXPECT_EQ(harness.cache().ListPages(parent, 0, 0)[0].unit, harness.cache().ListPages(child, 0, 0)[0].unit);
  ASSERT_TRUE(harness.Step({{child, 0, 1, false}}).ok());  // equals the oracle over all its entries
}

TEST(PolicyCalls, ARepackWithoutRoomIsAskedAgain) {
  HarnessOptions options;
  options.head_dim = 128;
  options.arena_bytes = kSlabBytes;
  KvHarness harness(options);
  KvCache& cache = harness.cache();
  int prefill_calls = 0, decode_calls = 0;
  ProbePolicy policy({});
  policy.after_prefill = [&](std::span<const ListView> lists, std::vector<ListAction>* actions) {
    ++prefill_calls;
    for (const ListView& list : lists) {
      std::vector<int32_t> keep = FirstEntries(static_cast<int>(list.positions.size()));
      keep.erase(keep.begin());
      actions->push_back({list.layer, list.kv_head, keep});
    }
  };
  policy.after_decode = [&](std::span<const ListView>, std::vector<ListAction>*) { ++decode_calls; };
  const SeqId seq = cache.Open(policy).value();
  const SeqId other = cache.Open().value();
  std::vector<float> zero(static_cast<size_t>(300 * options.groups * options.head_dim), 0.f);
  KvBatch batch;
  const auto step = [&](KvStepItem item) {
    const int rows = item.num_prompt_rows + item.num_decode_rows;
    ASSERT_TRUE(cache.Reserve(std::span(&item, 1), &batch).ok());
    const Tensor t = MakeTensor(zero.data(), DType::kF32, rows, options.groups, options.head_dim);
    for (int layer = 0; layer < options.layers; ++layer) cache.Append(batch, layer, t, t, harness.stream());
    cache.Commit(batch, harness.stream());
    cache.Audit();
  };
  step({other, 250, 0, false});  // 16 pages
  step({seq, 170, 0, false});    // 12 pages
  const SeqId fork = cache.Fork(seq).value();
  step({seq, 10, 0, true});  // 4 pages are no longer shared; the repack would need 8 for the others
  EXPECT_EQ(prefill_calls, 1);
  EXPECT_EQ(cache.ListPositions(seq, 0, 0).size(), 180u);
  EXPECT_EQ(cache.Report(seq).prompt_tokens, 0) << "prefill has not ended as far as the budget goes";
  cache.Close(other);
  step({seq, 0, 1, false});
  cache.Close(fork);
  EXPECT_EQ(prefill_calls, 2);
  EXPECT_EQ(decode_calls, 0);
  EXPECT_EQ(cache.ListPositions(seq, 0, 0).size(), 180u);
  EXPECT_EQ(cache.ListPositions(seq, 0, 0).front(), 1);
  EXPECT_EQ(cache.Report(seq).prompt_tokens, 180);
  EXPECT_EQ(cache.Report(seq).entries_dropped, 4);
  step({seq, 0, 1, false});
  EXPECT_EQ(prefill_calls, 2);
  EXPECT_EQ(decode_calls, 1);
}

// One sequence that is driven by hand with random keys and queries, which the test keeps.
struct Driven {
  explicit Driven(KvHarness* h, const Policy& policy) : harness(h), seq(h->cache().Open(policy).value()) {}

  // With a neighbour, its prompt row comes first in the batch and is not kept.
  void Step(int prompt, int decode, bool ends_prefill, SeqId neighbour = {}) {
    const HarnessOptions& o = harness->options();
    const int foreign = neighbour.value < 0 ? 0 : 1;
    const int rows = foreign + prompt + decode, heads = o.groups * o.heads_per_group;
    KvBatch batch;
    std::vector<KvStepItem> items{{seq, prompt, decode, ends_prefill}};
    if (foreign) items.insert(items.begin(), {neighbour, 1, 0, false});
    ASSERT_TRUE(harness->cache().Reserve(items, &batch).ok());
    keys.resize(static_cast<size_t>(o.layers));
    queries.resize(static_cast<size_t>(o.layers));
    for (int layer = 0; layer < o.layers; ++layer) {
      std::vector<float> k(static_cast<size_t>(rows * o.groups * o.head_dim)), q(static_cast<size_t>(rows * heads * o.head_dim)), out(q.size());
      for (float& x : k) x = static_cast<float>(harness->Uniform(-8, 8)) / 8;
      for (float& x : q) x = static_cast<float>(harness->Uniform(-8, 8)) / 8;
      const Tensor kt = MakeTensor(k.data(), DType::kF32, rows, o.groups, o.head_dim);
      harness->cache().Append(batch, layer, kt, kt, harness->stream());
      harness->cache().Attend(batch, layer, MakeTensor(q.data(), DType::kF32, rows, heads, o.head_dim),
                              MakeTensor(out.data(), DType::kF32, rows, heads, o.head_dim), harness->stream());
      auto& all_k = keys[static_cast<size_t>(layer)];
      auto& all_q = queries[static_cast<size_t>(layer)];
      all_k.insert(all_k.end(), k.begin() + foreign * o.groups * o.head_dim, k.end());
      all_q.insert(all_q.end(), q.begin() + foreign * heads * o.head_dim, q.end());
    }
    harness->cache().Commit(batch, harness->stream());
  }

  // Probability of each entry for one head in the last row.
  std::vector<double> LastRow(int layer, int head) const {
    const HarnessOptions& o = harness->options();
    const auto& k = keys[static_cast<size_t>(layer)];
    const auto& q = queries[static_cast<size_t>(layer)];
    const size_t dim = static_cast<size_t>(o.head_dim), width = static_cast<size_t>(o.groups) * dim;
    const size_t q_width = width * static_cast<size_t>(o.heads_per_group), entries = k.size() / width;
    std::vector<double> p(entries);
    double sum = 0;
    for (size_t e = 0; e < entries; ++e) {
      double dot = 0;
      for (size_t d = 0; d < dim; ++d) {
        dot += double{q[q.size() - q_width + static_cast<size_t>(head) * dim + d]} *
               double{k[e * width + static_cast<size_t>(head / o.heads_per_group) * dim + d]};
      }
      p[e] = std::exp(dot / std::sqrt(static_cast<double>(dim)));
      sum += p[e];
    }
    for (double& x : p) x /= sum;
    return p;
  }

  KvHarness* harness;
  SeqId seq;
  std::vector<std::vector<float>> keys, queries;  // [layer][rows * width]
};

TEST(PolicySignals, QueryWindowAddsUpOverChunks) {
  constexpr int kWindow = 12;
  for (const std::vector<int>& chunks : {std::vector<int>{40}, {7}, {5, 3, 30}, {30, 1, 1, 1}, {12}, {11, 2}, {1, 1, 1}}) {
    HarnessOptions options;
    options.groups = 2;
    options.heads_per_group = 3;
    KvHarness harness(options);
    ProbePolicy policy({.window_query_rows = kWindow});
    Driven driven(&harness, policy);
    const int total = std::accumulate(chunks.begin(), chunks.end(), 0), rows = std::min(total, kWindow);
    const size_t dim = static_cast<size_t>(options.head_dim), group = 3 * dim, width = 2 * group;
    int calls = 0;
    policy.after_prefill = [&](std::span<const ListView> lists, std::vector<ListAction>*) {
      ++calls;
      ASSERT_EQ(lists.size(), 4u);
      for (const ListView& list : lists) {
        ASSERT_EQ(list.window_queries.size(), static_cast<size_t>(rows) * group) << total;
        EXPECT_TRUE(list.page_mass.empty() && list.entry_probability.empty());
        const auto& q = driven.queries[static_cast<size_t>(list.layer)];
        for (int r = 0; r < rows; ++r) {
          const auto from = q.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(total - rows + r) * width +
                                                                    static_cast<size_t>(list.kv_head) * group);
          EXPECT_TRUE(std::equal(from, from + static_cast<std::ptrdiff_t>(group),
                                 list.window_queries.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(r) * group)))
              << "layer " << list.layer << " kv head " << list.kv_head << " row " << r << " of " << total;
        }
      }
    };
    for (size_t i = 0; i < chunks.size(); ++i) driven.Step(chunks[i], 0, i + 1 == chunks.size());
    EXPECT_EQ(calls, 1);
  }
}

TEST(PolicySignals, MassesOfTheLastDecodeRow) {
  HarnessOptions options;
  options.heads_per_group = 2;
  KvHarness harness(options);
  ProbePolicy policy({.page_mass = true, .entry_probability = true});
  Driven driven(&harness, policy);
  // A neighbour that asks for nothing comes first, so that page numbers in the batch are not those of the list.
  const SeqId neighbour = harness.cache().Open().value();
  int calls = 0;
  policy.after_decode = [&](std::span<const ListView> lists, std::vector<ListAction>*) {
    ++calls;
    for (const ListView& list : lists) {
      const size_t entries = list.positions.size(), pages = (entries + kPageEntries - 1) / kPageEntries;
      ASSERT_EQ(list.page_mass.size(), pages * 2);
      ASSERT_EQ(list.entry_probability.size(), entries * 2);
      EXPECT_TRUE(list.window_queries.empty());
      for (size_t h = 0; h < 2; ++h) {
        const std::vector<double> p = driven.LastRow(list.layer, list.kv_head * 2 + static_cast<int>(h));
        std::vector<double> mass(pages, 0.0);
        for (size_t e = 0; e < entries; ++e) {
          EXPECT_NEAR(list.entry_probability[e * 2 + h], p[e], 1e-5) << "entry " << e;
          mass[e / kPageEntries] += p[e];
        }
        for (size_t page = 0; page < pages; ++page) EXPECT_NEAR(list.page_mass[page * 2 + h], mass[page], 1e-5) << "page " << page;
      }
    }
  };
  driven.Step(63, 0, true);
  for (int i = 0; i < 3; ++i) driven.Step(0, 1, false, neighbour);
  driven.Step(70, 0, false);
  driven.Step(0, 1, false);
  EXPECT_EQ(calls, 4);
  KvBatch batch;
  const std::vector<KvStepItem> two{{driven.seq, 0, 2, false}};
  EXPECT_TRUE(absl::IsInvalidArgument(harness.cache().Reserve(two, &batch)));
}

TEST(PolicySignals, NormsAndSurprisalAddUpOverChunks) {
  HarnessOptions options;
  KvHarness harness(options);
  ProbePolicy policy({.columns = {.stride = 4}, .key_norms = true, .output_norms = true, .surprisal = true});
  Driven driven(&harness, policy);
  EXPECT_TRUE(harness.cache().WantsSurprisal(driven.seq));
  int calls = 0;
  policy.after_prefill_view = [&](const SequenceView& view) {
    ++calls;
    EXPECT_EQ(view.num_tokens, 21);
    EXPECT_EQ(view.num_prompt, 21);
    EXPECT_EQ(std::vector<float>(view.surprisal.begin(), view.surprisal.end()), (std::vector<float>{0, 1, 2, 3}));
    ASSERT_EQ(view.output_norms.size(), 2u * 21 * 4);
    for (const float norm : view.output_norms) EXPECT_GT(norm, 0);
    for (const ListView& list : view.lists) {
      ASSERT_EQ(list.key_norms.size(), 21u);
      ASSERT_EQ(list.column_sums.size(), 2u);
      EXPECT_TRUE(list.window_mass.empty() && list.key_alignment.empty());
      for (const std::span<const float> sums : list.column_sums) {
        double total = 0;
        for (const float x : sums) total += static_cast<double>(x);
        EXPECT_NEAR(total, 5, 1e-4) << "rows 3, 7, 11, 15 and 19, each with probability 1";
        EXPECT_EQ(sums[20], 0.f) << "no sampled row sees the last entry";
      }
      const size_t width = 2 * 16;
      for (size_t e = 0; e < 21; ++e) {
        double square = 0;
        for (size_t d = 0; d < 16; ++d) {
          const double x = double{driven.keys[static_cast<size_t>(list.layer)][e * width + static_cast<size_t>(list.kv_head) * 16 + d]};
          square += x * x;
        }
        EXPECT_NEAR(static_cast<double>(list.key_norms[e]), std::sqrt(square), 1e-5);
      }
    }
  };
  const std::vector<float> surprisal{0, 1, 2, 3};
  harness.cache().AddSurprisal(driven.seq, std::span(surprisal).first(1));
  harness.cache().AddSurprisal(driven.seq, std::span(surprisal).subspan(1));
  driven.Step(5, 0, false);
  driven.Step(2, 0, false);
  driven.Step(14, 0, true);
  EXPECT_EQ(calls, 1);
}

TEST(PolicySignals, TheEndOfAPromptIsSummedRowByRow) {
  for (const std::vector<int>& chunks : {std::vector<int>{21}, {5, 2, 14}, {18, 3}, {17, 2, 1, 1}, {20, 1}}) {
    KvHarness harness(HarnessOptions{});
    ProbePolicy policy({.columns = {.stride = 4, .dense_from = 18}});
    Driven driven(&harness, policy);
    int calls = 0;
    policy.after_prefill_view = [&](const SequenceView& view) {
      ++calls;
      for (const ListView& list : view.lists) {
        for (const std::span<const float> sums : list.column_sums) {
          double total = 0;
          for (const float x : sums) total += static_cast<double>(x);
          EXPECT_NEAR(total, 7, 1e-4) << "rows 3, 7, 11, 15, 18, 19 and 20, each with probability 1";
          EXPECT_GT(sums[20], 0.f);
        }
      }
    };
    for (size_t i = 0; i < chunks.size(); ++i) driven.Step(chunks[i], 0, i + 1 == chunks.size());
    EXPECT_EQ(calls, 1);
  }
}

TEST(PolicySignals, SampledRowsAreCounted) {
  for (const int stride : {1, 3, 32}) {
    for (const int dense_from : {0, 1, 31, 32, 64, std::numeric_limits<int>::max()}) {
      const SampledRows rows{stride, dense_from};
      for (int end = 0, count = 0; end < 100; ++end) {
        EXPECT_EQ(rows.Below(end), count) << stride << " " << dense_from << " " << end;
        count += (end + 1) % stride == 0 || end >= dense_from;
      }
    }
  }
}

TEST(PolicySignals, TheFullPolicyIsNeverAsked) {
  EXPECT_TRUE(FullPolicy().keeps_everything());
  EXPECT_EQ(FullPolicy().name(), "full");
  std::vector<ListAction> actions;
  FullPolicy().AfterPrefill(SequenceView{}, &actions);
  FullPolicy().AfterDecode(SequenceView{}, &actions);
  EXPECT_TRUE(actions.empty());
}

}  // namespace
}  // namespace loupe
