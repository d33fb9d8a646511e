#include "server/service_rate.h"

#include "gtest/gtest.h"
#include "server/retry_after.h"

namespace loupe {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(ServiceRate, WaitsAsLongAsHalfTheQueueTakes) {
  ServiceRate rate;
  const ServiceRate::Time start = std::chrono::steady_clock::now();
  EXPECT_EQ(rate.SecondsUntilRoom(100, start), 1) << "nothing measured";
  for (int i = 1; i <= 200; ++i) rate.Add(start + milliseconds(500 * i));  // 2 a second
  EXPECT_NEAR(rate.SecondsUntilRoom(40, start + seconds(100)), 10, 0.5);
  EXPECT_EQ(rate.SecondsUntilRoom(0, start + seconds(100)), 0);
}

TEST(ServiceRate, IdleTimeDoesNotCount) {
  ServiceRate rate;
  const ServiceRate::Time start = std::chrono::steady_clock::now();
  rate.Add(start);
  EXPECT_EQ(rate.SecondsUntilRoom(100, start + seconds(3600)), 1);
  rate.Add(start + seconds(3600));
  rate.Add(start + seconds(3602));
  EXPECT_NEAR(rate.SecondsUntilRoom(2, start + seconds(3602)), 1, 1e-9) << "2 ends in 2 s";
}

TEST(RetryAfter, WholeSecondsWithinBounds) {
  EXPECT_EQ(RetryAfterOf(absl::ResourceExhaustedError("x")), std::nullopt);
  EXPECT_EQ(RetryAfterOf(WithRetryAfter(absl::ResourceExhaustedError("x"), 0.2)), 1);
  EXPECT_EQ(RetryAfterOf(WithRetryAfter(absl::ResourceExhaustedError("x"), 3.2)), 4);
  EXPECT_EQ(RetryAfterOf(WithRetryAfter(absl::ResourceExhaustedError("x"), 1e9)), 120);
}

}  // namespace
}  // namespace loupe
