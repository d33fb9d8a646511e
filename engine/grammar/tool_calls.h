// Calls that a model has to make, in the form that its format writes them: as the parser of answers reads them
// (engine/text/answer_parser.h), with arguments that satisfy the tool's schema.
#pragma once

#include <string>
#include <string_view>

#include "engine/grammar/json_text.h"

namespace loupe::grammar {

inline constexpr int kMaxCalls = 16;  // of one answer that has to call

// `calls` is {"format": "hermes" or "llama", "parallel": whether there may be several, "tools": [{"name", "parameters": schema}]}.
// Refusal: "<tool>: <path>: <why>".
void AddToolCalls(NfaBuilder& nfa, StateId from, std::string_view calls, StateId to);

}  // namespace loupe::grammar
