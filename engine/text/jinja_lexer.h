// Cuts a template into tokens with Jinja's rules for white space, trim_blocks and lstrip_blocks on, as chat templates
// expect. Pure function; a syntax error throws jinja::Error with line and column.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace loupe::jinja {

enum class TokenType : uint8_t {
  kData, kPrintBegin, kPrintEnd, kTagBegin, kTagEnd, kName, kString, kInteger, kFloat, kOperator, kEnd
};

struct Token {
  TokenType type;
  std::string text;  // of data and strings: what they stand for; of the others: their spelling
  int line = 0, column = 0;  // from 1
};

std::vector<Token> Tokenize(std::string_view source);

}  // namespace loupe::jinja
