// What a GGUF file says about a model of the llama architecture: configuration, vocabulary, chat template, tensors.
// Each reader checks what it reads and names the key or tensor that is wrong; none of them touches tensor data, but for
// the few rotary factors. Stateless, used by the loader and by `loupe inspect`.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/load/gguf.h"
#include "engine/load/mapped_file.h"
#include "engine/load/weight_source.h"
#include "engine/model/model_config.h"
#include "engine/text/tokenizer.h"

namespace loupe {

// INVALID_ARGUMENT: another architecture, a missing or contradicting key, a feature that the pass does not have.
absl::StatusOr<ModelConfig> ReadModelConfig(const Gguf& gguf, std::string_view file_bytes);

// INVALID_ARGUMENT: keys of wrong type, lists of different lengths, ids out of range.
absl::StatusOr<Vocabulary> ReadVocabulary(const Gguf& gguf);

// Empty if the file has none.
absl::StatusOr<std::string> ReadChatTemplate(const Gguf& gguf);

// INVALID_ARGUMENT names a tensor whose type or rank the pass cannot use, or that no llama model has.
absl::Status CheckTensors(const Gguf& gguf, const ModelConfig& config);

// The tensors of a parsed file. `file` and `gguf` outlive it. Only for files that passed CheckTensors.
class GgufWeightSource : public WeightSource {
 public:
  GgufWeightSource(const Gguf& gguf, const MappedFile& file) : gguf_(gguf), file_(file) {}
  std::optional<HostMatrix> Find(std::string_view name) const override;
  void Release(std::string_view name) const override;

 private:
  const Gguf& gguf_;
  const MappedFile& file_;
};

}  // namespace loupe
