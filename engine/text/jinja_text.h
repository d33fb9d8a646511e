// Python's string functions on UTF-8. Positions are characters, not bytes; a byte that is no UTF-8 is a character of its
// own. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace loupe::jinja {

bool IsAscii(std::string_view text);
// Length in bytes of the character that starts at `at`; `code` is its code point, or U+FFFD for a stray byte.
size_t CharAt(std::string_view text, size_t at, uint32_t* code);
int64_t CharCount(std::string_view text);
// Byte offset of every character, and of the end.
std::vector<size_t> CharOffsets(std::string_view text);
void AppendUtf8(uint32_t code, std::string* out);

// Byte offset of the first `part` at or after `from`, of the last one; npos if there is none. Linear time.
size_t FindText(std::string_view text, std::string_view part, size_t from);
size_t FindLastText(std::string_view text, std::string_view part);

bool IsSpace(uint32_t code);
// Removes what is in `chars` (null: white space) from the ends.
std::string_view Strip(std::string_view text, const std::string* chars, bool left = true, bool right = true);
std::vector<std::string> SplitLines(std::string_view text, bool keep_ends = false);

std::string Upper(std::string_view text);
std::string Lower(std::string_view text);
std::string Capitalize(std::string_view text);  // first character as a title, the rest lower
std::string TitleCase(std::string_view text);   // str.title(): every run of letters
bool IsPrintable(uint32_t code);                // repr() shows it as it is
bool IsAlpha(uint32_t code);
bool IsDigit(uint32_t code);
bool IsUpper(uint32_t code);
bool IsLower(uint32_t code);

}  // namespace loupe::jinja
