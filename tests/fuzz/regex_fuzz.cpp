// Any bytes as a regular expression.
#include "tests/fuzz/grammar_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  loupe::CheckGrammar({loupe::GrammarSpec::Kind::kRegex, std::string(reinterpret_cast<const char*>(data), size), {}});
  return 0;
}
