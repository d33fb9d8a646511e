#include "engine/grammar/char_set.h"

#include <unicode/uset.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/text/unicode.h"

namespace loupe::grammar {
namespace {

constexpr char32_t kBeforeSurrogates = 0xD7FF, kAfterSurrogates = 0xE000;

struct ByteRange {
  uint8_t low, high;
};

// Characters of equal length in UTF-8 whose bytes vary independently: cut off until that holds.
void SplitUtf8(char32_t low, char32_t high, std::vector<std::vector<ByteRange>>* out) {
  for (const char32_t limit : {char32_t{0x7F}, char32_t{0x7FF}, char32_t{0xFFFF}}) {
    if (low > limit || high <= limit) continue;
    SplitUtf8(low, limit, out);
    return SplitUtf8(limit + 1, high, out);
  }
  for (int bits = 6; bits <= 18 && high > 0x7F; bits += 6) {
    const char32_t tail = (char32_t{1} << bits) - 1;
    if ((low & ~tail) == (high & ~tail)) continue;
    if ((low & tail) != 0) {
      SplitUtf8(low, low | tail, out);
      return SplitUtf8((low | tail) + 1, high, out);
    }
    if ((high & tail) != tail) {
      SplitUtf8(low, (high & ~tail) - 1, out);
      return SplitUtf8(high & ~tail, high, out);
    }
  }
  std::string first, last;
  AppendUtf8(low, &first);
  AppendUtf8(high, &last);
  auto& bytes = out->emplace_back();
  for (size_t i = 0; i < first.size(); ++i) bytes.push_back({static_cast<uint8_t>(first[i]), static_cast<uint8_t>(last[i])});
}

// UTF-8 of the set. Endings that are alike share their states.
void AddUtf8(NfaBuilder& nfa, StateId from, const CharSet& set, StateId to) {
  std::map<std::tuple<uint8_t, uint8_t, StateId>, StateId> endings;
  for (const auto& [low, high] : set.ranges()) {
    std::vector<std::vector<ByteRange>> sequences;
    SplitUtf8(low, high, &sequences);
    for (const auto& bytes : sequences) {
      StateId next = to;
      for (size_t i = bytes.size() - 1; i > 0; --i) {
        const auto [at, fresh] = endings.try_emplace({bytes[i].low, bytes[i].high, next}, -1);
        if (fresh) {
          at->second = nfa.NewState();
          nfa.AddByte(at->second, bytes[i].low, bytes[i].high, next);
        }
        next = at->second;
      }
      nfa.AddByte(from, bytes[0].low, bytes[0].high, next);
    }
  }
}

// Characters that a JSON string must not hold as they are.
const CharSet& Escaped() {
  static const CharSet set({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}});
  return set;
}

std::string EscapeOf(char32_t c) {
  switch (c) {
    case '"': return "\\\"";
    case '\\': return "\\\\";
    case '\b': return "\\b";
    case '\f': return "\\f";
    case '\n': return "\\n";
    case '\r': return "\\r";
    case '\t': return "\\t";
    default: return absl::StrFormat("\\u%04x", static_cast<uint32_t>(c));
  }
}

}  // namespace

CharSet::CharSet(std::vector<Range> ranges) : ranges_(std::move(ranges)) { Normalise(); }

CharSet CharSet::OfPattern(const std::string& pattern) {
  std::u16string wide(pattern.begin(), pattern.end());
  UErrorCode error = U_ZERO_ERROR;
  USet* found = uset_openPattern(wide.data(), static_cast<int32_t>(wide.size()), &error);
  if (U_FAILURE(error)) throw Refusal(absl::StrCat("'", pattern, "' is no set of characters that is known here"));
  CharSet set;
  for (int32_t i = 0; i < uset_getRangeCount(found); ++i) {
    UChar32 low = 0, high = 0;
    uset_getItem(found, i, &low, &high, nullptr, 0, &error);
    set.ranges_.emplace_back(static_cast<char32_t>(low), static_cast<char32_t>(high));
  }
  uset_close(found);
  set.Normalise();
  return set;
}

void CharSet::Normalise() {
  std::sort(ranges_.begin(), ranges_.end());
  std::vector<Range> out;
  const auto add = [&](char32_t low, char32_t high) {
    if (low > high) return;
    if (!out.empty() && low <= out.back().second + 1) {
      out.back().second = std::max(out.back().second, high);
    } else {
      out.emplace_back(low, high);
    }
  };
  for (const auto& [low, high] : ranges_) {
    add(low, std::min(high, kBeforeSurrogates));
    add(std::max(low, kAfterSurrogates), std::min(high, kLastCharacter));
  }
  ranges_ = std::move(out);
}

void CharSet::Add(char32_t low, char32_t high) {
  ranges_.emplace_back(low, high);
  Normalise();
}
void CharSet::Add(const CharSet& other) {
  ranges_.insert(ranges_.end(), other.ranges_.begin(), other.ranges_.end());
  Normalise();
}

CharSet CharSet::Complement() const {
  std::vector<Range> out;
  char32_t next = 0;
  for (const auto& [low, high] : ranges_) {
    if (low > next) out.emplace_back(next, low - 1);
    next = high + 1;
  }
  if (next <= kLastCharacter) out.emplace_back(next, kLastCharacter);
  return CharSet(std::move(out));
}

CharSet CharSet::Intersect(const CharSet& other) const {
  std::vector<Range> out;
  for (size_t i = 0, j = 0; i < ranges_.size() && j < other.ranges_.size();) {
    const char32_t low = std::max(ranges_[i].first, other.ranges_[j].first);
    const char32_t high = std::min(ranges_[i].second, other.ranges_[j].second);
    if (low <= high) out.emplace_back(low, high);
    ++(ranges_[i].second < other.ranges_[j].second ? i : j);
  }
  return CharSet(std::move(out));
}

CharSet CharSet::Without(const CharSet& other) const { return Intersect(other.Complement()); }

bool CharSet::Contains(char32_t c) const {
  return std::any_of(ranges_.begin(), ranges_.end(), [c](const Range& r) { return r.first <= c && c <= r.second; });
}

void AddCharacter(NfaBuilder& nfa, StateId from, const CharSet& set, StateId to, Spelling spelling) {
  if (spelling == Spelling::kPlain) return AddUtf8(nfa, from, set, to);
  AddUtf8(nfa, from, set.Without(Escaped()), to);
  const CharSet escaped = set.Intersect(Escaped());
  for (const auto& [low, high] : escaped.ranges()) {
    for (char32_t c = low; c <= high; ++c) nfa.AddText(from, EscapeOf(c), to);
  }
}

std::string SpellJson(std::string_view utf8) {
  std::string out;
  while (!utf8.empty()) {
    char32_t c = 0;
    const int bytes = DecodeUtf8(utf8, &c);
    if (bytes == 0) throw Refusal("holds text that is not UTF-8");
    if (Escaped().Contains(c)) {
      out += EscapeOf(c);
    } else {
      out.append(utf8.substr(0, static_cast<size_t>(bytes)));
    }
    utf8.remove_prefix(static_cast<size_t>(bytes));
  }
  return out;
}

}  // namespace loupe::grammar
