#include "engine/text/tokenizer.h"

#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "engine/text/bpe_tokenizer.h"
#include "engine/text/pre_tokenizer.h"

namespace loupe {
namespace {

absl::Status CheckId(const char* name, int32_t id, size_t num_tokens, int32_t lowest) {
  if (id >= lowest && (id < 0 || static_cast<size_t>(id) < num_tokens)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s token id is %d, but the vocabulary has %d tokens; the file is damaged", name, id, num_tokens));
}

absl::Status CheckVocabulary(const Vocabulary& vocabulary) {
  const size_t num_tokens = vocabulary.tokens.size();
  if (num_tokens == 0 || num_tokens > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    return absl::InvalidArgumentError(absl::StrFormat("a vocabulary of %d tokens cannot be used", num_tokens));
  }
  if (vocabulary.kinds.size() != num_tokens) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the vocabulary has %d tokens but %d token kinds; the file is damaged", num_tokens, vocabulary.kinds.size()));
  }
  const std::pair<const char*, int32_t> ids[] = {
      {"bos", vocabulary.bos}, {"eos", vocabulary.eos}, {"pad", vocabulary.pad}, {"unknown", vocabulary.unknown}};
  for (const auto& [name, id] : ids) {
    if (absl::Status status = CheckId(name, id, num_tokens, -1); !status.ok()) return status;
  }
  for (const int32_t id : vocabulary.end_of_generation) {
    if (absl::Status status = CheckId("end-of-generation", id, num_tokens, 0); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_control) const {
  std::string text;
  for (const int32_t id : ids) {
    if (!skip_control || !IsControl(id)) text.append(TokenBytes(id));
  }
  return text;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTokenizer(Vocabulary vocabulary) {
  if (vocabulary.model != "gpt2") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "tokenizer model \"%s\" is not supported; supported is gpt2 (byte-level BPE)", vocabulary.model.substr(0, 80)));
  }
  const std::optional<PreTokenizer> rule = FindPreTokenizer(vocabulary.pre_tokenizer);
  if (!rule.has_value()) {
    return absl::InvalidArgumentError(absl::StrFormat("pre-tokenizer \"%s\" is not supported; supported are %s",
                                                      vocabulary.pre_tokenizer.substr(0, 80),
                                                      std::string(PreTokenizerNames())));
  }
  if (absl::Status status = CheckVocabulary(vocabulary); !status.ok()) return status;
  return BpeTokenizer::Make(std::move(vocabulary), *rule);
}

}  // namespace loupe
