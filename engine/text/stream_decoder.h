// Turns the tokens of one sample into text as they come: emits whole UTF-8 only, holds back what may become a stop
// string, ends at the first stop string. Owned by the sample, used by the step thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/tokenizer.h"

namespace loupe {

class StreamDecoder {
 public:
  StreamDecoder(const Tokenizer& tokenizer, std::vector<std::string> stop, bool include_stop);

  // Text that is certain after this token. Once stopped() is true nothing more is emitted. `allow_stop` false: stop
  // strings that end in this token do not count (min_tokens).
  std::string Push(int32_t token, bool allow_stop = true);
  // What was held back at the end; an unfinished character becomes U+FFFD.
  std::string Flush();

  bool stopped() const { return stopped_; }
  // The stop string that matched.
  const std::string& matched() const { return matched_; }

 private:
  const Tokenizer& tokenizer_;
  std::vector<std::string> stop_;
  bool include_stop_;
  bool stopped_ = false;
  std::string matched_;
  std::string pending_;  // bytes not yet emitted
};

}  // namespace loupe
