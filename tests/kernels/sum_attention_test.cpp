// Column sums of attention against the double-precision oracle, and their promise: rows add up to the same bits however
// they are cut into calls and over threads. And what keys look like, and means of entries.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "tests/kernels/attend_reference.h"

namespace loupe {
namespace {

using Columns = std::vector<std::vector<float>>;  // [H]

Columns Sum(AttendCase& c, const Columns& before, size_t first, size_t count, int threads, int stride = 1, bool exact = false) {
  Columns columns = before;
  std::vector<float*> pointers;
  for (size_t h = 0; h < columns.size(); ++h) {
    columns[h].resize(c.lists[h / static_cast<size_t>(c.heads)].pages.size() * kPageEntries, 0.f);
    pointers.push_back(columns[h].data());
  }
  std::vector<float> q;
  std::vector<int32_t> begin, end, list_begin{0};
  std::vector<PageRef> pages;
  for (size_t r = first; r < first + count; ++r) {
    q.insert(q.end(), c.rows[r].q.begin(), c.rows[r].q.end());
    begin.insert(begin.end(), c.rows[r].begin.begin(), c.rows[r].begin.end());
    end.insert(end.end(), c.rows[r].end.begin(), c.rows[r].end.end());
  }
  for (const TestList& list : c.lists) {
    pages.insert(pages.end(), list.pages.begin(), list.pages.end());
    list_begin.push_back(static_cast<int32_t>(pages.size()));
  }
  const auto rows = static_cast<int64_t>((count + static_cast<size_t>(stride) - 1) / static_cast<size_t>(stride));
  SumAttentionArgs args;
  args.q = MakeTensor(q.data(), DType::kF32, rows, c.heads * c.groups, c.dim);
  args.q.row_stride *= stride;
  args.pages = MakeTensor(pages.data(), DType::kBytes, static_cast<int64_t>(pages.size()));
  args.list_begin = MakeTensor(list_begin.data(), DType::kI32, c.groups + 1);
  args.visible_begin = MakeTensor(begin.data(), DType::kI32, rows, c.groups);
  args.visible_end = MakeTensor(end.data(), DType::kI32, rows, c.groups);
  args.visible_begin.row_stride *= stride;
  args.visible_end.row_stride *= stride;
  args.arena = c.arena.data();
  args.scale = c.scale;
  if (!c.sinks.empty()) args.sinks = MakeTensor(c.sinks.data(), DType::kF32, c.heads * c.groups);
  std::vector<float> means;
  for (const std::vector<float>& mean : c.mean_keys) means.insert(means.end(), mean.begin(), mean.end());
  if (!means.empty()) args.mean_keys = MakeTensor(means.data(), DType::kF32, c.groups, c.dim);
  args.columns = pointers.data();
  Backend& backend = BackendOf(c.arena.target(), exact, threads);
  const std::unique_ptr<Stream> stream = backend.NewStream();
  backend.SumAttention(args, *stream);
  EXPECT_TRUE(stream->Synchronize().ok());
  return columns;
}

void Fill(AttendCase* c, int entries, int rows, bool log_weights, bool windows, bool mixed_formats) {
  c->mixed_formats = mixed_formats;
  for (int g = 0; g < c->groups; ++g) c->lists.push_back(c->RandomList(entries, false, log_weights));
  for (int r = 0; r < rows; ++r) {
    TestRow& row = c->AddRow(0, true);
    for (size_t g = 0; g < row.end.size(); ++g) {
      row.end[g] = std::max(0, entries - rows + r + 1);
      if (windows) row.begin[g] = std::max(0, row.end[g] - 40);
    }
  }
}

// Pages of other formats than the model's are for the GPU's exact mode; the CPU takes them in both.
std::vector<std::pair<Target, bool>> TargetsAndModes() {
  std::vector<std::pair<Target, bool>> all;
  for (const Target& target : testing::UsableTargets()) {
    for (const bool exact : {false, true}) all.emplace_back(target, exact);
  }
  return all;
}

TEST(SumAttention, EqualsTheOracle) {
  const struct {
    int dim, heads, groups, entries, rows;
    bool log_weights, windows, sinks;
  } cases[] = {{64, 3, 3, 1, 1, false, false, false},    {64, 3, 2, 63, 7, false, false, false},   {16, 1, 1, 64, 64, false, false, false},
               {128, 4, 2, 65, 9, true, false, false},   {64, 8, 1, 300, 33, true, false, true},   {24, 2, 2, 200, 50, false, true, false},
               {64, 5, 1, 130, 131, false, true, true},   {128, 4, 2, 700, 300, false, false, true},
               {128, 2, 1, 2100, 40, true, true, false}};
  for (const auto& k : cases) {
    SCOPED_TRACE(::testing::Message() << k.entries << " entries, " << k.rows << " rows, dim " << k.dim);
    for (const auto& [target, exact] : TargetsAndModes()) {
      AttendCase c(target, k.dim, k.heads, k.groups, 5);
      Fill(&c, k.entries, k.rows, k.log_weights, k.windows, exact);
      for (int h = 0; k.sinks && h < k.heads * k.groups; ++h) c.sinks.push_back(c.Normal());
      const Columns columns = Sum(c, Columns(static_cast<size_t>(k.heads * k.groups)), 0, c.rows.size(), 2, 1, exact);
      for (int h = 0; h < k.heads * k.groups; ++h) {
        std::vector<double> expected(static_cast<size_t>(k.entries), 0.0);
        for (const TestRow& row : c.rows) {
          const std::vector<double> p = c.Probabilities(row, h / k.heads, h % k.heads);
          for (size_t e = 0; e < p.size(); ++e) expected[e] += p[e];
        }
        for (size_t e = 0; e < expected.size(); ++e) {
          ASSERT_NEAR(static_cast<double>(columns[static_cast<size_t>(h)][e]), expected[e], 1e-4 * (expected[e] + 1e-3))
              << target << " exact " << exact << " head " << h << " entry " << e;
        }
      }
    }
  }
}

// Runs of codes end in pages that are not full, with others behind them.
TEST(SumAttention, PagesThatAreNotFullLeaveNoTrace) {
  for (const Target& target : testing::UsableTargets()) {
    if (IsCuda(target)) continue;  // the CPU's scratch may hold anything
    for (uint32_t seed = 1; seed <= 20; ++seed) {
      SCOPED_TRACE(::testing::Message() << target << " seed " << seed);
      AttendCase c(target, 64, 2, 2, seed);
      c.mixed_formats = c.coded = true;
      for (int g = 0; g < 2; ++g) c.mean_keys.push_back(c.Normals(64));
      for (int g = 0; g < 2; ++g) c.lists.push_back(c.RandomList(50 + c.Below(400), true, false, g));
      for (int r = 0; r < 21; ++r) c.AddRow(0, true);
      const Columns columns = Sum(c, Columns(4), 0, c.rows.size(), 2);
      for (int h = 0; h < 4; ++h) {
        const TestList& list = c.lists[static_cast<size_t>(h / 2)];
        std::vector<double> expected(list.entries.size(), 0.0);
        for (const TestRow& row : c.rows) {
          const std::vector<double> p = c.Probabilities(row, h / 2, h % 2);
          for (size_t e = 0; e < p.size(); ++e) expected[e] += p[e];
        }
        for (size_t e = 0; e < expected.size(); ++e) {
          const float got = columns[static_cast<size_t>(h)][static_cast<size_t>(list.numbers[e])];
          ASSERT_NEAR(static_cast<double>(got), expected[e], 1e-3 * (expected[e] + 1e-2)) << "head " << h << " entry " << e;
        }
      }
    }
  }
}

TEST(SumAttention, BitsDoNotDependOnCallsOrThreads) {
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, 64, 3, 3, 9);
    Fill(&c, 400, 100, false, false, false);
    const Columns none(9);
    const Columns whole = Sum(c, none, 0, 100, 1);
    EXPECT_EQ(whole, Sum(c, none, 0, 100, 2));
    for (const size_t cut : {1u, 7u, 8u, 9u, 50u, 99u}) {
      EXPECT_EQ(whole, Sum(c, Sum(c, none, 0, cut, 2), cut, 100 - cut, 1)) << target << " cut at " << cut;
    }
    Columns sampled = none;
    for (size_t r = 0; r < 100; r += 16) sampled = Sum(c, sampled, r, 1, 1);
    EXPECT_EQ(sampled, Sum(c, none, 0, 100, 1, 16)) << "rows taken by stride";
  }
}

