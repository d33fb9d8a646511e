#include "engine/text/tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "engine/load/gguf_model.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/text/small_vocabulary.h"

namespace loupe {
namespace {

using Ids = std::vector<int32_t>;

Vocabulary DefaultVocabulary() {
  const char* given = std::getenv("LOUPE_TEST_MODEL");
  const std::string path = given != nullptr ? given : "models/SmolLM2-135M-Instruct.Q4_1.gguf";
  auto file = MappedFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status()
                         << "; fetch the default model with ./deploy/quickstart.sh --once, or set LOUPE_TEST_MODEL";
  if (!file.ok()) return {};
  auto gguf = Gguf::Parse((*file)->bytes());
  EXPECT_TRUE(gguf.ok()) << gguf.status();
  auto vocabulary = ReadVocabulary(*gguf);
  EXPECT_TRUE(vocabulary.ok()) << vocabulary.status();
  return *std::move(vocabulary);
}

std::unique_ptr<Tokenizer> Make(Vocabulary vocabulary) {
  auto tokenizer = MakeTokenizer(std::move(vocabulary));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

TEST(Tokenizer, EqualsTheReference) {
  const char* names[] = {"smollm", "gpt2", "llama-bpe", "qwen2"};
  const Vocabulary vocabulary = DefaultVocabulary();
  ASSERT_EQ(vocabulary.tokens.size(), 49152u);
  std::vector<std::unique_ptr<Tokenizer>> tokenizers;
  for (const char* name : names) {
    Vocabulary variant = vocabulary;
    variant.pre_tokenizer = name;
    tokenizers.push_back(Make(std::move(variant)));
    ASSERT_NE(tokenizers.back(), nullptr);
  }
  std::ifstream file("tests/golden/tokenizer/encodings.jsonl");
  ASSERT_TRUE(file) << "run from the repository root; tests/reference/make_tokenizer_goldens.py writes the file";
  int count = 0, wrong = 0;
  for (std::string line; std::getline(file, line); ++count) {
    const auto row = nlohmann::json::parse(line);
    const std::string text = row[0];
    std::vector<Ids> expected;
    for (size_t i = 0; i < tokenizers.size(); ++i) {
      const auto& ids = row[i + 2];
      expected.push_back(ids.is_array() ? ids.get<Ids>() : expected.at(ids.get<size_t>()));
      // Twice: the second time words come from what the first one remembered.
      for (int repeat = 0; repeat < 2; ++repeat) {
        const Ids got = tokenizers[i]->Encode(text, true, row[1].get<int>() == 1);
        if (got == expected.back()) continue;
        EXPECT_EQ(got, expected.back()) << names[i] << ", case " << count << ": " << row[0];
        if (++wrong > 20) FAIL() << "and perhaps more";
      }
    }
  }
  EXPECT_EQ(count, 2420);
}

TEST(Tokenizer, DefaultModelRoundTrip) {
  const auto tokenizer = Make(DefaultVocabulary());
  ASSERT_NE(tokenizer, nullptr);
  const std::string text = "def f(x):\n\treturn \"naïve 字 👩‍🚀\"  # 3.14\r\n";
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(text, false, false)), text);
  const Ids chat = tokenizer->Encode("<|im_start|>user\nhi<|im_end|>", true, true);
  EXPECT_EQ(chat, (Ids{1, 4093, 198, 6004, 2}));
  EXPECT_EQ(tokenizer->Decode(chat), "user\nhi");
  EXPECT_EQ(tokenizer->Decode(chat, false), "<|im_start|>user\nhi<|im_end|>");
  EXPECT_TRUE(tokenizer->IsControl(2));
  EXPECT_TRUE(tokenizer->IsEndOfGeneration(2));
  EXPECT_FALSE(tokenizer->IsEndOfGeneration(4093));
  EXPECT_EQ(tokenizer->vocab_size(), 49152);
  EXPECT_EQ(tokenizer->eos(), 2);
  EXPECT_FALSE(tokenizer->add_bos());
}

Vocabulary WithAddedTokens() {
  Vocabulary vocabulary = SmallVocabulary("gpt2", "ab ", 30, 7);
  vocabulary.bos = AddToken(&vocabulary, "<s>", TokenKind::kControl);
  vocabulary.eos = AddToken(&vocabulary, "</s>", TokenKind::kControl);
  AddToken(&vocabulary, "<s>>", TokenKind::kControl);
  AddToken(&vocabulary, "<tool>", TokenKind::kUserDefined);
  AddToken(&vocabulary, "  ", TokenKind::kUserDefined);
  AddToken(&vocabulary, "[PAD]", TokenKind::kUnused);
  return vocabulary;
}

TEST(Tokenizer, AddedTokensLeftmostLongest) {
  Vocabulary vocabulary = WithAddedTokens();
  const int32_t s = vocabulary.bos, end = s + 1, longer = s + 2, tool = s + 3, two_spaces = s + 4, unused = s + 5;
  vocabulary.add_bos = vocabulary.add_eos = true;
  const auto tokenizer = Make(vocabulary);
  EXPECT_EQ(tokenizer->Encode("<s>>z<s>", false, true), (Ids{longer, 'z', s}));
  EXPECT_EQ(tokenizer->Encode("<<s><s", false, true), (Ids{'<', s, '<', 's'}));
  EXPECT_EQ(tokenizer->Encode("<s><tool>x", false, false), (Ids{'<', 's', '>', tool, 'x'}));
  EXPECT_EQ(tokenizer->Encode("   z", false, false), (Ids{two_spaces, ' ', 'z'}));
  EXPECT_EQ(tokenizer->Encode("", true, false), (Ids{s, end}));
  EXPECT_EQ(tokenizer->Encode("<s>z", true, true), (Ids{s, 'z', end}));  // not a second BOS
  EXPECT_EQ(tokenizer->Encode("<s>z", true, false), (Ids{s, '<', 's', '>', 'z', end}));
  EXPECT_EQ(tokenizer->Encode("", false, false), Ids{});
  EXPECT_EQ(tokenizer->Encode("[PAD]", false, true).size(), 5u);
  EXPECT_EQ(tokenizer->TokenBytes(unused), "");
  EXPECT_EQ(tokenizer->TokenBytes(s), "<s>");
  EXPECT_EQ(tokenizer->TokenBytes(tool), "<tool>");
  EXPECT_EQ(tokenizer->Piece(' '), "Ġ");
  EXPECT_EQ(tokenizer->TokenBytes(' '), " ");
  EXPECT_TRUE(tokenizer->IsEndOfGeneration(end));
}

TEST(Tokenizer, MergesNeverMakeAControlToken) {
  Vocabulary vocabulary = SmallVocabulary("llama-bpe", "a", 0, 1);
  const int32_t control = AddToken(&vocabulary, "xy", TokenKind::kControl);
  vocabulary.merges = {"x y"};
  const auto tokenizer = Make(vocabulary);
  EXPECT_EQ(tokenizer->Encode("xy", false, false), (Ids{'x', 'y'}));
  EXPECT_EQ(tokenizer->Encode("xy", false, true), (Ids{control}));
}

TEST(Tokenizer, InvalidBytesStayBytes) {
  const auto tokenizer = Make(SmallVocabulary("qwen2", "ab", 20, 2));
  std::string all;
  for (int b = 0; b < 256; ++b) all.push_back(static_cast<char>(b));
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(all, false, true)), all);
}

