#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/grammar/regex.h"
#include "engine/text/unicode.h"

namespace loupe::grammar {
namespace {

using Node = RegexNode;
using NodePtr = std::unique_ptr<Node>;

NodePtr Make(Node::Kind kind) {
  auto node = std::make_unique<Node>();
  node->kind = kind;
  return node;
}
NodePtr MakeSet(CharSet set) {
  NodePtr node = Make(Node::Kind::kSet);
  node->set = std::move(set);
  return node;
}

// ECMAScript reads \d, \w and \s as ASCII (nearly), Python as Unicode. What both agree on is what is written here: the
// smaller set for \d, the complement of the larger one for \D.
CharSet ClassOf(char32_t letter) {
  static const CharSet digits({{'0', '9'}}), words({{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}), spaces({{'\t', '\r'}, {' ', ' '}});
  static const CharSet no_digits = CharSet::OfPattern("[\\p{Nd}]").Complement();
  static const CharSet no_words = CharSet::OfPattern("[\\p{L}\\p{M}\\p{N}\\p{Pc}]").Complement();
  static const CharSet no_spaces = CharSet::OfPattern("[\\p{White_Space}\\u001C-\\u001F\\uFEFF]").Complement();
  switch (letter) {
    case 'd': return digits;
    case 'w': return words;
    case 's': return spaces;
    case 'D': return no_digits;
    case 'W': return no_words;
    default: return no_spaces;
  }
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  NodePtr Parse() {
    if (text_.size() > kMaxRegexBytes) Fail(absl::StrCat("has ", text_.size(), " bytes, at most ", kMaxRegexBytes));
    NodePtr root = Alternatives(0);
    if (!AtEnd()) Fail("a ')' closes nothing");
    return root;
  }

 private:
  [[noreturn]] void Fail(const std::string& why) const { throw Refusal(absl::StrCat("at byte ", at_, " of the expression: ", why)); }
  bool AtEnd() const { return at_ >= text_.size(); }
  char Peek() const { return AtEnd() ? '\0' : text_[at_]; }
  bool Take(std::string_view what) {
    if (!text_.substr(at_).starts_with(what)) return false;
    at_ += what.size();
    return true;
  }
  char32_t Character() {
    char32_t c = 0;
    const int bytes = DecodeUtf8(text_.substr(at_), &c);
    if (bytes == 0) Fail(AtEnd() ? "ends too early" : "is not UTF-8");
    at_ += static_cast<size_t>(bytes);
    return c;
  }

  NodePtr Alternatives(int depth) {
    if (depth > kMaxRegexDepth) Fail(absl::StrCat("more than ", kMaxRegexDepth, " groups inside each other"));
    NodePtr all = Make(Node::Kind::kAlternate);
    do {
      all->children.push_back(Sequence(depth));
    } while (Take("|"));
    if (all->children.size() > 1) return all;
    NodePtr only = std::move(all->children.front());
    return only;
  }

  NodePtr Sequence(int depth) {
    NodePtr all = Make(Node::Kind::kConcat);
    while (!AtEnd() && Peek() != '|' && Peek() != ')') all->children.push_back(Repeated(depth));
    if (all->children.size() != 1) return all;
    NodePtr only = std::move(all->children.front());
    return only;
  }

  // An atom and its quantifiers.
  NodePtr Repeated(int depth) {
    NodePtr atom = Atom(depth);
    int min = 0, max = 0;
    if (Quantifier(&min, &max)) {
      if (atom->kind == Node::Kind::kLineStart || atom->kind == Node::Kind::kLineEnd) Fail("an anchor cannot be repeated");
      if (Take("+")) Fail("possessive repetitions are not offered");
      Take("?");  // a lazy one has the same texts
      NodePtr repeat = Make(Node::Kind::kRepeat);
      repeat->min = min, repeat->max = max;
      repeat->children.push_back(std::move(atom));
      atom = std::move(repeat);
      if (Peek() == '*' || Peek() == '+' || Peek() == '?' || Quantifier(&min, &max)) Fail("a repetition of a repetition needs a group");
    }
    return atom;
  }

  bool Quantifier(int* min, int* max) {
    if (Take("*")) return *min = 0, *max = -1, true;
    if (Take("+")) return *min = 1, *max = -1, true;
    if (Take("?")) return *min = 0, *max = 1, true;
    if (Peek() != '{') return false;
    const size_t begin = at_++;
    *min = Number();
    *max = *min;
    if (*min >= 0 && Take(",")) *max = Peek() == '}' ? -1 : Number();
    if (*min < 0 || !Take("}")) {
      at_ = begin;  // a brace like any other character
      return false;
    }
    if (*max >= 0 && *max < *min) Fail(absl::StrCat("{", *min, ",", *max, "} ends before it begins"));
    return true;
  }
  // -1: no digit.
  int Number() {
    if (Peek() < '0' || Peek() > '9') return -1;
    int64_t number = 0;
    while (Peek() >= '0' && Peek() <= '9') {
      number = number * 10 + (text_[at_++] - '0');
      if (number > kMaxRepeat) Fail(absl::StrCat("repeats more than ", kMaxRepeat, " times, which is the most"));
    }
    return static_cast<int>(number);
  }

  NodePtr Atom(int depth) {
    const char c = Peek();
    if (c == '*' || c == '+' || c == '?') Fail("nothing to repeat");
    if (Take("^")) return Make(Node::Kind::kLineStart);
    if (Take("$")) return Make(Node::Kind::kLineEnd);
    if (Take(".")) return MakeSet(CharSet({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}).Complement());
    if (Take("[")) return MakeSet(Class());
    if (Take("(")) return Group(depth);
    if (Take("\\")) return Escape();
    const char32_t character = Character();
    return MakeSet(CharSet({{character, character}}));
  }

  NodePtr Group(int depth) {
    if (Take("?")) {
      if (Take("P<") || (Peek() == '<' && text_.substr(at_, 2) != "<=" && text_.substr(at_, 2) != "<!" && Take("<"))) {
        while (!AtEnd() && Peek() != '>') ++at_;
        if (!Take(">")) Fail("the name of a group does not end");
      } else if (!Take(":")) {
        Fail("look-around, flags and conditions are not offered");
      }
    }
    NodePtr inside = Alternatives(depth + 1);
    if (!Take(")")) Fail("a group is not closed");
    return inside;
  }

  NodePtr Escape() {
    if (AtEnd()) Fail("ends with a backslash");
    const char c = Peek();
    if (c == 'b' || c == 'B' || c == 'A' || c == 'Z' || c == 'z' || c == 'G')
      Fail(absl::StrCat("\\", std::string(1, c), " is not offered"));
    if (c == 'k' || (c >= '1' && c <= '9')) Fail("back references are not offered");
    CharSet set;
    if (EscapedSet(&set)) return MakeSet(std::move(set));
    const char32_t character = EscapedCharacter();
    return MakeSet(CharSet({{character, character}}));
  }

  // \d and its like, \p{...}. False: the escape is one character.
  bool EscapedSet(CharSet* set) {
    const char c = Peek();
    if (c == 'd' || c == 'D' || c == 'w' || c == 'W' || c == 's' || c == 'S') {
      ++at_;
      *set = ClassOf(static_cast<char32_t>(c));
      return true;
    }
    if (c != 'p' && c != 'P') return false;
    ++at_;
    const size_t close = text_.find('}', at_);
    if (Peek() != '{' || close == std::string_view::npos) Fail("\\p wants a property in braces");
    const std::string_view name = text_.substr(at_ + 1, close - at_ - 1);
    const bool plain = std::all_of(name.begin(), name.end(), [](char x) {
      return x == '_' || x == '=' || (x >= '0' && x <= '9') || ((x | 32) >= 'a' && (x | 32) <= 'z');
    });
    if (!plain) Fail("\\p wants a property in braces");
    const auto [known, fresh] = properties_.try_emplace(std::string(name));
    if (fresh) {
      if (properties_.size() > kMaxProperties) Fail(absl::StrCat("more than ", kMaxProperties, " different properties"));
      known->second = CharSet::OfPattern(absl::StrCat("[\\p{", std::string(name), "}]"));
    }
    *set = known->second;
    if (c == 'P') *set = set->Complement();
    at_ = close + 1;
    return true;
  }

  char32_t EscapedCharacter() {
    const char c = Peek();
    const auto is_letter = [](char x) { return (x | 32) >= 'a' && (x | 32) <= 'z'; };
    if (c == 'n' || c == 'r' || c == 't' || c == 'f' || c == 'v' || c == 'a' || c == '0') {
      ++at_;
      return c == 'n' ? '\n' : c == 'r' ? '\r' : c == 't' ? '\t' : c == 'f' ? '\f' : c == 'v' ? '\v' : c == 'a' ? '\a' : 0;
    }
    if (Take("x")) return Hex(2);
    if (Take("u{")) {
      const char32_t value = Hex(-1);
      if (!Take("}")) Fail("\\u{ is not closed");
      return value;
    }
    if (Take("u")) return Hex(4);
    if (Take("c")) Fail("control escapes are not offered");
    if (is_letter(c)) Fail(absl::StrCat("\\", std::string(1, c), " is not known"));
    return Character();
  }
  // -1 digits: as many as there are.
  char32_t Hex(int digits) {
    uint32_t value = 0;
    int count = 0;
    for (; digits < 0 || count < digits; ++count) {
      const size_t digit =
          std::string_view("0123456789abcdef").find(Peek() >= 'A' && Peek() <= 'F' ? static_cast<char>(Peek() + 32) : Peek());
      if (AtEnd() || digit == std::string_view::npos) break;
      value = value * 16 + static_cast<uint32_t>(digit);
      ++at_;
      if (value > kLastCharacter) Fail("a character beyond 10FFFF");
    }
    if (count == 0 || (digits > 0 && count < digits)) Fail("hexadecimal digits are missing");
    if (value >= 0xD800 && value <= 0xDFFF) Fail("half of a surrogate pair is no character");
    return value;
  }

  CharSet Class() {
    const bool negated = Take("^");
    std::vector<CharSet::Range> ranges;
    CharSet sets;
    for (bool first = true; first || Peek() != ']'; first = false) {
      if (AtEnd()) Fail("a class is not closed");
      if (first && Peek() == ']') break;  // [] holds nothing, [^] everything
      if (text_.substr(at_).starts_with("[:") || text_.substr(at_).starts_with("[=")) Fail("POSIX classes are not offered");
      if (text_.substr(at_).starts_with("&&") || text_.substr(at_).starts_with("--")) Fail("operations on classes are not offered");
      CharSet set;
      char32_t low = 0;
      if (!ClassAtom(&set, &low)) {
        sets.Add(set);
        continue;
      }
      char32_t high = low;
      if (Peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        if (!ClassAtom(&set, &high)) Fail("a range ends in a class");
        if (high < low) Fail("a range ends before it begins");
      }
      ranges.emplace_back(low, high);
    }
    Take("]");
    sets.Add(CharSet(std::move(ranges)));
    return negated ? sets.Complement() : sets;
  }
  // True: one character. False: a set.
  bool ClassAtom(CharSet* set, char32_t* character) {
    if (!Take("\\")) {
      *character = Character();
      return true;
    }
    if (AtEnd()) Fail("ends with a backslash");
    if (EscapedSet(set)) return false;
    if (Take("b")) return *character = '\b', true;
    *character = EscapedCharacter();
    return true;
  }

  static constexpr size_t kMaxProperties = 16;

  std::string_view text_;
  size_t at_ = 0;
  std::map<std::string, CharSet> properties_;
};

}  // namespace

std::unique_ptr<RegexNode> ParseRegex(std::string_view pattern) { return Parser(pattern).Parse(); }

}  // namespace loupe::grammar
