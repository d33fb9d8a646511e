// The allocation of policy spherical: beside a search over all choices, its invariants, and what limits leave of the options.
#include "kvcache/policies/spherical_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/support/profiles.h"

namespace loupe {
namespace {

constexpr PageFormat kDense{Codec::kDense, Codec::kDense}, kS8{Codec::kS8, Codec::kS8}, kS4{Codec::kS4, Codec::kS4};

PolicyContext Context(int lists, int prompt) {
  PolicyContext context;
  context.num_layers = lists, context.num_kv_heads = 1, context.head_dim = 64;
  context.dense = context.landing = context.format = kDense;
  context.entry_bytes = 256, context.page_bytes = 64 * 256, context.small_page_bytes = 16 * 256;
  context.num_prompt = prompt;
  return context;
}

int64_t BytesOf(const std::vector<ListOptions>& lists, const std::vector<int>& chosen) {
  int64_t sum = 0;
  for (size_t i = 0; i < lists.size(); ++i) sum += lists[i][static_cast<size_t>(chosen[i])].bytes;
  return sum;
}
double CostOf(const std::vector<ListOptions>& lists, const std::vector<int>& chosen) {
  double sum = 0;
  for (size_t i = 0; i < lists.size(); ++i) sum += lists[i][static_cast<size_t>(chosen[i])].cost;
  return sum;
}

// The least cost of all choices that fit.
double LeastCost(const std::vector<ListOptions>& lists, int64_t bytes, size_t from = 0) {
  if (from == lists.size()) return 0;
  double least = HUGE_VAL;
  for (const SphericalOption& option : lists[from]) {
    if (option.bytes <= bytes) least = std::min(least, option.cost + LeastCost(lists, bytes - option.bytes, from + 1));
  }
  return least;
}

std::vector<ListOptions> RandomOptions(std::mt19937* random, int lists, int options) {
  std::vector<ListOptions> out(static_cast<size_t>(lists));
  for (ListOptions& list : out) {
    for (int i = 0; i < options; ++i) {
      list.push_back({kS4, i, 1 + static_cast<int64_t>((*random)() % 20), static_cast<double>((*random)() % 1000)});
    }
  }
  return out;
}

TEST(ChooseOptions, LosesAtMostOneStepToTheBestOfAllChoices) {
  std::mt19937 random(1);
  int best = 0, all = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const auto lists = RandomOptions(&random, 2 + trial % 4, 1 + trial % 6);
    int64_t least = 0, most = 0;
    double largest = 0;  // difference within a list
    for (const ListOptions& list : lists) {
      int64_t fewest = 1000, greatest = 0;
      double low = 1e9, high = 0;
      for (const SphericalOption& o : list) {
        fewest = std::min(fewest, o.bytes), greatest = std::max(greatest, o.bytes), low = std::min(low, o.cost), high = std::max(high, o.cost);
      }
      least += fewest, most += greatest, largest = std::max(largest, high - low);
    }
    for (int64_t bytes = least; bytes <= most; bytes += 3) {
      const std::vector<int> chosen = ChooseOptions(lists, bytes);
      EXPECT_LE(BytesOf(lists, chosen), bytes);
      const double optimum = LeastCost(lists, bytes), cost = CostOf(lists, chosen);
      EXPECT_GE(cost, optimum);
      EXPECT_LE(cost, optimum + largest);
      best += cost == optimum, ++all;
    }
    EXPECT_EQ(CostOf(lists, ChooseOptions(lists, most)), LeastCost(lists, most));
  }
  EXPECT_GT(best, all * 8 / 10);  // and mostly nothing
}

TEST(ChooseOptions, IsExactWhereOnePriceSpendsTheBudget) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 100; ++trial) {
    // Gains fall within a list: the choice of one price is the best of its bytes.
    std::vector<ListOptions> lists(3);
    for (ListOptions& list : lists) {
      double gain = 1000, cost = 2000;
      int64_t bytes = 2;
      list.push_back({kS4, 0, bytes, cost});
      for (int i = 1; i < 5; ++i) {
        gain *= 0.3 + 0.5 * static_cast<double>(random() % 100) / 100;
        cost -= gain, bytes += 1;
        list.push_back({kS4, i, bytes, cost});
      }
    }
    double previous = HUGE_VAL;
    for (int64_t bytes = 6; bytes <= 18; ++bytes) {
      const std::vector<int> chosen = ChooseOptions(lists, bytes);
      EXPECT_NEAR(CostOf(lists, chosen), LeastCost(lists, bytes), 1e-9);
      EXPECT_LT(CostOf(lists, chosen), previous);  // more bytes, less cost
      previous = CostOf(lists, chosen);
    }
  }
}

