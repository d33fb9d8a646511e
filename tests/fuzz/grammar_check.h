// What must hold of any grammar, whoever wrote it: it compiles or is refused in words, in time; what it forces may come; the
// bytes of an allowed token can be read, those of a forbidden one cannot. Aborts if it does not.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "engine/grammar/grammar.h"
#include "engine/text/unicode.h"
#include "tests/unit/engine/grammar/byte_tokenizer.h"

namespace loupe {

inline void Broken(const char* what, const std::string& detail) {
  std::fprintf(stderr, "%s: %s\n", what, detail.c_str());
  std::abort();
}

inline void CheckGrammar(const GrammarSpec& spec) {
  static const testing::ByteTokenizer tokens({"ab", "{\"", "\": ", "true", "\xC3\xA9", "  ", "0123", "}]"});
  static const grammar::TokenTrie trie(tokens, tokens.vocab_size());
  grammar::CompileLimits limits;
  limits.max_time = std::chrono::seconds(5);  // the sanitizers are slow
  const auto compiled = Grammar::Compile(spec, trie, limits);
  if (!compiled.ok()) {
    if (!absl::IsInvalidArgument(compiled.status()) || compiled.status().message().empty()) Broken("status", compiled.status().ToString());
    return;
  }
  GrammarMatcher matcher(*compiled);
  std::mt19937 random(7);
  std::vector<uint32_t> mask(trie.mask_words());
  Utf8Repair repair;
  std::string text, repaired;
  for (int step = 0; step < 24 && !matcher.complete(); ++step) {
    if (!matcher.FillMask(mask.data()).ok()) return;  // too much work: that sample's end
    const std::string forced = matcher.ForcedBytes(64);
    GrammarMatcher after = matcher;
    if (!forced.empty() && !after.Accept(forced).ok()) Broken("forced bytes may not come", forced);
    std::vector<int32_t> allowed;
    for (int32_t id = 2; id < tokens.vocab_size(); ++id) {
      GrammarMatcher next = matcher;
      const absl::Status read = next.Accept(tokens.TokenBytes(id));
      if (absl::IsInvalidArgument(read)) return;
      if (read.ok() != grammar::HasToken(mask.data(), id)) Broken("mask and reading disagree", std::string(tokens.TokenBytes(id)));
      if (read.ok()) allowed.push_back(id);
    }
    if (grammar::HasToken(mask.data(), 0) != matcher.accepts()) Broken("the end", text);
    if (allowed.empty()) Broken("a dead end", text);
    const int32_t id = allowed[random() % allowed.size()];
    if (!matcher.Accept(tokens.TokenBytes(id)).ok()) Broken("an allowed token cannot be read", text);
    text += tokens.TokenBytes(id);
  }
  repair.Push(text, &repaired);
  if (text.compare(0, repaired.size(), repaired) != 0) Broken("a text is no UTF-8", text);
}

}  // namespace loupe
