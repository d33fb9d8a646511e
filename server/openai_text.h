// /tokenize, /detokenize and /apply-template: bodies to answers. Any thread; errors are INVALID_ARGUMENT with the
// field.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "nlohmann/json.hpp"

namespace loupe {

absl::StatusOr<nlohmann::ordered_json> TokenizeBody(const Engine& engine, std::string_view body);
absl::StatusOr<nlohmann::ordered_json> DetokenizeBody(const Engine& engine, std::string_view body);
absl::StatusOr<nlohmann::ordered_json> ApplyTemplateBody(const Engine& engine, std::string_view body);

// The same without an engine.
absl::StatusOr<nlohmann::ordered_json> Tokenize(const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                                                std::string_view body);
absl::StatusOr<nlohmann::ordered_json> Detokenize(const Tokenizer& tokenizer, std::string_view body);

}  // namespace loupe
