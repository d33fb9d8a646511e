// The tokenizer's part of GGUF metadata.
#include <algorithm>
#include <array>
#include <limits>

#include "absl/strings/str_cat.h"
#include "engine/load/gguf_model.h"

namespace loupe {
namespace {

absl::Status Invalid(const std::string& text) { return absl::InvalidArgumentError(text); }

// Tokens that end an answer in well-known models. Many files name only one of them as eos, though their chat template
// closes a turn with another.
constexpr std::array<std::string_view, 9> kEndTokens = {"<|im_end|>",      "<|eot_id|>",    "<|eom_id|>",
                                                        "<|end_of_text|>", "<|endoftext|>", "<|end|>",
                                                        "<|end_of_turn|>", "<end_of_turn>", "<|return|>"};

// A key that holds the id of a token; -1 if the file has no such key.
absl::Status ReadId(const Gguf& gguf, const char* key, size_t num_tokens, int32_t* out) {
  absl::StatusOr<int64_t> id = gguf.IntOr(key, -1, -1, std::numeric_limits<uint32_t>::max());
  if (!id.ok()) return id.status();
  // Writers without an id for a role leave all bits set.
  if (*id == std::numeric_limits<uint32_t>::max()) id = -1;
  if (*id >= static_cast<int64_t>(num_tokens)) {
    return Invalid(absl::StrCat("key '", key, "' is ", *id, ", but the vocabulary has ", num_tokens, " tokens"));
  }
  *out = static_cast<int32_t>(*id);
  return absl::OkStatus();
}

absl::Status ReadKinds(const Gguf& gguf, Vocabulary* vocabulary) {
  constexpr const char* kKey = "tokenizer.ggml.token_type";
  const size_t count = vocabulary->tokens.size();
  vocabulary->kinds.assign(count, TokenKind::kNormal);
  if (!gguf.Find(kKey)) return absl::OkStatus();
  absl::StatusOr<std::vector<int64_t>> types = gguf.Ints(kKey);
  if (!types.ok()) return types.status();
  if (types->size() != count) {
    return Invalid(absl::StrCat("key '", kKey, "' has ", types->size(), " elements for ", count, " tokens"));
  }
  static constexpr TokenKind kKinds[] = {TokenKind::kNormal,      TokenKind::kUnknown, TokenKind::kControl,
                                         TokenKind::kUserDefined, TokenKind::kUnused,  TokenKind::kByte};
  for (size_t i = 0; i < count; ++i) {
    const int64_t type = (*types)[i];
    if (type < 1 || type > 6)
      return Invalid(absl::StrCat("key '", kKey, "': element ", i, " is ", type, "; known are 1 to 6"));
    vocabulary->kinds[i] = kKinds[type - 1];
  }
  return absl::OkStatus();
}

absl::Status ReadEndOfGeneration(const Gguf& gguf, Vocabulary* vocabulary) {
  std::vector<int32_t>& ends = vocabulary->end_of_generation;
  if (vocabulary->eos >= 0) ends.push_back(vocabulary->eos);
  for (const char* key : {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    int32_t id = -1;
    if (absl::Status s = ReadId(gguf, key, vocabulary->tokens.size(), &id); !s.ok()) return s;
    if (id >= 0) ends.push_back(id);
  }
  for (size_t i = 0; i < vocabulary->tokens.size(); ++i) {
    const TokenKind kind = vocabulary->kinds[i];
    if (kind != TokenKind::kControl && kind != TokenKind::kUserDefined) continue;
    if (std::find(kEndTokens.begin(), kEndTokens.end(), vocabulary->tokens[i]) != kEndTokens.end()) {
      ends.push_back(static_cast<int32_t>(i));
    }
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Vocabulary> ReadVocabulary(const Gguf& gguf) {
  Vocabulary vocabulary;
  absl::StatusOr<std::string> model = gguf.String("tokenizer.ggml.model");
  if (!model.ok()) return model.status();
  vocabulary.model = *model;
  absl::StatusOr<std::string> pre = gguf.StringOr("tokenizer.ggml.pre", "");
  if (!pre.ok()) return pre.status();
  vocabulary.pre_tokenizer = *pre;
  absl::StatusOr<std::vector<std::string>> tokens = gguf.Strings("tokenizer.ggml.tokens");
  if (!tokens.ok()) return tokens.status();
  vocabulary.tokens = *std::move(tokens);
  if (absl::Status s = ReadKinds(gguf, &vocabulary); !s.ok()) return s;
  if (gguf.Find("tokenizer.ggml.merges")) {
    absl::StatusOr<std::vector<std::string>> merges = gguf.Strings("tokenizer.ggml.merges");
    if (!merges.ok()) return merges.status();
    vocabulary.merges = *std::move(merges);
  }
  const std::pair<const char*, int32_t*> ids[] = {{"tokenizer.ggml.bos_token_id", &vocabulary.bos},
                                                  {"tokenizer.ggml.eos_token_id", &vocabulary.eos},
                                                  {"tokenizer.ggml.padding_token_id", &vocabulary.pad},
                                                  {"tokenizer.ggml.unknown_token_id", &vocabulary.unknown}};
  for (const auto& [key, id] : ids) {
    if (absl::Status s = ReadId(gguf, key, vocabulary.tokens.size(), id); !s.ok()) return s;
  }
  if (absl::Status s = ReadEndOfGeneration(gguf, &vocabulary); !s.ok()) return s;
  // Llama 3 files begin with BOS unless they say otherwise; other byte-level BPE files do not.
  const bool bos_by_default = vocabulary.bos >= 0 && vocabulary.pre_tokenizer == "llama-bpe";
  absl::StatusOr<bool> add_bos = gguf.BoolOr("tokenizer.ggml.add_bos_token", bos_by_default);
  if (!add_bos.ok()) return add_bos.status();
  absl::StatusOr<bool> add_eos = gguf.BoolOr("tokenizer.ggml.add_eos_token", false);
  if (!add_eos.ok()) return add_eos.status();
  vocabulary.add_bos = *add_bos;
  vocabulary.add_eos = *add_eos;
  if ((vocabulary.add_bos && vocabulary.bos < 0) || (vocabulary.add_eos && vocabulary.eos < 0)) {
    return Invalid("the tokenizer is told to add a BOS or EOS token, but the file names no id for it");
  }
  return vocabulary;
}

}  // namespace loupe
