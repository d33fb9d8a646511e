// Which texts a grammar takes, byte by byte, and which tokens it allows: against std::regex, against walks over every token
// by itself, and by lists of texts.
#include "engine/grammar/grammar.h"

#include <gtest/gtest.h>

#include <random>
#include <regex>

#include "tests/unit/engine/grammar/byte_tokenizer.h"

namespace loupe::testing {
namespace {

using Kind = GrammarSpec::Kind;

const ByteTokenizer& Tokens() {
  static const ByteTokenizer tokens({"ab", "abc", "\"a", "\":", "\", \"", "  ", "\n  ", "true", "tr", "}}", "{\"", "é", "\xC3", "日本", "12", "345",
                                     "a\\", "\\n", "\\u00", "hello world", " the"});
  return tokens;
}
const grammar::TokenTrie& Trie() {
  static const grammar::TokenTrie trie(Tokens(), Tokens().vocab_size());
  return trie;
}

absl::StatusOr<std::shared_ptr<Grammar>> Compile(Kind kind, const std::string& text, std::vector<std::string> choices = {}) {
  return Grammar::Compile({kind, text, std::move(choices)}, Trie());
}
std::shared_ptr<Grammar> Made(Kind kind, const std::string& text, std::vector<std::string> choices = {}) {
  auto grammar = Compile(kind, text, std::move(choices));
  EXPECT_TRUE(grammar.ok()) << text << ": " << grammar.status();
  return grammar.ok() ? *grammar : nullptr;
}

// How many bytes of the text are a beginning of what the grammar allows, and whether all of it may be the end.
std::pair<size_t, bool> Read(const std::shared_ptr<Grammar>& grammar, const std::string& text) {
  GrammarMatcher matcher(grammar);
  for (size_t i = 0; i < text.size(); ++i) {
    if (!matcher.Accept(text.substr(i, 1)).ok()) return {i, false};
  }
  return {text.size(), matcher.accepts()};
}
bool Takes(const std::shared_ptr<Grammar>& grammar, const std::string& text) { return Read(grammar, text).second; }

// The mask holds a token if, and only if, its bytes can be read.
void ExpectMaskIsRight(GrammarMatcher matcher, const std::string& where) {
  std::vector<uint32_t> mask(Trie().mask_words());
  ASSERT_TRUE(matcher.FillMask(mask.data()).ok());
  for (int32_t id = 0; id < Tokens().vocab_size(); ++id) {
    GrammarMatcher next = matcher;
    const bool expected = id == 0 ? matcher.accepts() : id > 1 && next.Accept(Tokens().TokenBytes(id)).ok();
    ASSERT_EQ(grammar::HasToken(mask.data(), id), expected) << where << ": token '" << Tokens().TokenBytes(id) << "'";
  }
}

TEST(Grammar, RegexesAgreeWithTheLibrary) {
  const char* patterns[] = {"a", "ab|c", "(ab)*c", "a{2,4}b?", "[a-c]+[^a-c]", "(a|b){3}", "x(yz|y)*z", "(?:ab|a)(bc|c)", "a*b*c*", "[ab]{0,3}c{2}",
                            "(a+b+){1,2}", "(a*)*b", "\\d{2}-\\d\\w", "a.c", "()a", "(a|)b", "((a{1,2}){1,2}){1,2}"};
  std::mt19937 random(5);
  for (const char* pattern : patterns) {
    const auto grammar = Made(Kind::kRegex, pattern);
    const std::regex oracle(pattern);
    for (int i = 0; i < 3000; ++i) {
      std::string text;
      for (size_t n = random() % 9; n > 0; --n) text += "abcxyz01-d"[random() % 10];
      EXPECT_EQ(Takes(grammar, text), std::regex_match(text, oracle)) << pattern << " on '" << text << "'";
    }
  }
}

TEST(Grammar, RegexesOfUnicode) {
  EXPECT_TRUE(Takes(Made(Kind::kRegex, "[à-ü]+"), "éô"));
  EXPECT_FALSE(Takes(Made(Kind::kRegex, "[à-ü]+"), "e"));
  EXPECT_TRUE(Takes(Made(Kind::kRegex, "\\p{L}{3}"), "aя日"));
  EXPECT_FALSE(Takes(Made(Kind::kRegex, "\\p{L}"), "1"));
  EXPECT_TRUE(Takes(Made(Kind::kRegex, "\\S\\s\\S"), "é 日"));
  EXPECT_TRUE(Takes(Made(Kind::kRegex, ".{2}"), "😀é"));
  EXPECT_FALSE(Takes(Made(Kind::kRegex, "."), "\n"));
  EXPECT_TRUE(Takes(Made(Kind::kRegex, "\\u00e9\\x41\\u{1F600}"), "éA😀"));
  // What is no UTF-8 is never a beginning: surrogates, overlong forms, beyond the last character.
  const auto any = Made(Kind::kRegex, "[^]*");
  for (const char* bad : {"\xED\xA0\x80", "\xC0\xAF", "\xE0\x80\x80", "\xF4\x90\x80\x80", "\xF8", "\x80"}) EXPECT_LT(Read(any, bad).first, std::string(bad).size());
}

TEST(Grammar, RegexesThatAreRefusedSayWhy) {
  const std::pair<const char*, const char*> cases[] = {
      {"(", "not closed"}, {")", "closes nothing"}, {"*a", "nothing to repeat"}, {"a{3,2}", "ends before"}, {"[a", "not closed"}, {"[b-a]", "ends before"},
      {"(?=a)", "look-around"}, {"(?i)a", "flags"}, {"\\1", "back references"}, {"a\\b", "\\b is not offered"}, {"a^b", "ends of an expression"},
      {"a{70000}", "65536"}, {"\\p{Nonsense}", "no set"}, {"a\\", "backslash"}, {"[]", "no text"}, {"\\q", "not known"}, {"a++", "possessive"}, {"a{2}{3}", "needs a group"},
      {"((a{0,60000}){0,60000}){0,60000}", "more than"}, {"\\ud800", "surrogate"}};
  for (const auto& [pattern, why] : cases) {
    const auto grammar = Compile(Kind::kRegex, pattern);
    ASSERT_FALSE(grammar.ok()) << pattern;
    EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(grammar.status().message().find(why), std::string::npos) << pattern << ": " << grammar.status();
  }
}

TEST(Grammar, MasksHoldWhatCanBeRead) {
  const std::pair<GrammarSpec, const char*> cases[] = {
      {{Kind::kJsonObject, "", {}}, R"({"a": [1, {"b\n": "é日 the \u00e9"}, true, null, -1.5e3], "c": {}})"},
      {{Kind::kRegex, "(ab|abc|hello world)+[^a]{2}é*", {}}, "abcabhello world12éé"},
      {{Kind::kChoice, "", {"true", "tr", "abcabc", "é"}}, "abcabc"},
      {{Kind::kJsonSchema, R"({"type": "object", "properties": {"ab": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 12}},
        "required": ["n"]})", {}}, R"({"ab": "a日é", "n": 345})"}};
  for (const auto& [spec, text] : cases) {
    auto grammar = Grammar::Compile(spec, Trie());
    ASSERT_TRUE(grammar.ok()) << grammar.status();
    GrammarMatcher matcher(*grammar);
    ExpectMaskIsRight(matcher, "start");
    for (size_t i = 0; i < std::string(text).size(); ++i) {
      ASSERT_TRUE(matcher.Accept(std::string(text).substr(i, 1)).ok()) << text << " at " << i;
      ExpectMaskIsRight(matcher, std::string(text).substr(0, i + 1));
    }
    EXPECT_TRUE(matcher.accepts());
  }
}

TEST(Grammar, ForcedBytesAndTheEnd) {
  GrammarMatcher matcher(Made(Kind::kRegex, "(yes|you) sir!"));
  EXPECT_EQ(matcher.ForcedBytes(100), "y");
  ASSERT_TRUE(matcher.Accept("ye").ok());
  EXPECT_EQ(matcher.ForcedBytes(100), "s sir!");
  EXPECT_EQ(matcher.ForcedBytes(3), "s s");
  ASSERT_TRUE(matcher.Accept("s sir!").ok());
  EXPECT_TRUE(matcher.complete());
  EXPECT_FALSE(matcher.Accept("x").ok());
  EXPECT_TRUE(matcher.complete()) << "what is refused leaves it where it was";
  GrammarMatcher open(Made(Kind::kRegex, "a+"));
  ASSERT_TRUE(open.Accept("a").ok());
  EXPECT_TRUE(open.accepts());
  EXPECT_FALSE(open.complete());
}

// Nesting without end makes ever new states: the automaton is thrown away and goes on where it was.
TEST(Grammar, DeepNestingGoesOnInANewAutomaton) {
  const auto grammar = Made(Kind::kJsonObject, "");
  GrammarMatcher matcher(grammar), idle(grammar);
  ASSERT_TRUE(matcher.Accept("{\"a\": ").ok());
  ASSERT_TRUE(idle.Accept("{\"a\": [").ok());
  std::vector<uint32_t> mask(Trie().mask_words());
  int64_t most = 0;
  constexpr int kDepth = 30'000;
  for (int i = 0; i < kDepth; ++i) {
    ASSERT_TRUE(matcher.Accept("[").ok());
    if (i % 16 == 0) ASSERT_TRUE(matcher.FillMask(mask.data()).ok());
    most = std::max(most, grammar->bytes());
  }
  EXPECT_LT(most, 24 << 20);
  for (int i = 0; i < kDepth; ++i) ASSERT_TRUE(matcher.Accept("]").ok());
  EXPECT_FALSE(matcher.accepts());
  ASSERT_TRUE(matcher.Accept("}").ok());
  EXPECT_TRUE(matcher.complete());
  ASSERT_TRUE(idle.Accept("]}").ok());
  EXPECT_TRUE(idle.complete());
}

TEST(Grammar, ExplodingAutomataEndTheirOwnSample) {
  // Deterministic, this has 2^n states, and each has thousands of positions.
  const auto grammar = Compile(Kind::kRegex, "([ab]*a[ab]{2000}c|[ab]*b[ab]{1999}d)");
  absl::Status status = grammar.status();
  if (grammar.ok()) {
    GrammarMatcher matcher(*grammar);
    std::vector<uint32_t> mask(Trie().mask_words());
    std::mt19937 random(1);
    for (int i = 0; i < 3000 && status.ok(); ++i) {
      status = matcher.FillMask(mask.data());
      if (status.ok()) status = matcher.Accept(random() % 2 ? "a" : "b");
    }
  }
  std::printf("%s\n", std::string(status.message()).c_str());
  EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status)) << status;
}

TEST(GrammarCompiler, RemembersAndForgets) {
  GrammarCompiler compiler(Tokens(), Tokens().vocab_size());
  const auto first = compiler.Compile({Kind::kRegex, "a+", {}});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(compiler.Compile({Kind::kRegex, "a+", {}}).value(), *first);
  EXPECT_NE(compiler.Compile({Kind::kChoice, "", {"a+"}}).value(), *first);
  for (size_t i = 0; i < GrammarCompiler::kMaxGrammars; ++i) ASSERT_TRUE(compiler.Compile({Kind::kRegex, "b{" + std::to_string(i) + "}", {}}).ok());
  EXPECT_NE(compiler.Compile({Kind::kRegex, "a+", {}}).value(), *first);
  const auto cancelled = compiler.Compile({Kind::kRegex, "c", {}}, [] { return true; });
  EXPECT_TRUE(absl::IsCancelled(cancelled.status()));
}

}  // namespace
}  // namespace loupe::testing
