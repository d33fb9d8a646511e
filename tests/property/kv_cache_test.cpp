// The whole cache under random requests in an arena that is too small for them: steps are refused, forks share what is left,
// and still every attention output equals the oracle and the books are exact.
#include <gtest/gtest.h>

#include "tests/unit/kvcache/random_events.h"

namespace loupe {
namespace {

struct Totals {
  EventCounts events;
  int64_t expired = 0;
};

Totals RunTight(const HarnessOptions& base, const std::vector<uint32_t>& seeds) {
  Totals totals;
  for (uint32_t seed : seeds) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    HarnessOptions options = base;
    options.seed = seed;
    options.arena_bytes = 2 * kSlabBytes;
    KvHarness harness(options);
    const RandomSubsetPolicy policy(seed);
    EventOptions events;
    events.steps = 120;
    events.concurrent = 10;
    events.policy = &policy;
    const EventCounts counts = RunRandomEvents(harness, events);
    totals.events.refused += counts.refused;
    totals.events.forked += counts.forked;
    totals.events.finished_prefills += counts.finished_prefills;
    totals.expired += harness.cache().Stats().entries_expired;
    EXPECT_EQ(harness.cache().Stats().reserve_failures, counts.refused);
  }
  return totals;
}

TEST(KvCacheProperty, TightArena) {
  // A page of 64 entries of 256 dimensions has 64 KiB: 32 a slab.
  const Totals totals = RunTight({.groups = 2, .heads_per_group = 1, .head_dim = 256}, {11, 12, 13, 14, 15, 16, 17, 18});
  EXPECT_GT(totals.events.refused, 10);
  EXPECT_GT(totals.events.forked, 10);
  EXPECT_GT(totals.events.finished_prefills, 10);
}

TEST(KvCacheProperty, TightArenaWithWindowsAndSinks) {
  const Totals totals = RunTight({.groups = 2, .heads_per_group = 1, .head_dim = 256, .windows = {20, 90}, .sinks = true}, {21, 22, 23});
  EXPECT_GT(totals.events.refused, 0);
  EXPECT_GT(totals.expired, 0);
}

}  // namespace
}  // namespace loupe
