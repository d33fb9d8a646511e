#include "engine/text/unicode.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/stringpiece.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/check.h"

namespace loupe {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
constexpr int kNumCodePoints = 0x110000;
constexpr int kPageBits = 8;

// Classes of all code points in two levels: equal pages of 256 are stored once, which makes 1.1 MB about 60 KB.
class ClassTable {
 public:
  ClassTable() {
    std::vector<uint8_t> flat(kNumCodePoints, static_cast<uint8_t>(CharClass::kOther));
    u_enumCharTypes(&FillRange, flat.data());
    for (int c = 0; c < kNumCodePoints; ++c) {
      // White_Space reaches beyond the separators (tabs, next line) and is rare: all of it lies below U+3001.
      if (c <= 0x3000 && u_isUWhiteSpace(c)) flat[c] = static_cast<uint8_t>(CharClass::kSpace);
    }
    flat['\n'] = flat['\r'] = static_cast<uint8_t>(CharClass::kNewline);
    std::map<std::string_view, uint16_t> seen;
    for (int page = 0; page < kNumCodePoints >> kPageBits; ++page) {
      const std::string_view bytes(reinterpret_cast<const char*>(&flat[page << kPageBits]), 1 << kPageBits);
      const auto [it, is_new] = seen.emplace(bytes, static_cast<uint16_t>(seen.size()));
      if (is_new) classes_.insert(classes_.end(), bytes.begin(), bytes.end());
      pages_[page] = it->second;
    }
  }

  CharClass Of(char32_t c) const {
    const int page = pages_[c >> kPageBits];
    return static_cast<CharClass>(classes_[(page << kPageBits) + (c & ((1 << kPageBits) - 1))]);
  }

 private:
  static UBool U_CALLCONV FillRange(const void* context, UChar32 start, UChar32 limit, UCharCategory type) {
    uint8_t* flat = static_cast<uint8_t*>(const_cast<void*>(context));
    const uint32_t mask = U_MASK(type);
    const CharClass cls = (mask & U_GC_L_MASK) != 0   ? CharClass::kLetter
                          : (mask & U_GC_N_MASK) != 0 ? CharClass::kNumber
                                                      : CharClass::kOther;
    std::memset(flat + start, static_cast<int>(cls), limit - start);
    return 1;
  }

  std::array<uint16_t, (kNumCodePoints >> kPageBits)> pages_ = {};
  std::vector<uint8_t> classes_;
};

// Range of the second byte after `lead`; it keeps out overlong forms, surrogates and what lies beyond U+10FFFF.
std::pair<unsigned char, unsigned char> SecondByteRange(unsigned char lead) {
  switch (lead) {
    case 0xE0:
      return {0xA0, 0xBF};
    case 0xED:
      return {0x80, 0x9F};
    case 0xF0:
      return {0x90, 0xBF};
    case 0xF4:
      return {0x80, 0x8F};
    default:
      return {0x80, 0xBF};
  }
}

// Bytes of the character that `lead` opens; 0 if it opens none.
int LengthFromLead(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return 2;
  if (lead < 0xF0) return 3;
  return lead < 0xF5 ? 4 : 0;
}

const icu::Normalizer2& Nfc() {
  static const icu::Normalizer2* const nfc = [] {
    UErrorCode error = U_ZERO_ERROR;
    const icu::Normalizer2* instance = icu::Normalizer2::getNFCInstance(error);
    LOUPE_CHECK(U_SUCCESS(error)) << "ICU has no NFC data: " << u_errorName(error);
    return instance;
  }();
  return *nfc;
}

// Characters that canonical ordering may move, in one run. ICU sorts them by insertion, which takes quadratic time on a
// long hostile run, so those come to it sorted already.
class MarkRun {
 public:
  static bool Holds(char32_t c) {
    return c >= 0x300 && u_getIntPropertyValue(static_cast<UChar32>(c), UCHAR_LEAD_CANONICAL_COMBINING_CLASS) != 0;
  }
  void Add(char32_t c) { run_.push_back(c); }

  void Flush(std::string* out) {
    constexpr size_t kSortFrom = 32;  // characters; real text has single digits
    if (run_.size() >= kSortFrom) Sort();
    for (char32_t c : run_) AppendUtf8(c, out);
    run_.clear();
  }

