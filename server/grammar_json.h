// What an answer may be, as requests say it: response_format, regex, choice. Pure; INVALID_ARGUMENT names the field.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "engine/grammar/grammar.h"
#include "nlohmann/json.hpp"

namespace loupe {

inline constexpr size_t kMaxChoiceStrings = 1024;
inline constexpr size_t kMaxChoiceBytes = 65'536;  // of all

// {"type": "text"} gives none.
absl::Status ReadResponseFormat(const std::string& name, const nlohmann::ordered_json& json, std::optional<GrammarSpec>* out);
absl::Status ReadRegex(const std::string& name, const nlohmann::ordered_json& json, std::optional<GrammarSpec>* out);
absl::Status ReadChoice(const std::string& name, const nlohmann::ordered_json& json, std::optional<GrammarSpec>* out);

}  // namespace loupe
