// Small byte-level vocabularies for tests and fuzzers: all 256 bytes, random merges over a few letters, and added
// tokens.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/text/bpe.h"
#include "engine/text/tokenizer.h"

namespace loupe {

inline int32_t AddToken(Vocabulary* vocabulary, std::string text, TokenKind kind) {
  vocabulary->tokens.push_back(std::move(text));
  vocabulary->kinds.push_back(kind);
  return static_cast<int32_t>(vocabulary->tokens.size()) - 1;
}

// Ids 0 to 255 are the bytes. Merges join random tokens that only have bytes of `letters`, up to 12 bytes.
inline Vocabulary SmallVocabulary(const std::string& pre_tokenizer, const std::string& letters, int num_merges,
                                  uint32_t seed) {
  Vocabulary vocabulary;
  vocabulary.model = "gpt2";
  vocabulary.pre_tokenizer = pre_tokenizer;
  for (int b = 0; b < 256; ++b) {
    AddToken(&vocabulary, EncodeByteAlphabet(std::string(1, static_cast<char>(b))), TokenKind::kNormal);
  }
  std::vector<std::string> parts;
  for (const char c : letters) parts.push_back(EncodeByteAlphabet(std::string(1, c)));
  std::unordered_set<std::string> merges, tokens(vocabulary.tokens.begin(), vocabulary.tokens.end());
  std::mt19937 random(seed);
  for (int tries = 0; static_cast<int>(vocabulary.merges.size()) < num_merges && tries < 100 * num_merges; ++tries) {
    const std::string left = parts[random() % parts.size()];
    const std::string right = parts[random() % parts.size()];
    if (left.size() + right.size() > 12 || !merges.insert(left + " " + right).second) continue;
    vocabulary.merges.push_back(left + " " + right);
    // Two merges may make the same token, as in real vocabularies.
    if (!tokens.insert(left + right).second) continue;
    AddToken(&vocabulary, left + right, TokenKind::kNormal);
    parts.push_back(left + right);
  }
  return vocabulary;
}

}  // namespace loupe