 private:
  void Sort() {
    std::vector<std::pair<uint8_t, char32_t>> marks;  // (combining class, mark)
    icu::UnicodeString parts;
    for (char32_t c : run_) {
      parts.setTo(static_cast<UChar32>(c));
      icu::UnicodeString decomposed;
      if (Nfc().getDecomposition(static_cast<UChar32>(c), decomposed)) parts = decomposed;
      for (int32_t i = 0; i < parts.length(); i = parts.moveIndex32(i, 1)) {
        const UChar32 part = parts.char32At(i);
        marks.emplace_back(u_getCombiningClass(part), static_cast<char32_t>(part));
      }
    }
    std::stable_sort(marks.begin(), marks.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    run_.clear();
    for (const auto& [cls, mark] : marks) run_.push_back(mark);
  }

  std::vector<char32_t> run_;
};

// Appends the composition of well-formed text. ICU counts in int32, so a longer text comes in parts.
void AppendComposed(const std::string& text, std::string* out) {
  UErrorCode error = U_ZERO_ERROR;
  icu::StringByteSink<std::string> sink(out);
  Nfc().normalizeUTF8(0, icu::StringPiece(text.data(), static_cast<int32_t>(text.size())), sink, nullptr, error);
  LOUPE_CHECK(U_SUCCESS(error)) << "NFC of " << text.size() << " bytes: " << u_errorName(error);
}

}  // namespace

int DecodeUtf8(std::string_view text, char32_t* character) {
  if (text.empty()) return 0;
  const unsigned char lead = static_cast<unsigned char>(text[0]);
  const int length = LengthFromLead(lead);
  if (length == 0 || static_cast<size_t>(length) > text.size()) return 0;
  char32_t c = length == 1 ? lead : lead & (0x7F >> length);
  auto [low, high] = SecondByteRange(lead);
  for (int i = 1; i < length; ++i) {
    const unsigned char next = static_cast<unsigned char>(text[i]);
    if (next < low || next > high) return 0;
    c = (c << 6) | (next & 0x3F);
    low = 0x80;
    high = 0xBF;
  }
  *character = c;
  return length;
}

void AppendUtf8(char32_t c, std::string* out) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (c >> 6)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (c >> 12)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (c >> 18)));
    out->push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

CharInfo ReadWideChar(std::string_view text) {
  static const ClassTable table;
  char32_t c = 0;
  const int bytes = DecodeUtf8(text, &c);
  if (bytes == 0) return {CharClass::kOther, 1};
  return {table.Of(c), bytes};
}

bool NormaliseNfc(std::string_view text, std::string* out) {
  // Nothing below U+0300, whose first byte is 0xCC, ever changes.
  const auto may_change = [](char c) { return static_cast<unsigned char>(c) >= 0xCC; };
  if (std::none_of(text.begin(), text.end(), may_change)) return false;
  constexpr size_t kPartBytes = 1 << 29;
  out->clear();
  std::string part;
  MarkRun marks;
  const auto finish_part = [&] {
    marks.Flush(&part);
    if (part.empty()) return;
    AppendComposed(part, out);
    part.clear();
  };
  for (size_t pos = 0; pos < text.size();) {
    char32_t c = 0;
    const int bytes = DecodeUtf8(text.substr(pos), &c);
    if (bytes == 0) {
      finish_part();
      out->push_back(text[pos++]);
      continue;
    }
    if (MarkRun::Holds(c)) {
      marks.Add(c);
    } else {
      marks.Flush(&part);
      if (part.size() >= kPartBytes) finish_part();
      part.append(text, pos, bytes);
    }
    pos += bytes;
  }
  finish_part();
  return true;
}

void Utf8Repair::PushLead(unsigned char c, std::string* out) {
  const int length = LengthFromLead(c);
  if (length == 0) {
    out->append(kReplacement);
  } else if (length == 1) {
    out->push_back(static_cast<char>(c));
  } else {
    held_[0] = static_cast<char>(c);
    num_held_ = 1;
    num_missing_ = length - 1;
    std::tie(low_, high_) = SecondByteRange(c);
  }
}

void Utf8Repair::Push(std::string_view bytes, std::string* out) {
  for (const char byte : bytes) {
    const unsigned char c = static_cast<unsigned char>(byte);
    if (num_missing_ == 0) {
      PushLead(c, out);
    } else if (c < low_ || c > high_) {
      Finish(out);
      PushLead(c, out);
    } else {
      held_[num_held_++] = byte;
      low_ = 0x80;
      high_ = 0xBF;
      if (--num_missing_ == 0) {
        out->append(held_, num_held_);
        num_held_ = 0;
      }
    }
  }
}

void Utf8Repair::Finish(std::string* out) {
  if (num_held_ > 0) out->append(kReplacement);
  num_held_ = num_missing_ = 0;
}

}  // namespace loupe
