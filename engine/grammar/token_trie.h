// The vocabulary as a tree of bytes, so that a grammar looks at each beginning that tokens share once. Immutable, any
// thread; one a tokenizer.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/text/tokenizer.h"

namespace loupe::grammar {

// A set of tokens: bit id % 32 of word id / 32.
using TokenMask = std::vector<uint32_t>;

class TokenTrie {
 public:
  // `tokenizer` outlives the trie. Ids from `vocab_size` on, and tokens without bytes, are left out.
  TokenTrie(const Tokenizer& tokenizer, int vocab_size);

  // In preorder: a node's children follow it, up to `end`.
  struct Node {
    uint8_t byte = 0;
    uint8_t depth = 0;       // bytes up to and including this one, less 1; longer tokens are left out
    bool plain = false;      // all bytes below this node are plain ones
    bool plain_path = false; // and those up to it
    int32_t end = 0;         // the next node that is no descendant
    int32_t tokens_end = 0;  // tokens of this node: tokens()[tokens_end of the node before, tokens_end)
  };
  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  size_t first_token(size_t node) const { return node == 0 ? 0 : static_cast<size_t>(nodes_[node - 1].tokens_end); }

  // Bytes that most text consists of, and that JSON strings and most classes of expressions treat alike.
  static bool IsPlain(uint8_t byte) { return byte >= 0x20 && byte < 0x7F && byte != '"' && byte != '\\'; }
  // Tokens of plain bytes alone; control tokens; tokens that end an answer.
  const TokenMask& plain_tokens() const { return plain_tokens_; }
  const TokenMask& control_tokens() const { return control_tokens_; }
  const std::vector<int32_t>& end_tokens() const { return end_tokens_; }

  const Tokenizer& tokenizer() const { return tokenizer_; }
  int vocab_size() const { return vocab_size_; }
  size_t mask_words() const { return (static_cast<size_t>(vocab_size_) + 31) / 32; }

 private:
  const Tokenizer& tokenizer_;
  int vocab_size_;
  std::vector<Node> nodes_;
  std::vector<int32_t> tokens_;
  TokenMask plain_tokens_, control_tokens_;
  std::vector<int32_t> end_tokens_;
};

inline void SetToken(uint32_t* mask, int32_t id) { mask[id / 32] |= 1u << (id % 32); }
inline bool HasToken(const uint32_t* mask, int32_t id) { return mask[id / 32] >> (id % 32) & 1; }

}  // namespace loupe::grammar