// One call, waited for.
void Summarise(AttendCase& c, const SummariseKeysArgs& args) {
  const std::unique_ptr<Stream> stream = c.arena.backend().NewStream();
  c.arena.backend().SummariseKeys(args, *stream);
  EXPECT_TRUE(stream->Synchronize().ok());
}

void ExpectNormsAndMeanDirection(const Target& target) {
  for (const int entries : {1, 15, 16, 17, 64, 65, 150}) {
    for (const Codec codec : {Codec::kDense, Codec::kF32}) {
      AttendCase c(target, 24, 1, 1, 3);
      TestList list;
      for (int left = entries; left > 0; left -= kPageEntries) c.AddPage(&list, {{codec, codec}, false, false}, std::min(left, kPageEntries));
      std::vector<float> norms(static_cast<size_t>(entries)), alignment(norms.size());
      SummariseKeysArgs args{list.pages.data(), static_cast<int>(list.pages.size()), 24, c.arena.data(), norms.data(), alignment.data()};
      Summarise(c, args);
      std::vector<double> mean(24, 0.0), expected_norm;
      for (const TestEntry& e : list.entries) {
        double square = 0;
        for (const double x : e.stored_k) square += x * x;
        expected_norm.push_back(std::sqrt(square));
        for (size_t d = 0; d < mean.size(); ++d) mean[d] += e.stored_k[d] / std::sqrt(square);
      }
      double length = 0;
      for (const double x : mean) length += x * x;
      for (size_t e = 0; e < norms.size(); ++e) {
        double dot = 0;
        for (size_t d = 0; d < mean.size(); ++d) dot += list.entries[e].stored_k[d] * mean[d];
        EXPECT_NEAR(static_cast<double>(norms[e]), expected_norm[e], 1e-5 * expected_norm[e]) << target;
        EXPECT_NEAR(static_cast<double>(alignment[e]), dot / expected_norm[e] / std::sqrt(length), 1e-5) << target << " " << entries << " entry " << e;
      }
    }
  }
}