TEST(ChooseOptions, EqualListsGetMoreFromTheFirstOnAndTheSameEveryTime) {
  const ListOptions list{{kS4, 0, 10, 5}, {kS8, 0, 20, 1}};
  const std::vector<ListOptions> lists(4, list);
  EXPECT_EQ(ChooseOptions(lists, 65), (std::vector<int>{1, 1, 0, 0}));
  EXPECT_EQ(ChooseOptions(lists, 65), ChooseOptions(lists, 65));
}

TEST(OptionsOf, MoreBitsAndLargerSharesCostLess) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 50; ++trial) {
    const ListCosts costs = testing::RandomCosts(&random);
    double previous = HUGE_VAL;
    for (double share = 0; share <= 1; share += 1.0 / 256) {
      const double cost = CostOfShare(costs, share);
      EXPECT_LE(cost, previous * (1 + 1e-12));
      previous = cost;
    }
    for (size_t i = 0; i < kProfileShares.size(); ++i) EXPECT_NEAR(CostOfShare(costs, kProfileShares[i]), costs.share[i], 1e-12);
    EXPECT_NEAR(CostOfShare(costs, 1), CostOfBits(costs, 4, 4), 1e-12);
    EXPECT_LT(CostOfBits(costs, 8, 8), CostOfBits(costs, 8, 4));
    EXPECT_LT(CostOfBits(costs, 4, 4), CostOfBits(costs, 4, 2));
    EXPECT_LT(CostOfBits(costs, 3, 2), CostOfBits(costs, 2, 2));
    EXPECT_EQ(CostOfBits(costs, 16, 16), 0);
  }
}

TEST(OptionsOf, LimitsLeaveWhatTheySay) {
  std::mt19937 random(4);
  const ListCosts costs = testing::RandomCosts(&random);
  const PolicyContext context = Context(4, 1000);
  const PlanShape shape{&context, 1000, 68, kDense, false};
  for (const SphericalOption& o : OptionsOf(costs, shape, {Retention::kBits, 0, 0, 3})) {
    EXPECT_EQ(o.kept, 932);
    EXPECT_GE(CodecBits(o.format.key), 3);
    EXPECT_GE(CodecBits(o.format.value), 3);
  }
  bool drops = false, keeps = false;
  for (const SphericalOption& o : OptionsOf(costs, shape, {Retention::kDrop, 0, 0, 0})) {
    EXPECT_TRUE(o.format == kS4 || o.kept == 932);
    drops |= o.kept == 0, keeps |= o.kept == 932 && o.format == kDense;
  }
  EXPECT_TRUE(drops && keeps);
  for (const SphericalOption& o : OptionsOf(costs, shape, {Retention::kJoint, 4, 2, 0})) {
    EXPECT_EQ(o.format, (PageFormat{Codec::kS4, Codec::kS2}));
  }
  for (const SphericalOption& o : OptionsOf(costs, shape, {Retention::kJoint, 0, 0, 8})) {
    EXPECT_TRUE(o.format == kS8 || o.format == kDense);
  }
}

TEST(OptionsOf, BytesAreThoseOfAllPages) {
  std::mt19937 random(5);
  const ListCosts costs = testing::RandomCosts(&random);
  const PolicyContext context = Context(4, 1000);
  for (const SphericalOption& o : OptionsOf(costs, {&context, 1000, 68, kDense, false}, {})) {
    // 64 and 4 protected entries: a large and a small page; or one run with what is kept.
    const int64_t expected = o.format == kDense ? 16 * 64 * 256 : context.RunBytes(o.format, o.kept) + 80 * 256;
    EXPECT_EQ(o.bytes, expected);
  }
  for (const SphericalOption& o : OptionsOf(costs, {&context, 1000, 68, kDense, true}, {})) EXPECT_EQ(o.bytes, o.kept + 68);
}

TEST(UniformOptions, FewerBytesFromOneToTheNext) {
  const PolicyContext context = Context(4, 2048);
  const std::vector<SphericalOption> options = UniformOptions({&context, 2048, 68, kS8, false}, {});
  constexpr size_t kBits = 8;  // rows of bits, then shares
  for (size_t i = 1; i < options.size(); ++i) {
    if (i != kBits) EXPECT_LT(options[i].bytes, options[i - 1].bytes) << i;
    EXPECT_EQ(options[i].kept == 1980, i < kBits);
  }
  EXPECT_EQ(options.front().format, kDense);
  EXPECT_EQ(options.back().kept, 0);
  EXPECT_EQ(UniformOptions({&context, 2048, 68, kS8, false}, {Retention::kBits, 0, 0, 0}).size(), kBits);
}

}  // namespace
}  // namespace loupe
