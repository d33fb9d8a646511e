// The proof of the cache's shape: a policy that keeps a different random subset in every list, under concurrent requests
// with forks and cancels, with and without sinks and windows. Attention equals the double-precision oracle after every
// step, and the books are exact.
#include <gtest/gtest.h>

#include "tests/unit/kvcache/random_events.h"

namespace loupe {
namespace {

struct RaggedCase {
  const char* name;
  HarnessOptions harness;
  bool forks = true;
};

void PrintTo(const RaggedCase& c, std::ostream* out) { *out << c.name; }

class RaggedAttention : public testing::TestWithParam<RaggedCase> {};

TEST_P(RaggedAttention, EqualsOracleWithExactBooks) {
  for (uint32_t seed : {1u, 2u}) {
    HarnessOptions options = GetParam().harness;
    options.seed = seed;
    KvHarness harness(options);
    const RandomSubsetPolicy policy(seed * 77);
    EventOptions events;
    events.steps = 90;
    events.forks = GetParam().forks;
    events.policy = &policy;
    const EventCounts counts = RunRandomEvents(harness, events);
    EXPECT_GT(harness.rows_checked(), 2000);
    EXPECT_GT(counts.finished_prefills, 5);
    EXPECT_GT(counts.cancelled, 0);
    EXPECT_GT(counts.abandoned, 0);
    EXPECT_GT(harness.cache().Stats().entries_dropped, 100);
    EXPECT_EQ(counts.refused, 0) << "the arena of this test is large";
    EXPECT_EQ(harness.failed_repacks(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, RaggedAttention,
    testing::Values(RaggedCase{"grouped", {.groups = 2, .heads_per_group = 2}},
                    RaggedCase{"one_head", {.groups = 1, .heads_per_group = 1, .head_dim = 8}},
                    RaggedCase{"three_to_one", {.groups = 3, .heads_per_group = 3, .head_dim = 16}},
                    RaggedCase{"sinks", {.sinks = true}},
                    RaggedCase{"windows", {.windows = {37, 0}}},
                    RaggedCase{"windows_and_sinks", {.groups = 1, .heads_per_group = 4, .windows = {5, 100}, .sinks = true}},
                    RaggedCase{"fast_path", {.windows = {0, 64}, .sinks = true, .exact = false}}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(RaggedAttentionMemory, BytesFollowFromTheListsLengths) {
  HarnessOptions options;
  options.seed = 5;
  KvHarness harness(options);
  const RandomSubsetPolicy policy(9);
  std::vector<SeqId> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(harness.Open(&policy));
  int left = 150;
  while (left > 0) {
    std::vector<KvStepItem> items;
    const int rows = std::min(left, 37);
    left -= rows;
    for (SeqId id : ids) items.push_back({id, rows, 0, left == 0});
    ASSERT_TRUE(harness.Step(items).ok());
    EXPECT_EQ(harness.cache().Stats().resident_bytes, harness.ExpectedBytes());
  }
  for (int token = 0; token < 80; ++token) {
    std::vector<KvStepItem> items;
    for (SeqId id : ids) items.push_back({id, 0, 1, false});
    ASSERT_TRUE(harness.Step(items).ok());
    ASSERT_EQ(harness.cache().Stats().resident_bytes, harness.ExpectedBytes()) << "token " << token;
  }
  harness.CheckBooks();
}

}  // namespace
}  // namespace loupe
