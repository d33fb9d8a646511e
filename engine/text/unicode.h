// What the tokenizer and the stream decoder need to know of Unicode: reading UTF-8 that may be broken, the five classes
// of characters that pre-tokenisers tell apart, NFC, and repair of invalid bytes. Categories and NFC are ICU's. All
// functions accept any bytes and take linear time; all may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace loupe {

// kLetter is \p{L}, kNumber \p{N}, kNewline CR and LF, kSpace the rest of \s; kOther everything else, marks and invalid
// bytes included.
enum class CharClass : uint8_t { kOther, kLetter, kNumber, kSpace, kNewline };

struct CharInfo {
  CharClass cls = CharClass::kOther;
  int bytes = 1;  // 1 for an invalid byte
};

// Bytes of the well-formed character at the start of `text`, and the character; 0 if there is none.
int DecodeUtf8(std::string_view text, char32_t* character);
void AppendUtf8(char32_t character, std::string* out);

CharInfo ReadWideChar(std::string_view text);

// The character at `pos`, which must be inside `text`.
inline CharInfo ReadChar(std::string_view text, size_t pos) {
  const unsigned char c = static_cast<unsigned char>(text[pos]);
  if (c >= 0x80) return ReadWideChar(text.substr(pos));
  if ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') return {CharClass::kLetter, 1};
  if (c == ' ') return {CharClass::kSpace, 1};
  if (c >= '0' && c <= '9') return {CharClass::kNumber, 1};
  if (c == '\n' || c == '\r') return {CharClass::kNewline, 1};
  if (c >= '\t' && c <= '\r') return {CharClass::kSpace, 1};
  return {CharClass::kOther, 1};
}

// Writes the canonical composition of `text` to `out` and returns true, or returns false without touching `out` if the
// text needs none. Invalid bytes stay as they are.
bool NormaliseNfc(std::string_view text, std::string* out);

// Turns a stream of bytes into well-formed UTF-8. Every longest piece that can no longer become a character turns into
// one U+FFFD, as Python's errors='replace' and the WHATWG decoder do. Holds at most three bytes.
class Utf8Repair {
 public:
  // Appends the characters that are complete to `out`.
  void Push(std::string_view bytes, std::string* out);
  // Ends the stream: an unfinished character becomes U+FFFD.
  void Finish(std::string* out);

 private:
  void PushLead(unsigned char c, std::string* out);

  char held_[4] = {};
  int num_held_ = 0;
  int num_missing_ = 0;       // continuation bytes still to come
  unsigned char low_ = 0x80;  // range of the next one
  unsigned char high_ = 0xBF;
};

}  // namespace loupe
