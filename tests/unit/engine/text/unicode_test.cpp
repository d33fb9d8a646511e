#include "engine/text/unicode.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <string>

#include "nlohmann/json.hpp"

namespace loupe {
namespace {

std::string Repair(std::string_view bytes, size_t chunk) {
  Utf8Repair repair;
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += chunk) repair.Push(bytes.substr(i, chunk), &out);
  repair.Finish(&out);
  return out;
}

std::string FromHex(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i < hex.size(); i += 2) out.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return out;
}

TEST(Unicode, RepairsBytesAsPythonDoes) {
  std::ifstream file("tests/golden/tokenizer/utf8_replace.jsonl");
  ASSERT_TRUE(file) << "run from the repository root; tests/reference/make_tokenizer_goldens.py writes the file";
  int count = 0;
  for (std::string line; std::getline(file, line); ++count) {
    const auto row = nlohmann::json::parse(line);
    const std::string bytes = FromHex(row[0]);
    for (const size_t chunk : {size_t{1}, size_t{2}, bytes.size()}) {
      ASSERT_EQ(Repair(bytes, chunk), row[1].get<std::string>()) << row[0] << " in chunks of " << chunk;
    }
  }
  EXPECT_EQ(count, 1432);
}

TEST(Unicode, CharactersSurviveDecodingAndEncoding) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    std::string utf8;
    AppendUtf8(c, &utf8);
    char32_t back = 0;
    const int bytes = DecodeUtf8(utf8, &back);
    if (c >= 0xD800 && c < 0xE000) {
      ASSERT_EQ(bytes, 0) << "surrogate " << static_cast<uint32_t>(c);
      continue;
    }
    ASSERT_EQ(bytes, static_cast<int>(utf8.size())) << static_cast<uint32_t>(c);
    ASSERT_EQ(back, c);
    ASSERT_EQ(DecodeUtf8(std::string_view(utf8).substr(0, utf8.size() - 1), &back), 0);
  }
}

TEST(Unicode, Classes) {
  const std::pair<const char*, CharClass> cases[] = {
      {"a", CharClass::kLetter},          {"Z", CharClass::kLetter},     {"0", CharClass::kNumber},
      {" ", CharClass::kSpace},           {"\t", CharClass::kSpace},     {"\v", CharClass::kSpace},
      {"\f", CharClass::kSpace},          {"\n", CharClass::kNewline},   {"\r", CharClass::kNewline},
      {"\x1c", CharClass::kOther},        {"_", CharClass::kOther},      {"@", CharClass::kOther},
      {"[", CharClass::kOther},           {"`", CharClass::kOther},      {"{", CharClass::kOther},
      {"\x7f", CharClass::kOther},        {"\u0085", CharClass::kSpace}, {"\u00a0", CharClass::kSpace},
      {"\u3000", CharClass::kSpace},      {"\u2028", CharClass::kSpace}, {"\u200b", CharClass::kOther},
      {"\u180e", CharClass::kOther},      {"é", CharClass::kLetter},     {"ª", CharClass::kLetter},
      {"字", CharClass::kLetter},         {"\u0301", CharClass::kOther}, {"½", CharClass::kNumber},
      {"Ⅻ", CharClass::kNumber},          {"٣", CharClass::kNumber},     {"\U0001D7D8", CharClass::kNumber},
      {"\U00020000", CharClass::kLetter}, {"😀", CharClass::kOther},      {"\U0010FFFF", CharClass::kOther},
      {"\xFF", CharClass::kOther},        {"\xC3", CharClass::kOther},   {"\xED\xA0\x80", CharClass::kOther}};
  for (const auto& [text, cls] : cases) EXPECT_EQ(ReadChar(text, 0).cls, cls) << text;
  EXPECT_EQ(ReadChar("\xED\xA0\x80", 0).bytes, 1);
  EXPECT_EQ(ReadChar("\U00020000", 0).bytes, 4);
}

TEST(Unicode, Composes) {
  std::string out = "untouched";
  EXPECT_FALSE(NormaliseNfc("plain, naïve façade", &out));
  EXPECT_EQ(out, "untouched");
  ASSERT_TRUE(NormaliseNfc("e\u0301 a\u0307\u0323 \u212b", &out));
  EXPECT_EQ(out, "é ạ\u0307 Å");
  ASSERT_TRUE(NormaliseNfc("e\xFF\u0301", &out));
  EXPECT_EQ(out, "e\xFF\u0301");
}

// ICU orders marks by insertion; unsorted runs must not reach it.
TEST(Unicode, ComposesHostileRunsInLinearTime) {
  for (const std::string unit : {"\u0301\u0323", "\u0f73", "\u0344\u0323", "\u09c7\u09be", "\u1161", "\u0323"}) {
    std::string text = "a", out;
    while (text.size() < 1'000'000) text += unit;
    const auto start = std::chrono::steady_clock::now();
    ASSERT_TRUE(NormaliseNfc(text, &out));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_LT(seconds, 5) << "a run of " << unit;  // a quadratic run takes minutes
    EXPECT_GT(out.size(), text.size() / 2);
  }
  // A run that is long enough to be sorted here composes to what ICU alone makes of it.
  std::string marks = "a", expected = "ạ", out;
  for (int i = 0; i < 40; ++i) marks += "\u0301\u0323";
  for (int i = 0; i < 39; ++i) expected += "\u0323";
  for (int i = 0; i < 40; ++i) expected += "\u0301";
  ASSERT_TRUE(NormaliseNfc(marks, &out));
  EXPECT_EQ(out, expected);
}

}  // namespace
}  // namespace loupe
