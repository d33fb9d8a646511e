#include "engine/text/jinja_text.h"

#include <unicode/locid.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <cstring>

namespace loupe::jinja {
namespace {

constexpr uint32_t kReplacement = 0xFFFD;

icu::UnicodeString ToIcu(std::string_view text) {
  return icu::UnicodeString::fromUTF8(icu::StringPiece(text.data(), static_cast<int32_t>(text.size())));
}

std::string FromIcu(const icu::UnicodeString& text) {
  std::string out;
  text.toUTF8String(out);
  return out;
}

}  // namespace

bool IsAscii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

size_t CharAt(std::string_view text, size_t at, uint32_t* code) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(at);
  *code = lead;
  if (lead < 0x80) return 1;
  *code = kReplacement;
  const size_t length = lead >= 0xF0 && lead < 0xF5 ? 4 : lead >= 0xE0 && lead < 0xF0 ? 3 : lead >= 0xC2 && lead < 0xE0 ? 2 : 0;
  if (length == 0 || at + length > text.size()) return 1;
  uint32_t value = lead & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return 1;
    value = value << 6 | (byte(at + i) & 0x3F);
  }
  const bool overlong = (length == 3 && value < 0x800) || (length == 4 && value < 0x10000);
  if (overlong || value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) return 1;
  *code = value;
  return length;
}

int64_t CharCount(std::string_view text) {
  int64_t count = 0;
  uint32_t code;
  for (size_t at = 0; at < text.size(); at += CharAt(text, at, &code)) ++count;
  return count;
}

std::vector<size_t> CharOffsets(std::string_view text) {
  std::vector<size_t> offsets;
  offsets.reserve(text.size() + 1);
  uint32_t code;
  for (size_t at = 0; at < text.size(); at += CharAt(text, at, &code)) offsets.push_back(at);
  offsets.push_back(text.size());
  return offsets;
}

void AppendUtf8(uint32_t code, std::string* out) {
  if (code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) code = kReplacement;
  if (code < 0x80) {
    out->push_back(static_cast<char>(code));
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  out->push_back(static_cast<char>((0xFF00u >> (more + 1) & 0xFF) | code >> (6 * more)));
  for (int i = more - 1; i >= 0; --i) out->push_back(static_cast<char>(0x80 | (code >> (6 * i) & 0x3F)));
}

size_t FindText(std::string_view text, std::string_view part, size_t from) {
  if (from > text.size()) return std::string::npos;
  if (part.empty()) return from;
  const void* found = memmem(text.data() + from, text.size() - from, part.data(), part.size());
  return found == nullptr ? std::string::npos : static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

size_t FindLastText(std::string_view text, std::string_view part) {
  const std::string backwards(text.rbegin(), text.rend());
  const size_t found = FindText(backwards, std::string(part.rbegin(), part.rend()), 0);
  return found == std::string::npos ? found : text.size() - found - part.size();
}

bool IsSpace(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

std::string_view Strip(std::string_view text, const std::string* chars, bool left, bool right) {
  std::vector<uint32_t> set;
  for (size_t at = 0; chars != nullptr && at < chars->size();) {
    uint32_t code;
    at += CharAt(*chars, at, &code);
    set.push_back(code);
  }
  std::sort(set.begin(), set.end());
  const auto drops = [&](uint32_t code) {
    return chars == nullptr ? IsSpace(code) : std::binary_search(set.begin(), set.end(), code);
  };
  uint32_t code;
  while (left && !text.empty()) {
    const size_t length = CharAt(text, 0, &code);
    if (!drops(code)) break;
    text.remove_prefix(length);
  }
  while (right && !text.empty()) {
    size_t start = text.size() - 1;
    while (start > 0 && text.size() - start < 4 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
    if (start + CharAt(text, start, &code) != text.size()) {  // a stray byte
      start = text.size() - 1;
      code = kReplacement;
    }
    if (!drops(code)) break;
    text.remove_suffix(text.size() - start);
  }
  return text;
}

std::vector<std::string> SplitLines(std::string_view text, bool keep_ends) {
  std::vector<std::string> lines;
  size_t start = 0;
  for (size_t at = 0; at < text.size();) {
    uint32_t code;
    size_t length = CharAt(text, at, &code);
    const bool ends = (code >= 0x0A && code <= 0x0D) || (code >= 0x1C && code <= 0x1E) || code == 0x85 || code == 0x2028 || code == 0x2029;
    if (ends) {
      if (code == '\r' && at + 1 < text.size() && text[at + 1] == '\n') ++length;
      lines.emplace_back(text.substr(start, at - start + (keep_ends ? length : 0)));
      start = at + length;
    }
    at += length;
  }
  if (start < text.size()) lines.emplace_back(text.substr(start));
  return lines;
}

std::string Upper(std::string_view text) {
  if (!IsAscii(text)) return FromIcu(ToIcu(text).toUpper(icu::Locale::getRoot()));
  std::string out(text);
  for (char& c : out) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c;
  return out;
}

std::string Lower(std::string_view text) {
  if (!IsAscii(text)) return FromIcu(ToIcu(text).toLower(icu::Locale::getRoot()));
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  return out;
}

std::string Capitalize(std::string_view text) {
  if (text.empty()) return "";
  uint32_t code;
  const size_t first = CharAt(text, 0, &code);
  std::string out;
  AppendUtf8(static_cast<uint32_t>(u_totitle(static_cast<UChar32>(code))), &out);
  return out + Lower(text.substr(first));
}

std::string TitleCase(std::string_view text) {
  std::string out;
  bool in_word = false;
  for (size_t at = 0; at < text.size();) {
    uint32_t code;
    at += CharAt(text, at, &code);
    const auto c = static_cast<UChar32>(code);
    AppendUtf8(static_cast<uint32_t>(in_word ? u_tolower(c) : u_totitle(c)), &out);
    in_word = u_hasBinaryProperty(c, UCHAR_CASED);
  }
  return out;
}

bool IsPrintable(uint32_t code) {
  if (code < 0x80) return code >= 0x20 && code < 0x7F;
  switch (u_charType(static_cast<UChar32>(code))) {
    case U_CONTROL_CHAR:
    case U_FORMAT_CHAR:
    case U_SURROGATE:
    case U_PRIVATE_USE_CHAR:
    case U_UNASSIGNED:
    case U_LINE_SEPARATOR:
    case U_PARAGRAPH_SEPARATOR:
    case U_SPACE_SEPARATOR: return false;
    default: return true;
  }
}

bool IsAlpha(uint32_t code) { return u_isalpha(static_cast<UChar32>(code)); }
bool IsDigit(uint32_t code) { return u_isdigit(static_cast<UChar32>(code)); }
bool IsUpper(uint32_t code) { return u_isUUppercase(static_cast<UChar32>(code)); }
bool IsLower(uint32_t code) { return u_isULowercase(static_cast<UChar32>(code)); }

}  // namespace loupe::jinja
