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
}

void End(ResponseStream& stream) {
  stream.Push(Finished{});
  stream.TryNext();
}

TEST(InFlight, ASecondCancelAnswersLikeTheFirst) {
  InFlight in_flight;
  const auto a = Stream(), b = Stream(), c = Stream();
  auto first = in_flight.Add({"q", "cmpl-q"}, {a});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(in_flight.Cancel("q")) << i;
  End(*a);
  EXPECT_TRUE(in_flight.Cancel("q")) << "its end was taken";
  first.reset();
  EXPECT_TRUE(in_flight.Cancel("q")) << "nobody carries the id any more";
  EXPECT_TRUE(in_flight.Cancel("cmpl-q")) << "its other name";

  auto second = in_flight.Add({"q"}, {b});
  End(*b);
  EXPECT_FALSE(in_flight.Cancel("q")) << "the id is another request's, which ended by itself";
  second.reset();
  EXPECT_FALSE(in_flight.Cancel("q")) << "an end that was no cancel does not become one";
  EXPECT_TRUE(in_flight.Cancel("cmpl-q"));
}

TEST(InFlight, OnlySoManyCancelledIdsAreRemembered) {
  InFlight in_flight;
  const int most = static_cast<int>(InFlight::kMaxCancelled);
  for (int i = 0; i <= most; ++i) {
    const auto stream = Stream();
    const auto handle = in_flight.Add({std::to_string(i)}, {stream});
    EXPECT_TRUE(in_flight.Cancel(std::to_string(i)));
    EXPECT_TRUE(in_flight.Cancel(std::to_string(i)));
  }
  EXPECT_FALSE(in_flight.Cancel("0")) << "the oldest is forgotten";
  EXPECT_TRUE(in_flight.Cancel("1"));
  EXPECT_TRUE(in_flight.Cancel(std::to_string(most)));
}

}  // namespace
}  // namespace loupe
