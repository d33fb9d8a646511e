#include "server/cors.h"

#include "gtest/gtest.h"

namespace loupe {
namespace {

std::string Allowed(const CorsPolicy& policy, const std::string& origin) {
  for (const auto& [name, value] : policy.AnswerHeaders(origin)) {
    if (name == "Access-Control-Allow-Origin") return value;
  }
  return "";
}

TEST(Cors, ListedOriginsAndNoOthers) {
  const auto policy = CorsPolicy::Parse(" https://a.example ,http://localhost:3000,");
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(Allowed(*policy, "https://a.example"), "https://a.example");
  EXPECT_EQ(Allowed(*policy, "http://localhost:3000"), "http://localhost:3000");
  for (const char* other : {"", "https://a.example.evil", "http://a.example", "http://localhost:3001", "null", "*"}) {
    EXPECT_EQ(Allowed(*policy, other), "") << other;
  }
}

TEST(Cors, StarIsForAll) {
  const auto policy = CorsPolicy::Parse("*");
  ASSERT_TRUE(policy.ok());
  EXPECT_EQ(Allowed(*policy, "https://any.example"), "*");
  EXPECT_EQ(Allowed(*policy, ""), "") << "no page asked";
}

TEST(Cors, WhatIsNoOriginIsNamed) {
  for (const char* bad : {"a.example", "https://", "://a", "https://a.example/", "https://a b", "https://a?x"}) {
    const auto policy = CorsPolicy::Parse(bad);
    ASSERT_FALSE(policy.ok()) << bad;
    EXPECT_NE(policy.status().message().find(bad), std::string::npos);
  }
}

}  // namespace
}  // namespace loupe
