// A vocabulary for grammars: id 0 ends an answer, 1 is a control token, 2 to 257 are the bytes, then whatever the test adds.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "engine/text/tokenizer.h"

namespace loupe::testing {

class ByteTokenizer : public Tokenizer {
 public:
  explicit ByteTokenizer(std::vector<std::string> words = {}) {
    pieces_ = {"</s>", "<|mark|>"};
    for (int b = 0; b < 256; ++b) pieces_.push_back(std::string(1, static_cast<char>(b)));
    pieces_.insert(pieces_.end(), words.begin(), words.end());
  }
  static int32_t IdOf(char c) { return 2 + static_cast<unsigned char>(c); }

  std::vector<int32_t> Encode(std::string_view text, bool, bool) const override {
    std::vector<int32_t> ids;
    for (const char c : text) ids.push_back(IdOf(c));
    return ids;
  }
  std::string_view TokenBytes(int32_t id) const override { return pieces_.at(static_cast<size_t>(id)); }
  bool IsControl(int32_t id) const override { return id < 2; }
  bool IsEndOfGeneration(int32_t id) const override { return id == 0; }
  std::string_view Piece(int32_t id) const override { return TokenBytes(id); }
  int vocab_size() const override { return static_cast<int>(pieces_.size()); }
  int32_t bos() const override { return -1; }
  int32_t eos() const override { return 0; }
  bool add_bos() const override { return false; }

 private:
  std::vector<std::string> pieces_;
};

}  // namespace loupe::testing
