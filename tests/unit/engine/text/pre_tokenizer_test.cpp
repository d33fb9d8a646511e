#include "engine/text/pre_tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

namespace loupe {
namespace {

std::vector<std::string> Split(PreTokenizer rule, const std::string& text) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = NextWord(rule, text, begin);
    if (end <= begin || end > text.size()) {
      ADD_FAILURE() << "word from " << begin << " to " << end << " of " << text.size();
      break;
    }
    words.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return words;
}

using Words = std::vector<std::string>;

TEST(PreTokenizer, Gpt2) {
  const auto split = [](const std::string& text) { return Split(PreTokenizer::kGpt2, text); };
  EXPECT_EQ(split("Hello, world!"), (Words{"Hello", ",", " world", "!"}));
  EXPECT_EQ(split("don't SHE'S we'll've"), (Words{"don", "'t", " SHE", "'", "S", " we", "'ll", "'ve"}));
  EXPECT_EQ(split("a  b   "), (Words{"a", " ", " b", "   "}));
  EXPECT_EQ(split("x 123 4a"), (Words{"x", " 123", " 4", "a"}));
  EXPECT_EQ(split("a\n\nb"), (Words{"a", "\n", "\n", "b"}));
  EXPECT_EQ(split(" \t!"), (Words{" ", "\t", "!"}));
  EXPECT_EQ(split("\u00a0\u00a0x"), (Words{"\u00a0", "\u00a0", "x"}));
  EXPECT_EQ(split("é\u0301字\xFF\xFE!"), (Words{"é", "\u0301", "字", "\xFF\xFE!"}));
  EXPECT_EQ(split("'"), (Words{"'"}));
  EXPECT_EQ(split(" '"), (Words{" '"}));
  EXPECT_EQ(split(" "), (Words{" "}));
}

TEST(PreTokenizer, SmolLmCutsDigitsOutFirst) {
  const auto split = [](const std::string& text) { return Split(PreTokenizer::kSmolLm, text); };
  EXPECT_EQ(split("x 123"), (Words{"x", " ", "1", "2", "3"}));
  EXPECT_EQ(split("a   7b"), (Words{"a", "   ", "7", "b"}));
  EXPECT_EQ(split("a   b"), (Words{"a", "  ", " b"}));
  EXPECT_EQ(split("½Ⅻ"), (Words{"½", "Ⅻ"}));
  EXPECT_EQ(split("'s1's"), (Words{"'s", "1", "'s"}));
}

TEST(PreTokenizer, LlamaAndQwen) {
  const auto split = [](const std::string& text) { return Split(PreTokenizer::kLlamaBpe, text); };
  EXPECT_EQ(split("SHE'S 'Re'x"), (Words{"SHE", "'S", " '", "Re", "'x"}));
  EXPECT_EQ(split("'\u017fx"), (Words{"'\u017f", "x"}));
  EXPECT_EQ(split("12345 67"), (Words{"123", "45", " ", "67"}));
  EXPECT_EQ(split("a!\r\n\nb"), (Words{"a", "!\r\n\n", "b"}));
  EXPECT_EQ(split("a \n \n  b"), (Words{"a", " \n \n", " ", " b"}));
  EXPECT_EQ(split("(x) \tx"), (Words{"(x", ")", " ", "\tx"}));
  EXPECT_EQ(split("\nx"), (Words{"\n", "x"}));
  EXPECT_EQ(split("a  1"), (Words{"a", " ", " ", "1"}));
  EXPECT_EQ(split("  "), (Words{"  "}));
  EXPECT_EQ(Split(PreTokenizer::kQwen2, "a123"), (Words{"a", "1", "2", "3"}));
}

TEST(PreTokenizer, Names) {
  EXPECT_EQ(FindPreTokenizer("smollm"), PreTokenizer::kSmolLm);
  EXPECT_EQ(FindPreTokenizer("gpt-2"), PreTokenizer::kGpt2);
  EXPECT_EQ(FindPreTokenizer("tekken"), std::nullopt);
  EXPECT_EQ(FindPreTokenizer(""), std::nullopt);
}

TEST(PreTokenizer, LongRunsTakeLinearTime) {
  for (const std::string unit :
       {" ", "\n", "a", "7", "=", "'", " \n", "\n ", "\u00a0", "é", "\xFF", "a ", " 1", "'s"}) {
    std::string text;
    while (text.size() < 200'000) text += unit;
    for (const PreTokenizer rule :
         {PreTokenizer::kGpt2, PreTokenizer::kSmolLm, PreTokenizer::kLlamaBpe, PreTokenizer::kQwen2}) {
      for (const char* last : {"", "x", "1"}) {
        const auto start = std::chrono::steady_clock::now();
        size_t pos = 0;
        for (const std::string whole = text + last; pos < whole.size();) pos = NextWord(rule, whole, pos);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        EXPECT_LT(seconds, 1) << "a run of '" << unit << "' under rule " << static_cast<int>(rule);
      }
    }
  }
}

}  // namespace
}  // namespace loupe