TEST(Tokenizer, RefusesWhatItCannotUse) {
  struct Case {
    const char* says;
    void (*damage)(Vocabulary*);
  };
  const Case cases[] = {
      {"\"llama\" is not supported", [](Vocabulary* v) { v->model = "llama"; }},
      {"supported are gpt2, smollm, llama-bpe, qwen2", [](Vocabulary* v) { v->pre_tokenizer = "tekken"; }},
      {"0 tokens", [](Vocabulary* v) { v->tokens.clear(); }},
      {"token kinds", [](Vocabulary* v) { v->kinds.pop_back(); }},
      {"bos token id is 100000", [](Vocabulary* v) { v->bos = 100000; }},
      {"eos token id is -2", [](Vocabulary* v) { v->eos = -2; }},
      {"pad token id", [](Vocabulary* v) { v->pad = static_cast<int32_t>(v->tokens.size()); }},
      {"end-of-generation token id is -1", [](Vocabulary* v) { v->end_of_generation = {-1}; }},
      {"no token", [](Vocabulary* v) { v->merges.push_back("a \xFF"); }},
      {"added token 3 has 1025 bytes, the limit is 1024",
       [](Vocabulary* v) {
         v->tokens[3] = std::string(1025, 'x');
         v->kinds[3] = TokenKind::kControl;
       }},
  };
  for (const Case& c : cases) {
    Vocabulary vocabulary = WithAddedTokens();
    c.damage(&vocabulary);
    const auto tokenizer = MakeTokenizer(std::move(vocabulary));
    ASSERT_FALSE(tokenizer.ok()) << c.says;
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(tokenizer.status().message()).find(c.says), std::string::npos) << tokenizer.status();
  }
}

TEST(Tokenizer, ThreadsAgree) {
  const auto tokenizer = Make(SmallVocabulary("gpt2", "abc ", 300, 11));
  std::string text;
  std::mt19937 random(4);
  for (int i = 0; i < 20000; ++i) text.push_back("abc "[random() % 4]);
  std::vector<Ids> results(4);
  std::vector<std::thread> threads;
  for (Ids& result : results) threads.emplace_back([&] { result = tokenizer->Encode(text, false, false); });
  for (std::thread& thread : threads) thread.join();
  for (const Ids& result : results) EXPECT_EQ(result, results[0]);
  EXPECT_EQ(tokenizer->Encode(text, false, false), results[0]);
}

}  // namespace
}  // namespace loupe
