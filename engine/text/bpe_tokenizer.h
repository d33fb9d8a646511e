// The tokenizer of GPT-2's family: added tokens are cut out, the rest is cut into words and each word merged from
// bytes. Immutable; any thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/text/bpe.h"
#include "engine/text/bpe_added_tokens.h"
#include "engine/text/pre_tokenizer.h"
#include "engine/text/tokenizer.h"

namespace loupe {

class BpeTokenizer : public Tokenizer {
 public:
  // The ids of `vocabulary` have been checked. INVALID_ARGUMENT: a merge or an added token that cannot be used.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Make(Vocabulary vocabulary, PreTokenizer rule);

  std::vector<int32_t> Encode(std::string_view text, bool add_special, bool parse_special) const override;
  std::string_view TokenBytes(int32_t id) const override;
  bool IsControl(int32_t id) const override;
  bool IsEndOfGeneration(int32_t id) const override;
  std::string_view Piece(int32_t id) const override;
  int vocab_size() const override { return static_cast<int>(vocabulary_.tokens.size()); }
  int32_t bos() const override { return vocabulary_.bos; }
  int32_t eos() const override { return vocabulary_.eos; }
  bool add_bos() const override { return vocabulary_.add_bos; }

 private:
  BpeTokenizer(Vocabulary vocabulary, PreTokenizer rule);
  void CheckId(int32_t id) const;
  void EncodeWords(std::string_view text, std::vector<int32_t>* ids) const;

  Vocabulary vocabulary_;  // without its merges, which bpe_ holds
  PreTokenizer rule_;
  std::string arena_;                    // bytes of all tokens, one after the other
  std::vector<std::string_view> bytes_;  // [vocab_size], into arena_
  std::vector<bool> ends_;               // [vocab_size], ids that end an answer
  AddedTokens added_;                    // all added tokens
  AddedTokens user_defined_;             // those that are no special tokens
  std::unique_ptr<Bpe> bpe_;
};

}  // namespace loupe
