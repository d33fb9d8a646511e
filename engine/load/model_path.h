// From a path that a user gave to a mapped model file, with a message that helps when it is something else. Stateless.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/load/mapped_file.h"
#include "engine/model/model_config.h"
#include "engine/text/tokenizer.h"

namespace loupe {

// NOT_FOUND: no such file. INVALID_ARGUMENT: a directory or a file of a kind that is not read.
absl::StatusOr<std::unique_ptr<MappedFile>> OpenModelFile(const std::string& path);

// INVALID_ARGUMENT if the tokenizer and the embedding table disagree on the number of tokens.
absl::Status CheckVocabularySize(const ModelConfig& config, const Vocabulary& vocabulary);

}  // namespace loupe
