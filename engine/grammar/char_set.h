// Sets of characters, and how one character of a set is written in bytes: as UTF-8, or as it stands inside a JSON string.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "engine/grammar/nfa.h"

namespace loupe::grammar {

inline constexpr char32_t kLastCharacter = 0x10FFFF;

// Characters as ranges, sorted and apart. Surrogates are never part of a set.
class CharSet {
 public:
  using Range = std::pair<char32_t, char32_t>;  // inclusive

  CharSet() = default;
  explicit CharSet(std::vector<Range> ranges);
  static CharSet Any() { return CharSet({{0, kLastCharacter}}); }
  // The characters that an ICU pattern such as "[\\p{L}]" names. Refusal if it names none that ICU knows.
  static CharSet OfPattern(const std::string& pattern);

  void Add(char32_t low, char32_t high);
  void Add(const CharSet& other);
  CharSet Complement() const;
  CharSet Without(const CharSet& other) const;
  CharSet Intersect(const CharSet& other) const;
  bool Contains(char32_t c) const;
  bool empty() const { return ranges_.empty(); }
  const std::vector<Range>& ranges() const { return ranges_; }

 private:
  void Normalise();
  std::vector<Range> ranges_;
};

enum class Spelling {
  kPlain,       // UTF-8
  kJsonString,  // inside a JSON string, each character in its one shortest form
};

// One character of the set leads from `from` to `to`.
void AddCharacter(NfaBuilder& nfa, StateId from, const CharSet& set, StateId to, Spelling spelling);
// The text as it stands inside a JSON string, character by character as AddCharacter spells them.
std::string SpellJson(std::string_view utf8);

}  // namespace loupe::grammar
