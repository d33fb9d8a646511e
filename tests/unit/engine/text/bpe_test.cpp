#include "engine/text/bpe.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/unit/engine/text/small_vocabulary.h"

namespace loupe {
namespace {

struct Made {
  Vocabulary vocabulary;
  std::vector<std::string> owned;
  std::unique_ptr<Bpe> bpe;
};

Made Make(Vocabulary vocabulary, bool whole_words = false) {
  Made made;
  made.vocabulary = std::move(vocabulary);
  for (const std::string& token : made.vocabulary.tokens) made.owned.push_back(DecodeByteAlphabet(token));
  auto bpe =
      Bpe::Make(made.vocabulary, std::vector<std::string_view>(made.owned.begin(), made.owned.end()), whole_words);
  EXPECT_TRUE(bpe.ok()) << bpe.status();
  made.bpe = *std::move(bpe);
  return made;
}

// Joins the best pair, leftmost first, until there is none; on strings, by a full scan each time.
std::vector<int32_t> Oracle(const Vocabulary& vocabulary, const std::string& word) {
  std::map<std::string, size_t> ranks;
  for (size_t i = 0; i < vocabulary.merges.size(); ++i) ranks.emplace(vocabulary.merges[i], i);
  std::vector<std::string> parts;
  for (const char c : word) parts.push_back(EncodeByteAlphabet(std::string(1, c)));
  while (true) {
    size_t best = ranks.size(), at = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto it = ranks.find(parts[i] + " " + parts[i + 1]);
      if (it != ranks.end() && it->second < best) {
        best = it->second;
        at = i;
      }
    }
    if (best == ranks.size()) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<ptrdiff_t>(at) + 1);
  }
  std::vector<int32_t> ids;
  for (const std::string& part : parts) {
    ids.push_back(static_cast<int32_t>(std::find(vocabulary.tokens.begin(), vocabulary.tokens.end(), part) -
                                       vocabulary.tokens.begin()));
  }
  return ids;
}

TEST(Bpe, AlphabetIsReversible) {
  std::string all;
  for (int b = 0; b < 256; ++b) all.push_back(static_cast<char>(b));
  EXPECT_EQ(DecodeByteAlphabet(EncodeByteAlphabet(all)), all);
  EXPECT_EQ(EncodeByteAlphabet(" a\n\xAD\xFF"), "ĠaĊŃÿ");
  EXPECT_EQ(DecodeByteAlphabet("two words"), "two words");  // a space is outside the alphabet
  EXPECT_EQ(DecodeByteAlphabet("\xFF"), "\xFF");
}

TEST(Bpe, EqualsTheNaiveForm) {
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    const Made made = Make(SmallVocabulary("gpt2", seed % 2 ? "ab" : "abc ", 60, seed));
    std::mt19937 random(seed);
    for (const int size : {1, 2, 7, 31, 47, 48, 49, 64, 131, 300}) {
      for (int repeat = 0; repeat < 12; ++repeat) {
        std::string word;
        for (int i = 0; i < size; ++i) word.push_back("abc z"[random() % (seed % 2 ? 2 : 5)]);
        std::vector<int32_t> ids;
        made.bpe->Encode(word, &ids);
        ASSERT_EQ(ids, Oracle(made.vocabulary, word)) << "seed " << seed << ", word '" << word << "'";
      }
    }
  }
}

TEST(Bpe, TiesGoLeft) {
  Vocabulary vocabulary = SmallVocabulary("gpt2", "a", 0, 1);
  const int32_t aa = AddToken(&vocabulary, "aa", TokenKind::kNormal);
  vocabulary.merges = {"a a"};
  const Made made = Make(vocabulary);
  for (const int size : {3, 49}) {  // the array and the heap
    std::vector<int32_t> ids, expected(size / 2, aa);
    expected.push_back('a');
    made.bpe->Encode(std::string(size, 'a'), &ids);
    EXPECT_EQ(ids, expected) << size;
  }
}

TEST(Bpe, WholeWordsOnlyWhenAsked) {
  Vocabulary vocabulary = SmallVocabulary("gpt2", "a", 0, 1);
  const int32_t abc = AddToken(&vocabulary, "abc", TokenKind::kNormal);  // no merges lead to it
  for (const bool whole_words : {false, true}) {
    const Made made = Make(vocabulary, whole_words);
    for (int repeat = 0; repeat < 3; ++repeat) {
      std::vector<int32_t> ids;
      made.bpe->Encode("abc", &ids);
      EXPECT_EQ(ids, whole_words ? (std::vector<int32_t>{abc}) : (std::vector<int32_t>{'a', 'b', 'c'}));
    }
  }
}

TEST(Bpe, BytesWithoutTokenVanishAndByteTokensStandIn) {
  Vocabulary vocabulary;
  const int32_t a = AddToken(&vocabulary, "a", TokenKind::kNormal);
  const int32_t b = AddToken(&vocabulary, "b", TokenKind::kNormal);
  const int32_t ab = AddToken(&vocabulary, "ab", TokenKind::kNormal);
  vocabulary.merges = {"a b"};
  const Made made = Make(vocabulary);
  std::vector<int32_t> ids;
  made.bpe->Encode(std::string("a\x04"
                               "bxb"),
                   &ids);
  EXPECT_EQ(ids, (std::vector<int32_t>{ab, b}));
  ids.clear();
  made.bpe->Encode("xyz", &ids);
  EXPECT_TRUE(ids.empty());
  EXPECT_EQ(a, 0);
}

TEST(Bpe, RefusesDamagedMerges) {
  for (const char* line : {"", " ", "ab", "a ", "a zz", "zz a", "a b"}) {
    Vocabulary vocabulary = SmallVocabulary("gpt2", "a", 0, 1);  // "ab" is no token
    vocabulary.merges = {line};
    const std::vector<std::string_view> bytes(vocabulary.tokens.begin(), vocabulary.tokens.end());
    const auto bpe = Bpe::Make(vocabulary, bytes, false);
    ASSERT_FALSE(bpe.ok()) << "'" << line << "'";
    EXPECT_EQ(bpe.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(bpe.status().message()).find("merge 0 of 1"), std::string::npos) << bpe.status();
  }
}

TEST(Bpe, LongWordsTakeLittleTime) {
  const Made made = Make(SmallVocabulary("gpt2", "ab", 200, 3));
  std::mt19937 random(5);
  for (const int letters : {1, 2}) {
    std::string word;
    for (int i = 0; i < 1'000'000; ++i) word.push_back(static_cast<char>('a' + random() % letters));
    std::vector<int32_t> ids;
    const auto start = std::chrono::steady_clock::now();
    made.bpe->Encode(word, &ids);
    EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 10);
    EXPECT_GT(ids.size(), word.size() / 12 - 1);
  }
}

}  // namespace
}  // namespace loupe