TEST(SummariseKeys, NormsAndTheMeanDirection) {
  for (const Target& target : testing::UsableTargets()) ExpectNormsAndMeanDirection(target);
}

void ExpectWeightedMeans(const Target& where) {
  for (const Codec codec : {Codec::kDense, Codec::kF32}) {
    AttendCase c(where, 40, 1, 1, 4);
    TestList list;
    c.AddPage(&list, {{codec, codec}, false, false}, 64);
    const PageRef target = c.arena.NewPage({{codec, codec}, true, true}, 40);
    std::vector<MergeSource> sources;
    for (const auto& [slot, weight] : {std::pair<int, float>{0, 0.5f}, {63, 0.25f}, {17, 0.25f}, {5, 1.0f}}) {
      PageRef from = list.pages[0];
      from.count = static_cast<uint16_t>(slot);
      sources.push_back({from, weight});
    }
    PageRef first = target, second = target;
    first.count = 0, second.count = 15;
    const std::vector<EntryMerge> merges{{0, 3, 1.5f, first}, {3, 1, -2.f, second}};
    const std::unique_ptr<Stream> stream = c.arena.backend().NewStream();
    c.arena.backend().MergeEntries({sources.data(), merges.data(), 2, 40, c.arena.data()}, *stream);
    EXPECT_TRUE(stream->Synchronize().ok());
    const PageLayout layout = MakePageLayout(target.page_class(), 40);
    float weights[16];
    std::memcpy(weights, c.arena.Read(target, layout.log_weight_offset, sizeof weights).data(), sizeof weights);
    EXPECT_EQ(weights[0], 1.5f) << where;
    EXPECT_EQ(weights[15], -2.f) << where;
    // Read back as an entry of one page: its norm is that of the mean.
    for (const int slot : {0, 15}) {
      PageRef page = target;
      page.count = 16;
      std::vector<float> norms(16);
      Summarise(c, {&page, 1, 40, c.arena.data(), norms.data(), nullptr});
      double square = 0;
      for (size_t d = 0; d < 40; ++d) {
        double x = list.entries[5].stored_k[d];
        if (slot == 0) x = 0.5 * list.entries[0].stored_k[d] + 0.25 * (list.entries[63].stored_k[d] + list.entries[17].stored_k[d]);
        square += x * x;
      }
      EXPECT_NEAR(static_cast<double>(norms[static_cast<size_t>(slot)]), std::sqrt(square), 2e-3 * std::sqrt(square)) << where << " " << slot;
    }
  }
}

TEST(MergeEntries, WeightedMeansWithTheirLogWeight) {
  for (const Target& target : testing::UsableTargets()) ExpectWeightedMeans(target);
}

}  // namespace
}  // namespace loupe
