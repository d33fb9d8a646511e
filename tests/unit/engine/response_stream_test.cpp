#include "engine/response_stream.h"

#include <atomic>
#include <thread>

#include "gtest/gtest.h"

namespace loupe {
namespace {

Delta MakeDelta(int index, std::string text, std::vector<int32_t> ids) {
  Delta delta;
  delta.index = index;
  delta.text = std::move(text);
  delta.token_ids = std::move(ids);
  return delta;
}

Finished MakeEnd(int index) {
  Finished finished;
  finished.index = index;
  return finished;
}

TEST(ResponseStreamTest, MergesWhatWaitsAndKeepsTheOrder) {
  ResponseStream stream("a", 2);
  EXPECT_FALSE(stream.TryNext());
  stream.Push(Started{5, 0});
  stream.Push(MakeDelta(0, "x", {1}));
  stream.Push(MakeDelta(1, "u", {9}));
  stream.Push(MakeDelta(0, "y", {2}));
  stream.Push(MakeEnd(0));
  stream.Push(MakeDelta(1, "v", {}));
  EXPECT_EQ(std::get<Started>(*stream.TryNext()).prompt_tokens, 5);
  Delta delta = std::get<Delta>(*stream.TryNext());
  EXPECT_EQ(delta.text, "xy");
  EXPECT_EQ(delta.token_ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(std::get<Delta>(*stream.TryNext()).text, "uv");
  stream.Push(MakeDelta(1, "w", {}));
  EXPECT_EQ(std::get<Finished>(*stream.TryNext()).index, 0);
  EXPECT_FALSE(stream.done());
  EXPECT_EQ(std::get<Delta>(*stream.TryNext()).text, "w");
  stream.Push(MakeEnd(1));
  EXPECT_FALSE(stream.done()) << "the end was not taken yet";
  EXPECT_TRUE(stream.TryNext());
  EXPECT_TRUE(stream.done());
  EXPECT_FALSE(stream.WaitNext(std::chrono::steady_clock::now() + std::chrono::hours(1))) << "returns at once when done";
}

TEST(ResponseStreamTest, WakesOncePerSilenceAndAtOnceIfSomethingWaits) {
  ResponseStream stream("a", 1);
  int calls = 0;
  stream.OnReady([&] { ++calls; });
  EXPECT_EQ(calls, 0);
  stream.Push(Started{});
  stream.Push(MakeDelta(0, "x", {}));
  EXPECT_EQ(calls, 1);
  stream.TryNext();
  stream.Push(MakeEnd(0));
  EXPECT_EQ(calls, 1) << "the delta is still there";
  stream.OnReady([&] { calls += 10; });
  EXPECT_EQ(calls, 11);
  stream.OnReady({});
  stream.TryNext();
  stream.TryNext();
  stream.Push(Started{});
  EXPECT_EQ(calls, 11);
}

TEST(ResponseStreamTest, WaitTimesOut) {
  ResponseStream stream("a", 1);
  EXPECT_FALSE(stream.WaitNext(std::chrono::steady_clock::now() + std::chrono::milliseconds(5)));
  EXPECT_FALSE(stream.done());
}

TEST(ResponseStreamTest, AWriterAndAReaderLoseNothing) {
  constexpr int kTokens = 2000;
  ResponseStream stream("a", 1);
  std::atomic<int> wakes{0};
  stream.OnReady([&] { ++wakes; });
  std::thread writer([&] {
    for (int i = 0; i < kTokens; ++i) stream.Push(MakeDelta(0, "x", {i}));
    stream.Push(MakeEnd(0));
  });
  int next = 0;
  while (!stream.done()) {
    const auto event = stream.WaitNext(std::chrono::steady_clock::now() + std::chrono::seconds(10));
    ASSERT_TRUE(event);
    if (const auto* delta = std::get_if<Delta>(&*event)) {
      ASSERT_EQ(delta->text.size(), delta->token_ids.size());
      for (const int32_t id : delta->token_ids) ASSERT_EQ(id, next++);
    }
  }
  writer.join();
  EXPECT_EQ(next, kTokens);
  EXPECT_GT(wakes, 0);
}

}  // namespace
}  // namespace loupe
