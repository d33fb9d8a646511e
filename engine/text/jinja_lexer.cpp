#include "engine/text/jinja_lexer.h"

#include <algorithm>
#include <array>

#include "engine/text/jinja_text.h"
#include "engine/text/jinja_value.h"

namespace loupe::jinja {
namespace {

constexpr size_t kNone = std::string::npos;

bool IsBlank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool IsDecimal(char c) { return c >= '0' && c <= '9'; }
bool IsNameStart(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || static_cast<unsigned char>(c) >= 0x80;
}

// Line ends become \n and one at the very end is dropped.
std::string NormaliseLines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out.push_back(source[i]);
      continue;
    }
    out.push_back('\n');
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(NormaliseLines(source)) {}
  std::vector<Token> Run();

 private:
  bool StartsWith(std::string_view text, size_t at) const { return source_.compare(at, text.size(), text) == 0; }
  [[noreturn]] void FailHere(const std::string& message, size_t at) {
    Locate(at);
    throw Error(ErrorKind::kSyntax, message, line_, static_cast<int>(at - line_start_) + 1);
  }
  // Positions only grow, so lines are counted once.
  void Locate(size_t at) {
    for (; located_ < at; ++located_) {
      if (source_[located_] == '\n') {
        ++line_;
        line_start_ = located_ + 1;
      }
    }
  }
  void Add(TokenType type, std::string text, size_t at) {
    Locate(at);
    tokens_.push_back({type, std::move(text), line_, static_cast<int>(at - line_start_) + 1});
  }
  void SkipBlanks() {
    uint32_t code;
    for (size_t length; pos_ < source_.size(); pos_ += length) {
      length = CharAt(source_, pos_, &code);
      if (!IsSpace(code)) break;
    }
  }
  size_t NextDelimiter(size_t from) const;
  std::string DataBefore(size_t begin, char sign, bool is_print) const;
  void CloseTag(size_t length, char sign);
  bool Raw(size_t begin);
  void Comment(size_t begin);
  void Inside(bool is_print);
  void OneToken();
  void Number();
  void String();
  void Operator();

  const std::string source_;
  std::vector<Token> tokens_;
  std::string open_;  // brackets that wait for their partner
  size_t pos_ = 0;
  bool line_starting_ = true;  // what came before this data ended a line
  size_t located_ = 0, line_start_ = 0;
  int line_ = 1;
};

size_t Lexer::NextDelimiter(size_t from) const {
  for (size_t at = source_.find('{', from); at != kNone && at + 1 < source_.size(); at = source_.find('{', at + 1)) {
    const char next = source_[at + 1];
    if (next == '{' || next == '%' || next == '#') return at;
  }
  return kNone;
}

// The data up to a delimiter, with the white space before it treated as its sign says.
std::string Lexer::DataBefore(size_t begin, char sign, bool is_print) const {
  std::string_view data(source_.data() + pos_, begin - pos_);
  if (sign == '-') return std::string(Strip(data, nullptr, false, true));
  if (sign == '+' || is_print) return std::string(data);
  const size_t newline = data.rfind('\n');
  const size_t line = newline == kNone ? 0 : newline + 1;
  if (line == 0 && !line_starting_) return std::string(data);
  if (Strip(data.substr(line), nullptr).empty()) data = data.substr(0, line);
  return std::string(data);
}

// Moves past the end of a tag or comment: `length` bytes that close it, and what its sign takes with it.
void Lexer::CloseTag(size_t length, char sign) {
  pos_ += length;
  if (sign == '-') {
    SkipBlanks();
  } else if (sign == 0 && pos_ < source_.size() && source_[pos_] == '\n') {
    ++pos_;
  }
  line_starting_ = source_[pos_ - 1] == '\n';
}

