#include "server/logging.h"

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "spdlog/spdlog.h"

namespace loupe {
namespace {

TEST(Logging, LinesAreJsonWithFields) {
  const auto before = LogMessageCounts();
  testing::internal::CaptureStderr();
  InitLogging("info");
  spdlog::info("a \"quoted\" {}\n\xff", 5);
  LogEvent("request", {{"status", 200}, {"path", "/x\xff"}});
  spdlog::debug("too fine");
  spdlog::warn("careful");
  const std::string text = testing::internal::GetCapturedStderr();
  std::vector<nlohmann::json> lines;
  for (size_t at = 0; at < text.size(); at = text.find('\n', at) + 1)
    lines.push_back(nlohmann::json::parse(text.substr(at, text.find('\n', at) - at)));
  ASSERT_EQ(lines.size(), 3u) << text;
  EXPECT_EQ(lines[0]["msg"], "a \"quoted\" 5\n\xef\xbf\xbd");
  EXPECT_EQ(lines[0]["level"], "info");
  EXPECT_FALSE(lines[0].contains("status"));
  EXPECT_EQ(lines[1]["msg"], "request");
  EXPECT_EQ(lines[1]["status"], 200);
  EXPECT_EQ(lines[2]["level"], "warning");
  EXPECT_EQ(lines[2]["ts"].get<std::string>().size(), std::string("2026-01-02T03:04:05.678Z").size());
  const auto after = LogMessageCounts();
  EXPECT_EQ(after[1] - before[1], 2);
  EXPECT_EQ(after[2] - before[2], 1);
}

TEST(Logging, UnknownLevelsWarn) {
  testing::internal::CaptureStderr();
  InitLogging("loud");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("loud"), std::string::npos);
  testing::internal::CaptureStderr();
  InitLogging("off");
  spdlog::error("nobody hears");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  InitLogging("info");
}

}  // namespace
}  // namespace loupe
