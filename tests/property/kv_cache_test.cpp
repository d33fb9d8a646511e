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
    options.arena_bytes = 3 * kSlabBytes;
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

// As many lists as the default model has, so that short tails fill slabs of their own. Others come first and grow side
// by side with the sequence, so its pages lie scattered; then they go, and it grows alone, in steps of any size.
TEST(KvCacheProperty, ASequenceThatIsAloneGrowsToTheLongest) {
  const auto backend = MakeBackend({.device = "cpu", .num_threads = 1, .isa = ""}).value();
  const auto stream = backend->NewStream();
  const KvShape shape{.num_layers = 30, .num_heads = 9, .num_kv_heads = 3, .head_dim = 64};
  const std::vector<float> zero(size_t{512} * 3 * 64, 0.f);
  for (int slabs = 1; slabs <= 16; ++slabs) {
    std::mt19937 random(static_cast<uint32_t>(slabs));
    const auto uniform = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    const auto cache = KvCache::Create({.device_bytes = slabs * kSlabBytes, .max_sequences = 40}, shape, *backend).value();
    const int longest = cache->LongestSequence();
    ASSERT_GE(longest, 64);
    KvBatch batch;
    const auto grow = [&](const std::vector<KvStepItem>& items) {
      const absl::Status status = cache->Reserve(items, &batch);
      if (!status.ok()) return status;
      const Tensor kv = MakeTensor(const_cast<float*>(zero.data()), DType::kF32, batch.num_rows, 3, 64);
      for (int layer = 0; layer < shape.num_layers; ++layer) cache->Append(batch, layer, kv, kv, *stream);
      cache->Commit(batch, *stream);
      return status;
    };
    for (int history = 0; history < 4; ++history) {
      SCOPED_TRACE(testing::Message() << slabs << " slabs, longest " << longest << ", history " << history);
      const SeqId lone = cache->Open().value();
      std::vector<SeqId> others;
      for (int i = 0; i < 30; ++i) others.push_back(cache->Open().value());
      for (int step = 0; step < 12; ++step) {
        std::vector<KvStepItem> items;
        for (const SeqId other : others) {
          if (uniform(0, 1) == 0) items.push_back({other, uniform(1, 8), 0, false});
        }
        if (cache->num_tokens(lone) + 4 <= longest) items.push_back({lone, uniform(1, 4), 0, false});
        if (!items.empty()) grow(items).IgnoreError();
      }
      for (const SeqId other : others) cache->Close(other);
      for (int tokens = cache->num_tokens(lone); tokens < longest;) {
        const int rows = std::min(longest - tokens, history % 2 == 0 ? uniform(1, 40) : uniform(1, 300));
        const absl::Status status = grow({{lone, rows, 0, false}});
        ASSERT_TRUE(status.ok()) << status.ToString() << " after " << tokens << " tokens, " << rows << " more";
        tokens += rows;
      }
      cache->Close(lone);
      cache->Audit();
    }
  }
}

}  // namespace
}  // namespace loupe