// {% raw %} ... {% endraw %}: false if the tag at `begin` is another.
bool Lexer::Raw(size_t begin) {
  const auto matches = [this](size_t at, std::string_view name, char* before, char* after, size_t* end) {
    *before = at + 2 < source_.size() && (source_[at + 2] == '-' || source_[at + 2] == '+') ? source_[at + 2] : 0;
    size_t i = at + 2 + (*before != 0);
    while (i < source_.size() && IsBlank(source_[i])) ++i;
    if (!StartsWith(name, i)) return false;
    i += name.size();
    while (i < source_.size() && IsBlank(source_[i])) ++i;
    *after = i < source_.size() && (source_[i] == '-' || source_[i] == '+') ? source_[i] : 0;
    i += *after != 0;
    *end = i + 2;
    return i < source_.size() && StartsWith("%}", i);
  };
  char before, after;
  size_t end;
  if (!matches(begin, "raw", &before, &after, &end) || after == '+') return false;
  const std::string data = DataBefore(begin, before, false);
  if (!data.empty()) Add(TokenType::kData, data, pos_);
  pos_ = end;
  if (after == '-') SkipBlanks();  // the newline after the opening tag stays otherwise
  line_starting_ = source_[pos_ - 1] == '\n';
  for (size_t at = source_.find("{%", pos_); at != kNone; at = source_.find("{%", at + 1)) {
    if (!matches(at, "endraw", &before, &after, &end)) continue;
    Add(TokenType::kData, DataBefore(at, before, false), pos_);
    pos_ = end - 2;
    CloseTag(2, after);
    return true;
  }
  FailHere("a raw block without {% endraw %}", begin);
}

void Lexer::Comment(size_t begin) {
  const size_t content = begin + 2 + (begin + 2 < source_.size() && (source_[begin + 2] == '-' || source_[begin + 2] == '+'));
  const size_t close = source_.find("#}", content);
  if (close == kNone) FailHere("a comment without #}", begin);
  char sign = close > content ? source_[close - 1] : 0;
  if (sign != '-' && sign != '+') sign = 0;
  pos_ = close;
  CloseTag(2, sign);
}

std::vector<Token> Lexer::Run() {
  for (;;) {
    const size_t begin = NextDelimiter(pos_);
    if (begin == kNone) break;
    const char kind = source_[begin + 1];
    if (kind == '%' && Raw(begin)) continue;
    char sign = begin + 2 < source_.size() ? source_[begin + 2] : 0;
    if (sign != '-' && sign != '+') sign = 0;
    std::string data = DataBefore(begin, sign, kind == '{');
    if (!data.empty()) Add(TokenType::kData, std::move(data), pos_);
    if (kind == '#') {
      Comment(begin);
      continue;
    }
    pos_ = begin + 2 + (sign != 0);
    Add(kind == '{' ? TokenType::kPrintBegin : TokenType::kTagBegin, source_.substr(begin, 2), begin);
    Inside(kind == '{');
  }
  if (pos_ < source_.size()) Add(TokenType::kData, source_.substr(pos_), pos_);
  Add(TokenType::kEnd, "end of template", source_.size());
  return std::move(tokens_);
}

// Tokens up to the end of {{ }} or {% %}.
void Lexer::Inside(bool is_print) {
  const std::string_view close = is_print ? "}}" : "%}";
  const size_t begin = pos_;
  open_.clear();
  for (;;) {
    SkipBlanks();
    if (pos_ >= source_.size()) FailHere(std::string("the tag is not closed by ") + std::string(close), std::min(begin, source_.size()));
    if (open_.empty()) {
      const char c = source_[pos_];
      const char sign = c == '-' || (c == '+' && !is_print) ? c : 0;
      if (StartsWith(close, pos_ + (sign != 0))) {
        Add(is_print ? TokenType::kPrintEnd : TokenType::kTagEnd, std::string(close), pos_);
        // Only tags take the newline that follows with them.
        CloseTag(2 + (sign != 0), sign != 0 ? sign : is_print ? '+' : 0);
        return;
      }
    }
    OneToken();
  }
}

void Lexer::OneToken() {
  const char c = source_[pos_];
  if (IsDecimal(c)) return Number();
  if (c == '"' || c == '\'') return String();
  if (!IsNameStart(c)) return Operator();
  const size_t start = pos_;
  while (pos_ < source_.size() && (IsNameStart(source_[pos_]) || IsDecimal(source_[pos_]))) ++pos_;
  Add(TokenType::kName, source_.substr(start, pos_ - start), start);
}

