#include "server/descriptors.h"

#include <sys/resource.h>

#include "gtest/gtest.h"

namespace loupe {
namespace {

TEST(Descriptors, ConnectionsLeaveRoomForTheRest) {
  EXPECT_EQ(FitConnections(1024, 1'048'576).value(), 1024);
  EXPECT_EQ(FitConnections(1024, 1024 + kReservedDescriptors).value(), 1024);
  EXPECT_EQ(FitConnections(1024, 1023 + kReservedDescriptors).value(), 1023);
  EXPECT_EQ(FitConnections(1024, 1 + kReservedDescriptors).value(), 1);
  const auto none = FitConnections(1024, kReservedDescriptors);
  EXPECT_EQ(none.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(none.status().message()).find(std::to_string(kReservedDescriptors)), std::string::npos);
}

TEST(Descriptors, TheSoftLimitIsRaisedToTheHardOne) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low{std::min<rlim_t>(before.rlim_max, 512), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_EQ(RaiseDescriptorLimit(), static_cast<int64_t>(before.rlim_max));
  rlimit now{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &now), 0);
  EXPECT_EQ(now.rlim_cur, before.rlim_max);
  setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace loupe
