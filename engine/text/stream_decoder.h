// Turns the tokens of one sample into text as they come: emits whole UTF-8 only, holds back what may become a stop
// string, ends at the first stop string. Control tokens give no text. Invalid bytes become U+FFFD, as Python's
// errors='replace' does. Time is O(1) a byte, amortised. Owned by the sample, used by the step thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/tokenizer.h"
#include "engine/text/unicode.h"

namespace loupe {

class StreamDecoder {
 public:
  // Of the stop strings the one that is complete first wins; of those complete at the same byte the longest. Empty ones
  // are ignored.
  StreamDecoder(const Tokenizer& tokenizer, std::vector<std::string> stop, bool include_stop);

  // Text that is certain after this token. Once stopped() is true nothing more is emitted. `allow_stop` false: stop
  // strings that end in this token do not count (min_tokens).
  std::string Push(int32_t token, bool allow_stop = true);
  // What was held back at the end; an unfinished character becomes U+FFFD, which may complete a stop string.
  std::string Flush();

  bool stopped() const { return stopped_; }
  // The stop string that matched.
  const std::string& matched() const { return matched_; }

 private:
  // A node of the Aho-Corasick automaton over the stop strings: a prefix of at least one of them.
  struct Node {
    int32_t first_child = -1;
    int32_t next_sibling = -1;
    int32_t fail = 0;   // the longest proper suffix that is a prefix too
    int32_t depth = 0;  // bytes of the prefix
    int32_t hold = 0;   // bytes at its end that may still become a longer match
    int32_t stop = -1;  // the longest stop string that ends here
    unsigned char byte = 0;
  };

  void BuildAutomaton();
  int32_t Child(int32_t node, unsigned char byte) const;
  int32_t Step(int32_t node, unsigned char byte) const;
  // Runs the automaton over pending_[from..) and returns what is certain.
  std::string Scan(size_t from, bool allow_stop);

  const Tokenizer& tokenizer_;
  std::vector<std::string> stop_;
  bool include_stop_;
  bool stopped_ = false;
  std::string matched_;
  Utf8Repair repair_;
  std::vector<Node> nodes_;      // [0] is the root; empty without stop strings
  std::vector<size_t> lengths_;  // bytes of each stop string as the automaton sees it
  int32_t state_ = 0;
  std::string pending_;  // whole characters; those before emitted_ have been emitted
  size_t emitted_ = 0;
};

}  // namespace loupe
