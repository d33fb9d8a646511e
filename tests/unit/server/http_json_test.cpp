#include "server/http_json.h"

#include "gtest/gtest.h"

namespace loupe {
namespace {

std::string ErrorOf(std::string_view text, JsonLimits limits = {}) {
  const auto json = ParseJson(text, limits);
  return json.ok() ? "" : std::string(json.status().message());
}

TEST(HttpJson, ReadsWhatTheLibraryReads) {
  const char* const texts[] = {"{}",
                               "[]",
                               "null",
                               "true",
                               "-12",
                               "1.5e3",
                               "\"\\u00e9\\ud83e\\udd8a\"",
                               "{\"a\":[1,{\"b\":null}],\"c\":\"x\"}",
                               "18446744073709551615",
                               " [1 , 2] "};
  for (const char* text : texts) {
    const auto json = ParseJson(text);
    ASSERT_TRUE(json.ok()) << text << ": " << json.status();
    EXPECT_EQ(*json, nlohmann::ordered_json::parse(text)) << text;
  }
}

TEST(HttpJson, KeepsTheOrderOfKeys) {
  const auto json = ParseJson(R"({"z":1,"a":2,"m":{"y":1,"b":2}})");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ(DumpJson(*json), R"({"z":1,"a":2,"m":{"y":1,"b":2}})");
}

TEST(HttpJson, RefusesWhatIsNoJson) {
  for (const char* text :
       {"", "{", "}", "[1,]", "{\"a\":}", "{'a':1}", "NaN", "[Infinity]", "{\"a\":-Infinity}", "01", "1 2", "\"\xff\"",
        "\"\xc0\x80\"", "\"\xed\xa0\x80\"", "\"\\ud800\"", "\"a\nb\"", "// x\n1", "tru", "\xef\xbb"}) {
    EXPECT_NE(ErrorOf(text), "") << text;
  }
}

TEST(HttpJson, SaysWhereAndWhat) {
  EXPECT_NE(ErrorOf("{\"a\": 1e999}").find("1e999"), std::string::npos) << ErrorOf("{\"a\": 1e999}");
  EXPECT_NE(ErrorOf("{\"a\":1,\"a\":2}").find("\"a\""), std::string::npos);
  for (const std::string& bad : {std::string("{\"a\": \"secret\x01"), std::string("{\"a\": \"secret\xff"), std::string("[\"secret\", x")}) {
    EXPECT_EQ(ErrorOf(bad).find("secret"), std::string::npos) << "quotes the text: " << ErrorOf(bad);
  }
  EXPECT_NE(ErrorOf("{\"a\": x}").find("byte"), std::string::npos) << ErrorOf("{\"a\": x}");
}

TEST(HttpJson, LimitsNesting) {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(ErrorOf(nested(64)), "");
  EXPECT_NE(ErrorOf(nested(65)).find("64"), std::string::npos);
  EXPECT_NE(ErrorOf(std::string(1'000'000, '[')), "");
}

TEST(HttpJson, LimitsKeysAndValues) {
  JsonLimits limits;
  limits.max_keys = 2;
  limits.max_values = 5;
  EXPECT_EQ(ErrorOf(R"({"a":1,"b":2})", limits), "");
  EXPECT_NE(ErrorOf(R"({"a":1,"b":2,"c":3})", limits).find("2 keys"), std::string::npos);
  EXPECT_EQ(ErrorOf("[1,2,3,4]", limits), "");
  EXPECT_NE(ErrorOf("[1,2,3,4,5]", limits).find("5 values"), std::string::npos);
}

TEST(HttpJson, SameKeyInDifferentObjectsIsFine) { EXPECT_EQ(ErrorOf(R"([{"a":{"a":1}},{"a":2}])"), ""); }

TEST(HttpJson, ReadsIntegersOfEverySpelling) {
  int64_t value = 0;
  EXPECT_TRUE(ReadInt64("n", 7, &value).ok() && value == 7);
  EXPECT_TRUE(ReadInt64("n", 7.0, &value).ok() && value == 7);
  EXPECT_TRUE(ReadInt64("n", -3, &value).ok() && value == -3);
  EXPECT_FALSE(ReadInt64("n", 7.5, &value).ok());
  EXPECT_FALSE(ReadInt64("n", 1e300, &value).ok());
  EXPECT_FALSE(ReadInt64("n", UINT64_MAX, &value).ok());
  EXPECT_FALSE(ReadInt64("n", "7", &value).ok());
  EXPECT_FALSE(ReadInt64("n", true, &value).ok());
  int small = 0;
  const absl::Status status = ReadInt("n", int64_t{1} << 40, &small);
  EXPECT_EQ(status.message(), "n: is 1099511627776, must fit 32 bits");
}

TEST(HttpJson, DumpReplacesBrokenText) { EXPECT_EQ(DumpJson("a\xff"), "\"a\xef\xbf\xbd\""); }

}  // namespace
}  // namespace loupe
