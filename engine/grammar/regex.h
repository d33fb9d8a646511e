// Regular expressions, the part of them that is a finite machine: characters, classes, groups, alternatives, repetitions.
// What is not (back references, look-around), and what would be guessed at (flags), is refused by name.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/grammar/char_set.h"
#include "engine/grammar/nfa.h"

namespace loupe::grammar {

inline constexpr int kMaxRepeat = 65'536;   // of {m,n}
inline constexpr int kMaxRegexDepth = 100;  // groups inside groups
inline constexpr size_t kMaxRegexBytes = 16'384;

struct RegexNode {
  enum class Kind { kSet, kConcat, kAlternate, kRepeat, kLineStart, kLineEnd };
  Kind kind = Kind::kConcat;
  CharSet set;
  std::vector<std::unique_ptr<RegexNode>> children;
  int min = 0, max = -1;  // kRepeat; -1: without end
};

// Refusal names the byte at which the expression goes wrong.
std::unique_ptr<RegexNode> ParseRegex(std::string_view pattern);

enum class RegexMatch {
  kWhole,   // the expression is the whole text; ^ and $ at its ends say nothing
  kSearch,  // it is found somewhere in the text, as JSON Schema means it, unless ^ or $ hold it
};

// Texts that match lead from `from` to `to`.
void AddRegex(NfaBuilder& nfa, StateId from, const RegexNode& root, StateId to, Spelling spelling, RegexMatch match);

}  // namespace loupe::grammar
