#include "server/in_flight.h"

#include "gtest/gtest.h"

namespace loupe {
namespace {

std::shared_ptr<ResponseStream> Stream() { return std::make_shared<ResponseStream>("engine's name", 1); }

TEST(InFlight, EveryIdOfARequestEndsAllItsStreamsAndNoOthers) {
  InFlight in_flight;
  const auto a = Stream(), b = Stream(), other = Stream();
  const auto ours = in_flight.Add({"q", "cmpl-q"}, {a, b});
  const auto theirs = in_flight.Add({"q#1", "cmpl-q#1"}, {other});
  EXPECT_FALSE(in_flight.Cancel("engine's name"));
  EXPECT_FALSE(in_flight.Cancel("cmpl-"));
  EXPECT_TRUE(in_flight.Cancel("cmpl-q"));
  EXPECT_TRUE(a->cancelled() && b->cancelled());
  EXPECT_FALSE(other->cancelled());
  EXPECT_TRUE(in_flight.Cancel("q#1"));
  EXPECT_TRUE(other->cancelled());
}

TEST(InFlight, AnIdMayStandForSeveralRequestsUntilTheyAreGone) {
  InFlight in_flight;
  const auto a = Stream(), b = Stream();
  auto first = in_flight.Add({"q"}, {a});
  const auto second = in_flight.Add({"q"}, {b});
  first.reset();
  EXPECT_TRUE(in_flight.Cancel("q"));
  EXPECT_FALSE(a->cancelled());
  EXPECT_TRUE(b->cancelled());
  b->Push(Finished{});
  b->TryNext();
  EXPECT_FALSE(in_flight.Cancel("q")) << "its end was taken";
}

}  // namespace
}  // namespace loupe
