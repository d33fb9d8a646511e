#include "server/api_keys.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"
#include "server/retry_after.h"

namespace loupe {
namespace {

using std::chrono::seconds;

class ApiKeysTest : public testing::Test {
 protected:
  ~ApiKeysTest() override { std::filesystem::remove(path_); }
  void Write(const std::string& text) { std::ofstream(path_) << text; }
  std::unique_ptr<ApiKeys> Load(const std::string& text) {
    Write(text);
    auto keys = ApiKeys::Load(path_, seconds(0));
    EXPECT_TRUE(keys.ok()) << keys.status();
    return *std::move(keys);
  }
  static std::string NameOf(ApiKeys& keys, const std::string& authorization) {
    const auto account = keys.Find(authorization);
    return account.ok() ? (*account)->name() : std::string(absl::StatusCodeToString(account.status().code()));
  }

  const std::string path_ = (std::filesystem::temp_directory_path() / ("loupe-keys-" + std::to_string(getpid()))).string();
};

Finished Cost(int64_t bytes, double computing) {
  Finished finished;
  finished.usage.kv.device_bytes = bytes;
  finished.timings.prefill = computing / 4;
  finished.timings.decode = computing * 3 / 4;
  finished.timings.queue = 1000;  // waiting costs nothing
  return finished;
}

TEST_F(ApiKeysTest, FindsByTheWholeKey) {
  const auto keys = Load("# two\n\n  one :  key-number-1  \r\ntwo:key-number-2 max_requests=3 kv_byte_seconds=10\n");
  EXPECT_EQ(NameOf(*keys, "Bearer key-number-1"), "one");
  EXPECT_EQ(NameOf(*keys, "bEARER  key-number-2 "), "two");
  for (const char* wrong : {"", "Bearer", "Bearer ", "Bearer key-number-", "Bearer key-number-11", "Basic key-number-1", "key-number-1",
                            "Bearer one", "Bearer max_requests=3"}) {
    EXPECT_EQ(NameOf(*keys, wrong), "UNAUTHENTICATED") << wrong;
  }
}

TEST_F(ApiKeysTest, ReadsAgainAndKeepsWhatAKeyHolds) {
  const auto keys = Load("one: key-number-1 max_requests=1\n");
  const auto account = *keys->Find("Bearer key-number-1");
  const auto place = account->Enter();
  ASSERT_TRUE(place.ok());
  Write("one: key-number-9 max_requests=1\ntwo: key-number-2\n");
  EXPECT_EQ(NameOf(*keys, "Bearer key-number-1"), "UNAUTHENTICATED");
  EXPECT_EQ(NameOf(*keys, "Bearer key-number-2"), "two");
  const auto again = *keys->Find("Bearer key-number-9");
  EXPECT_EQ(again->Enter().status().code(), absl::StatusCode::kResourceExhausted) << "the place taken before counts";
  Write("broken");
  EXPECT_EQ(NameOf(*keys, "Bearer key-number-2"), "two");
  std::filesystem::remove(path_);
  EXPECT_EQ(NameOf(*keys, "Bearer key-number-2"), "two");
  Write("two: key-number-3\n");
  EXPECT_EQ(NameOf(*keys, "Bearer key-number-3"), "two");
}

TEST_F(ApiKeysTest, PlacesAreGivenBack) {
  const auto account = std::make_shared<KeyAccount>("k");
  account->SetLimits({2, 0});
  auto first = account->Enter(), second = account->Enter();
  ASSERT_TRUE(first.ok() && second.ok());
  const auto third = account->Enter();
  ASSERT_FALSE(third.ok());
  EXPECT_NE(third.status().message().find("2 requests in flight, its limit is 2"), std::string::npos) << third.status();
  EXPECT_EQ(RetryAfterOf(third.status()), 1);
  first->reset();
  EXPECT_TRUE(account->Enter().ok());
}

TEST_F(ApiKeysTest, CacheIsForgottenInAMinute) {
  const auto account = std::make_shared<KeyAccount>("k");
  account->SetLimits({0, 6000});  // 100 a second
  const SteadyTime now = std::chrono::steady_clock::now();
  EXPECT_TRUE(account->Enter(now).ok());
  account->Charge(Cost(1000, 8), now);
  const auto refused = account->Enter(now);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(RetryAfterOf(refused.status()), 20) << "8000 - 6000 at 100 a second";
  EXPECT_FALSE(account->Enter(now + seconds(19)).ok());
  EXPECT_TRUE(account->Enter(now + seconds(21)).ok());
  account->Charge(Cost(1000, 8), now + seconds(200));
  EXPECT_FALSE(account->Enter(now + seconds(219)).ok()) << "nothing is saved up";
}

TEST_F(ApiKeysTest, WhoLeavesIsChargedWhenTheEngineIsThrough) {
  const auto account = std::make_shared<KeyAccount>("k");
  account->SetLimits({0, 6000});
  const auto stream = std::make_shared<ResponseStream>("r", 1);
  account->ChargeAtEnd(stream);
  EXPECT_TRUE(account->Enter().ok());
  stream->Push(Delta());
  stream->Push(Cost(1000, 8));
  EXPECT_FALSE(account->Enter().ok());
}

}  // namespace
}  // namespace loupe
