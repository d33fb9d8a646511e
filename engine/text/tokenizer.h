// Text to token ids and back. Immutable after creation: any thread may use one.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace loupe {

enum class TokenKind : uint8_t { kNormal, kUnknown, kControl, kUserDefined, kUnused, kByte };
// Tokens that plain text must never become: control tokens, and the unknown token where a vocabulary has one.
inline bool IsSpecial(TokenKind kind) { return kind == TokenKind::kControl || kind == TokenKind::kUnknown; }

// What a tokenizer is made from; filled from GGUF metadata (later from tokenizer.json).
struct Vocabulary {
  std::string model;                // "gpt2": byte-level BPE
  std::string pre_tokenizer;        // gpt2 | smollm | llama-bpe | qwen2
  std::vector<std::string> tokens;  // as in the file: byte-level alphabet for normal tokens
  std::vector<TokenKind> kinds;
  std::vector<std::string> merges;  // "left right", best first
  int32_t bos = -1, eos = -1, pad = -1, unknown = -1;
  std::vector<int32_t> end_of_generation;  // every id that ends an answer, eos included
  bool add_bos = false, add_eos = false;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Any bytes are accepted; bytes that are not UTF-8 are encoded as bytes; a byte that the vocabulary has no token for
  // vanishes. `add_special`: BOS and EOS as the vocabulary asks, BOS unless the text begins with it.
  // `parse_special`: added and special tokens in the text become their ids; otherwise only user-defined (non-control)
  // added tokens do.
  virtual std::vector<int32_t> Encode(std::string_view text, bool add_special, bool parse_special) const = 0;
  // Exact bytes of a token, possibly part of a character; added tokens give their text, unused ones nothing. Id must be
  // in range.
  virtual std::string_view TokenBytes(int32_t id) const = 0;
  // Special tokens (see IsSpecial), which are no part of an answer's text.
  virtual bool IsControl(int32_t id) const = 0;
  virtual bool IsEndOfGeneration(int32_t id) const = 0;
  // The token as the vocabulary spells it.
  virtual std::string_view Piece(int32_t id) const = 0;
  // Bytes of all ids, control tokens skipped when asked.
  std::string Decode(std::span<const int32_t> ids, bool skip_control = true) const;
  virtual int vocab_size() const = 0;
  virtual int32_t bos() const = 0;
  virtual int32_t eos() const = 0;
  virtual bool add_bos() const = 0;
};

// INVALID_ARGUMENT names what is wrong: an unsupported model or pre-tokenizer, a merge whose parts are no tokens, ids
// out of range.
absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTokenizer(Vocabulary vocabulary);

}  // namespace loupe