void Lexer::Number() {
  const size_t start = pos_;
  const auto digits = [this](size_t at, auto is_digit) {
    const auto digit_at = [&](size_t i) { return i < source_.size() && is_digit(source_[i]); };
    while (digit_at(at) || (at < source_.size() && source_[at] == '_' && digit_at(at + 1))) ++at;
    return at;
  };
  const auto hex = [](char c) { return IsDecimal(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); };
  const char base = pos_ + 2 < source_.size() && source_[pos_] == '0' ? static_cast<char>(source_[pos_ + 1] | 0x20) : 0;
  if ((base == 'x' || base == 'o' || base == 'b') && hex(source_[pos_ + 2])) {
    pos_ = digits(pos_ + 2, hex);
    return Add(TokenType::kInteger, source_.substr(start, pos_ - start), start);
  }
  size_t end = digits(pos_, IsDecimal);
  TokenType type = TokenType::kInteger;
  const bool after_dot = start > 0 && source_[start - 1] == '.';  // x.0.1 are two subscripts
  if (!after_dot && end + 1 < source_.size() && source_[end] == '.' && IsDecimal(source_[end + 1])) {
    end = digits(end + 1, IsDecimal);
    type = TokenType::kFloat;
  }
  if (!after_dot && end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
    const size_t exponent = end + 1 + (end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-'));
    if (exponent < source_.size() && IsDecimal(source_[exponent])) {
      end = digits(exponent, IsDecimal);
      type = TokenType::kFloat;
    }
  }
  pos_ = end;
  Add(type, source_.substr(start, end - start), start);
}

// Reads up to `most` digits of a base and moves `at` past them.
uint32_t ReadDigits(const std::string& text, size_t* at, size_t most, int base) {
  uint32_t value = 0;
  for (size_t n = 0; n < most && *at < text.size(); ++n, ++*at) {
    const char c = text[*at];
    const int digit = IsDecimal(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : base;
    if (digit >= base) break;
    value = value * static_cast<uint32_t>(base) + static_cast<uint32_t>(digit);
  }
  return value;
}

// Undoes Python's escapes; an unknown one stays as it is.
std::string Unescape(const std::string& text) {
  constexpr std::string_view kFrom = "\\'\"abfnrtv";
  constexpr std::string_view kTo = "\\'\"\a\b\f\n\r\t\v";
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (text[i] != '\\' || i + 1 >= text.size()) {
      out.push_back(text[i++]);
      continue;
    }
    const char c = text[i + 1];
    const size_t simple = kFrom.find(c);
    const size_t hex = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    size_t at = i + 2;
    if (c == '\n') {
      i += 2;
    } else if (simple != kNone) {
      out.push_back(kTo[simple]);
      i += 2;
    } else if (hex > 0) {
      const uint32_t code = ReadDigits(text, &at, hex, 16);
      if (at != i + 2 + hex) Fail("a string ends inside an escape");
      AppendUtf8(code, &out);
      i = at;
    } else if (c >= '0' && c <= '7') {
      at = i + 1;
      AppendUtf8(ReadDigits(text, &at, 3, 8), &out);
      i = at;
    } else {
      out.append(text, i, 2);
      i += 2;
    }
  }
  return out;
}

void Lexer::String() {
  const size_t start = pos_;
  const char quote = source_[pos_];
  for (++pos_; pos_ < source_.size() && source_[pos_] != quote; ++pos_) {
    if (source_[pos_] == '\\') ++pos_;
  }
  if (pos_ >= source_.size()) FailHere("the string is not closed", start);
  ++pos_;
  try {
    Add(TokenType::kString, Unescape(source_.substr(start + 1, pos_ - start - 2)), start);
  } catch (const Error& error) {
    FailHere(error.what(), start);
  }
}

void Lexer::Operator() {
  constexpr std::array<std::string_view, 26> kOperators = {"**", "//", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
                                                           "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};
  const auto found = std::find_if(kOperators.begin(), kOperators.end(), [this](std::string_view op) { return StartsWith(op, pos_); });
  if (found == kOperators.end()) FailHere(std::string("unexpected character '") + source_[pos_] + "'", pos_);
  const char c = found->front();
  if (c == '(' || c == '[' || c == '{') open_.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
  if (c == ')' || c == ']' || c == '}') {
    if (open_.empty()) FailHere(std::string("unexpected '") + c + "'", pos_);
    if (open_.back() != c) FailHere(std::string("unexpected '") + c + "', expected '" + open_.back() + "'", pos_);
    open_.pop_back();
  }
  Add(TokenType::kOperator, std::string(*found), pos_);
  pos_ += found->size();
}

}  // namespace

std::vector<Token> Tokenize(std::string_view source) { return Lexer(source).Run(); }

}  // namespace loupe::jinja
