#include "engine/eval/statistics.h"

#include <cmath>

#include "gtest/gtest.h"

namespace loupe {
namespace {

TEST(CompareRows, EqualRowsDoNotDiverge) {
  const std::vector<float> row{0.5f, -1, 3, 3, 100};
  const RowComparison c = CompareRows(row, row, 1);
  EXPECT_EQ(c.kl, 0);
  EXPECT_TRUE(c.same_top);
  EXPECT_EQ(c.nll, c.nll_full);
}

TEST(CompareRows, TwoTokensByHand) {
  // p = (3/4, 1/4), q = (1/2, 1/2); logits may carry any constant.
  const std::vector<float> full{std::log(3.f) + 7, 7}, policy{-2, -2};
  const RowComparison c = CompareRows(full, policy, 1);
  EXPECT_NEAR(c.kl, 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-6);
  EXPECT_NEAR(c.nll_full, std::log(4), 1e-6);
  EXPECT_NEAR(c.nll, std::log(2), 1e-6);
  EXPECT_TRUE(c.same_top);  // equal logits: the first counts
  EXPECT_FALSE(CompareRows(full, std::vector<float>{-2, -1}, 0).same_top);
}

TEST(CompareRows, LargeLogitsStayFinite) {
  const RowComparison c = CompareRows(std::vector<float>{3e38f, 0}, std::vector<float>{0, 3e38f}, 0);
  EXPECT_TRUE(std::isfinite(c.kl));
  EXPECT_GT(c.kl, 1e30);
}

TEST(Percentile, NearestRank) {
  EXPECT_EQ(PercentileOf({5, 1, 3, 2, 4}, 0.95), 5);
  EXPECT_EQ(PercentileOf({5, 1, 3, 2, 4}, 0.6), 3);
  EXPECT_EQ(PercentileOf({5, 1, 3, 2, 4}, 0), 1);
  EXPECT_EQ(PercentileOf({}, 0.5), 0);
}

TEST(Bootstrap, ContainsTheValueAndNarrowsWithMoreContexts) {
  std::vector<double> few, many;
  for (int i = 0; i < 400; ++i) {
    many.push_back(i % 10);
    if (i < 20) few.push_back(i % 10);
  }
  const Interval wide = BootstrapRatio(few, std::vector<double>(few.size(), 1));
  const Interval narrow = BootstrapRatio(many, std::vector<double>(many.size(), 1));
  EXPECT_LT(wide.low, 4.5);
  EXPECT_GT(wide.high, 4.5);
  EXPECT_LT(narrow.high - narrow.low, (wide.high - wide.low) / 3);
  // The spread of a mean of n values with deviation s is about 2 * 1.96 * s / sqrt(n).
  EXPECT_NEAR(narrow.high - narrow.low, 2 * 1.96 * 2.872 / 20, 0.06);
}

TEST(Bootstrap, OneContextIsAPointAndNoneIsZero) {
  const Interval one = BootstrapRatio(std::vector<double>{3}, std::vector<double>{4});
  EXPECT_EQ(one.low, 0.75);
  EXPECT_EQ(one.high, 0.75);
  EXPECT_EQ(BootstrapRatio({}, {}).high, 0);
}

}  // namespace
}  // namespace loupe
