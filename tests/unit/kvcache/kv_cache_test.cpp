#include "kvcache/kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "tests/unit/kvcache/kv_harness.h"

namespace loupe {
namespace {

int64_t LargeBytes(const HarnessOptions& o) { return MakePageLayout(PageClass{o.format(), false, false}, o.head_dim).bytes; }
int64_t SmallBytes(const HarnessOptions& o) { return MakePageLayout(PageClass{o.format(), true, false}, o.head_dim).bytes; }
int NumLists(const HarnessOptions& o) { return o.layers * o.groups; }

// Appends `rows` prompt rows in one step, checked against the oracle.
void Fill(KvHarness& harness, SeqId seq, int rows) { ASSERT_TRUE(harness.Step({{seq, rows, 0, false}}).ok()); }

TEST(KvCacheCreate, ShapesThatCannotBeAreRefused) {
  auto backend = MakeBackend({.device = "cpu", .num_threads = 1, .isa = ""}).value();
  const KvConfig config{.device_bytes = kSlabBytes};
  const KvShape good{.num_layers = 2, .num_heads = 4, .num_kv_heads = 2, .head_dim = 16, .scale = 0, .windows = {}, .sinks = {}};
  EXPECT_TRUE(KvCache::Create(config, good, *backend).ok());
  const auto refuse = [&](auto change) {
    KvShape shape = good;
    KvConfig c = config;
    change(shape, c);
    const auto cache = KvCache::Create(c, shape, *backend);
    EXPECT_TRUE(absl::IsInvalidArgument(cache.status())) << cache.status().ToString();
  };
  refuse([](KvShape& s, KvConfig&) { s.num_layers = 0; });
  refuse([](KvShape& s, KvConfig&) { s.num_heads = 3; });
  refuse([](KvShape& s, KvConfig&) { s.head_dim = -1; });
  refuse([](KvShape& s, KvConfig&) { s.head_dim = 1 << 16; });
  refuse([](KvShape& s, KvConfig&) { s.windows = {4}; });
  refuse([](KvShape& s, KvConfig&) { s.windows = {4, -1}; });
  refuse([](KvShape& s, KvConfig&) { s.sinks = {{0, 0, 0, 0}, {0, 0, 0}}; });
  refuse([](KvShape&, KvConfig& c) { c.device_bytes = kSlabBytes - 1; });
  refuse([](KvShape&, KvConfig& c) { c.max_sequences = 0; });
}

TEST(KvCacheOpen, LimitOfSequences) {
  HarnessOptions options;
  options.max_sequences = 2;
  KvHarness harness(options);
  const SeqId first = harness.Open();
  harness.Open();
  EXPECT_TRUE(absl::IsResourceExhausted(harness.cache().Open().status()));
  EXPECT_TRUE(absl::IsResourceExhausted(harness.Fork(first).status()));
  harness.Close(first);
  EXPECT_TRUE(harness.cache().Open().ok());
}

// Lengths around every border, appended in one step and token by token: the last page is small exactly if the rest fits.
TEST(KvCacheTails, SizesAtEveryBorder) {
  HarnessOptions options;
  for (int length : {1, 7, 15, 16, 17, 31, 63, 64, 65, 79, 80, 81, 127, 128, 129}) {
    KvHarness harness(options);
    Fill(harness, harness.Open(), length);
    const int tail = length % kPageEntries;
    const int64_t bytes = NumLists(options) * (length / kPageEntries * LargeBytes(options) +
                                               (tail == 0 ? 0 : tail <= kSmallPageEntries ? SmallBytes(options) : LargeBytes(options)));
    EXPECT_EQ(harness.cache().Stats().resident_bytes, bytes) << length;
    EXPECT_EQ(harness.cache().Stats().small_pages, tail > 0 && tail <= kSmallPageEntries ? NumLists(options) : 0) << length;
  }
}

TEST(KvCacheTails, ASmallPageGrowsAndIsGoneAfterTheCommit) {
  HarnessOptions options;
  KvHarness harness(options);
  const SeqId seq = harness.Open();
  Fill(harness, seq, 16);
  ASSERT_TRUE(harness.Step({{seq, 0, 1, false}}).ok());
  KvStats stats = harness.cache().Stats();
  EXPECT_EQ(stats.resident_bytes, NumLists(options) * LargeBytes(options));
  EXPECT_EQ(stats.retired_bytes, NumLists(options) * SmallBytes(options));
  EXPECT_EQ(harness.cache().Report(seq).peak_device_bytes, NumLists(options) * (LargeBytes(options) + SmallBytes(options)));
  ASSERT_TRUE(harness.Step({{seq, 0, 1, false}}).ok());
  EXPECT_EQ(harness.cache().Stats().retired_bytes, 0);
  EXPECT_EQ(harness.cache().Stats().resident_entries, 18 * NumLists(options));
}

TEST(KvCacheReserve, ARefusedStepChangesNothing) {
  HarnessOptions options;
  options.head_dim = 128;  // 64 KiB a page, 32 a slab
  options.arena_bytes = kSlabBytes;
  KvHarness harness(options);
  const SeqId first = harness.Open(), second = harness.Open();
  Fill(harness, first, 300);  // 4 lists of 5 pages of the 32
  EXPECT_TRUE(harness.Step({{first, 0, 1, false}, {second, 200, 0, false}}).code() == absl::StatusCode::kResourceExhausted);
  const absl::Status status = harness.Step({{second, 200, 0, false}});
  EXPECT_NE(std::string(status.message()).find("1048576"), std::string::npos) << status.ToString();
  EXPECT_EQ(harness.cache().Stats().reserve_failures, 2);
  harness.CheckBooks();
  Fill(harness, second, 150);  // what is left: 12 pages
  harness.CheckBooks();
}

TEST(KvCacheReserve, TooManyRowsAreRefused) {
  KvHarness harness({});
  const SeqId seq = harness.Open();
  KvBatch batch;
  const std::vector<KvStepItem> many{{seq, 513, 0, false}}, none{{seq, 0, 0, false}}, negative{{seq, -1, 3, false}};
  EXPECT_TRUE(absl::IsInvalidArgument(harness.cache().Reserve(many, &batch)));
  EXPECT_TRUE(absl::IsInvalidArgument(harness.cache().Reserve(none, &batch)));
  EXPECT_TRUE(absl::IsInvalidArgument(harness.cache().Reserve(negative, &batch)));
  EXPECT_EQ(batch.num_rows, 0);
  Fill(harness, seq, 512);
}

// The promise that admission rests on: a step of a new sequence is not refused if bytes_free says so.
TEST(KvCacheReserve, BytesForTokensIsEnough) {
  HarnessOptions options;
  options.head_dim = 128;
  options.layers = 1;
  options.arena_bytes = 3 * kSlabBytes;
  const std::vector<float> zero(static_cast<size_t>(200 * options.groups * options.head_dim), 0.f);
  int admitted = 0, refused = 0;
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    options.seed = seed;
    KvHarness harness(options);
    KvCache& cache = harness.cache();
    KvBatch batch;
    std::vector<SeqId> open;
    for (int i = 0; i < 60; ++i) {
      if (!open.empty() && harness.Uniform(0, 3) == 0) {
        std::swap(open.back(), open[static_cast<size_t>(harness.Uniform(0, static_cast<int>(open.size()) - 1))]);
        cache.Close(open.back());
        open.pop_back();
      }
      const int tokens = harness.Uniform(1, 200);
      open.push_back(cache.Open().value());
      const std::vector<KvStepItem> items{{open.back(), tokens, 0, false}};
      const bool fits = cache.bytes_free() >= cache.BytesForTokens(tokens);
      const int64_t before = cache.Stats().resident_bytes;
      const absl::Status status = cache.Reserve(items, &batch);
      if (fits) {
        ASSERT_TRUE(status.ok()) << status.ToString() << " seed " << seed << " tokens " << tokens;
      }
      ++(status.ok() ? admitted : refused);
      if (!status.ok()) continue;
      EXPECT_LE(cache.Stats().resident_bytes - before, cache.BytesForTokens(tokens));
      const Tensor kv = MakeTensor(const_cast<float*>(zero.data()), DType::kF32, tokens, options.groups, options.head_dim);
      cache.Append(batch, 0, kv, kv, harness.stream());
      cache.Commit(batch, harness.stream());
    }
  }
  EXPECT_GT(admitted, 100);
  EXPECT_GT(refused, 100);
  EXPECT_EQ(KvHarness(options).cache().BytesForTokens(0), 0);
}

// Every step is checked against the oracle, small pages that grow and pages that begin included.
TEST(KvCacheAdvance, ADecodeStepOfTheSameSequencesMovesTheLastOneOn) {
  KvHarness harness(HarnessOptions{});
  const SeqId a = harness.Open(), b = harness.Open();
  Fill(harness, a, 5);
  Fill(harness, b, 60);
  const auto decode = [&](int steps) {
    const int64_t before = harness.cache().Stats().steps_advanced;
    for (int i = 0; i < steps; ++i) EXPECT_TRUE(harness.Step({{a, 0, 1, false}, {b, 0, 1, false}}).ok());
    harness.CheckBooks();
    return harness.cache().Stats().steps_advanced - before;
  };
  EXPECT_EQ(decode(150), 149);
  const SeqId fork = harness.Fork(a).value();
  EXPECT_EQ(decode(20), 19) << "pages are shared now";
  EXPECT_TRUE(harness.Step({{fork, 0, 1, false}}).ok());
  EXPECT_EQ(decode(20), 19) << "another step came between";
  EXPECT_TRUE(harness.Step({{a, 0, 1, false}}, StepEnd::kAbandonMidway).ok());
  EXPECT_EQ(decode(3), 2);
  EXPECT_TRUE(harness.Step({{a, 0, 1, false}, {b, 0, 1, false}}, StepEnd::kAbandonMidway).ok());
  EXPECT_EQ(decode(3), 2) << "what was moved on and abandoned does not count";
}

TEST(KvCacheAdvance, TablesAreBuiltAfreshWhenTheyAreFull) {
  HarnessOptions options;
  options.layers = options.groups = options.heads_per_group = 1;
  KvHarness harness(options);
  const SeqId seq = harness.Open();
  Fill(harness, seq, 64);
  constexpr int kSteps = 17 * kPageEntries + 2;  // the first step fills a page and leaves room for 16
  for (int i = 0; i < kSteps; ++i) ASSERT_TRUE(harness.Step({{seq, 0, 1, false}}).ok());
  EXPECT_EQ(harness.cache().Stats().steps_advanced, kSteps - 2);
}

TEST(KvCacheAdvance, WindowsAndPoliciesAreBuiltAfresh) {
  HarnessOptions options;
  options.windows = {0, 30};
  KvHarness windowed(options);
  const SeqId seq = windowed.Open();
  Fill(windowed, seq, 40);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(windowed.Step({{seq, 0, 1, false}}).ok());
  EXPECT_EQ(windowed.cache().Stats().steps_advanced, 0);

  KvHarness thinned(HarnessOptions{});
  const RandomSubsetPolicy policy(3);
  const SeqId other = thinned.Open(&policy);
  ASSERT_TRUE(thinned.Step({{other, 50, 0, true}}).ok());
  for (int i = 0; i < 70; ++i) ASSERT_TRUE(thinned.Step({{other, 0, 1, false}}).ok());
  EXPECT_EQ(thinned.cache().Stats().steps_advanced, 59) << "not the first, nor those after the policy acted";
}

TEST(KvCacheFork, PagesAreSharedUntilOneWrites) {
  HarnessOptions options;
  KvHarness harness(options);
  const SeqId parent = harness.Open();
  Fill(harness, parent, 100);  // one full page and an open one of 36 entries in every list
  const int64_t alone = harness.cache().Stats().resident_bytes;
  const SeqId child = harness.Fork(parent).value();
  EXPECT_EQ(harness.cache().Stats().resident_bytes, alone);
  EXPECT_EQ(harness.cache().Report(child).device_bytes, alone);
  harness.CheckBooks();
  // The first writer copies the open page, the second finds itself alone with the old one.
  ASSERT_TRUE(harness.Step({{child, 0, 1, false}}).ok());
  EXPECT_EQ(harness.cache().Stats().resident_bytes, alone + NumLists(options) * LargeBytes(options));
  ASSERT_TRUE(harness.Step({{parent, 0, 1, false}}).ok());
  EXPECT_EQ(harness.cache().Stats().resident_bytes, alone + NumLists(options) * LargeBytes(options));
  harness.CheckBooks();
  harness.Close(parent);
  harness.CheckBooks();
  ASSERT_TRUE(harness.Step({{child, 0, 1, false}}).ok());
  harness.CheckBooks();
}

TEST(KvCacheFork, BothWriteInOneStep) {
  KvHarness harness({});
  const SeqId parent = harness.Open();
  for (int length : {10, 5, 30}) {
    Fill(harness, parent, length);
    const SeqId child = harness.Fork(parent).value();
    ASSERT_TRUE(harness.Step({{parent, 0, 1, false}, {child, 3, 2, false}}).ok());
    harness.CheckBooks();
    harness.Close(child);
  }
}

TEST(KvCacheWindow, PagesOutOfSightAreFreed) {
  HarnessOptions options;
  options.layers = 1;
  options.groups = 1;
  options.windows = {70};
  KvHarness harness(options);
  const SeqId seq = harness.Open();
  for (int i = 0; i < 20; ++i) Fill(harness, seq, 50);
  EXPECT_EQ(harness.cache().num_tokens(seq), 1000);
  const std::vector<int32_t> held = harness.cache().ListPositions(seq, 0, 0);
  EXPECT_LT(held.size(), 70u + kPageEntries);
  EXPECT_GE(held.size(), 69u);
  EXPECT_EQ(held.back(), 999);
  EXPECT_EQ(harness.cache().Stats().entries_expired, 1000 - static_cast<int64_t>(held.size()));
  EXPECT_EQ(harness.cache().Report(seq).read_bytes_per_token, 69 * options.entry_bytes());
  EXPECT_EQ(harness.cache().Report(seq).entries_dropped, 0);
  harness.CheckBooks();
}

TEST(KvCacheReport, FullPolicyAtTheEndOfPrefill) {
  HarnessOptions options;
  KvHarness harness(options);
  const SeqId seq = harness.Open();
  ASSERT_TRUE(harness.Step({{seq, 64, 0, true}}).ok());
  ASSERT_TRUE(harness.Step({{seq, 0, 1, false}}).ok());
  const KvSequenceReport report = harness.cache().Report(seq);
  const int64_t entry = options.entry_bytes();
  EXPECT_EQ(report.lists, NumLists(options));
  EXPECT_EQ(report.num_tokens, 65);
  EXPECT_EQ(report.entries_kept, 65 * NumLists(options));
  EXPECT_EQ(report.full_bytes, 65 * NumLists(options) * entry);
  EXPECT_EQ(report.read_bytes_per_token, report.full_bytes);
  EXPECT_EQ(report.device_bytes, NumLists(options) * (LargeBytes(options) + SmallBytes(options)));
  EXPECT_EQ(report.table_bytes, NumLists(options) * 2 * 8);
  EXPECT_EQ(report.prompt_tokens, 64);
  EXPECT_EQ(report.prompt_device_bytes, report.prompt_full_bytes);
}

// Pages of another sequence as a run that only this step sees.
TEST(KvCacheExtraPages, AreAttendedInThisStepOnly) {
  HarnessOptions options;
  KvHarness harness(options);
  KvCache& cache = harness.cache();
  const SeqId seq = harness.Open(), other = harness.Open();
  Fill(harness, seq, 40);
  Fill(harness, other, 90);
  const int heads = options.groups * options.heads_per_group, dim = options.head_dim, groups = options.groups;
  KvBatch batch;
  const std::vector<KvStepItem> items{{seq, 0, 1, false}};
  ASSERT_TRUE(cache.Reserve(items, &batch).ok());
  std::vector<float> zero(static_cast<size_t>(heads * dim), 0), q(zero.size()), out(zero.size());
  for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i % 5) / 4;
  const Tensor kv = MakeTensor(zero.data(), DType::kF32, 1, groups, dim);
  std::vector<PageRef> extra(static_cast<size_t>(groups) * 3);
  std::vector<int32_t> counts(static_cast<size_t>(groups));
  for (int layer = 0; layer < options.layers; ++layer) {
    for (int g = 0; g < groups; ++g) {
      const std::vector<PageRef> pages = cache.ListPages(other, layer, g);
      std::copy(pages.begin(), pages.end(), extra.begin() + g * 3);
      counts[static_cast<size_t>(g)] = static_cast<int32_t>(pages.size());
    }
    cache.SetExtraPages(batch, layer, MakeTensor(extra.data(), DType::kBytes, groups, 3),
                        MakeTensor(counts.data(), DType::kI32, groups));
    cache.Append(batch, layer, kv, kv, harness.stream());
    cache.Attend(batch, layer, MakeTensor(q.data(), DType::kF32, 1, heads, dim), MakeTensor(out.data(), DType::kF32, 1, heads, dim),
                 harness.stream());
    const std::vector<double> expected = harness.OracleWithZeroEntry(seq, layer, q.data(), 40, {other});
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected[i], 2e-5) << "layer " << layer << " element " << i;
  }
  cache.Abandon(batch);
  ASSERT_TRUE(harness.Step({{seq, 0, 1, false}}).ok()) << "the oracle of this step knows no extra pages";
}

TEST(KvCacheMisuseDeathTest, Stops) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the backend has threads
  KvHarness harness({});
  const SeqId seq = harness.Open();
  const std::vector<KvStepItem> twice{{seq, 1, 0, false}, {seq, 1, 0, false}};
  KvBatch batch;
  EXPECT_DEATH(harness.cache().Reserve(twice, &batch).IgnoreError(), "already part of a reserved step");
  EXPECT_DEATH(harness.cache().num_tokens(SeqId{99}), "is not open");
  EXPECT_DEATH(harness.cache().Commit(batch, harness.stream()), "not reserved");
  const std::vector<KvStepItem> items{{seq, 1, 0, false}};
  ASSERT_TRUE(harness.cache().Reserve(items, &batch).ok());
  EXPECT_DEATH(harness.cache().Commit(batch, harness.stream()), "never appended");
  EXPECT_DEATH(harness.cache().Close(seq), "part of a reserved step");
  harness.cache().Abandon(batch);
}

}  // namespace
}  // namespace loupe
