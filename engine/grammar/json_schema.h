// JSON Schema (draft 2020-12, and what earlier drafts call the same things) to states: the texts are JSON values that the
// schema accepts. What cannot be kept is refused by name, never lost in silence; docs/api.md lists both.
//
// A little narrower than the schema, never wider: properties come in the order in which they are declared, those that are
// not declared only if additionalProperties says so, and a value has the type that the schema's keywords speak of.
#pragma once

#include <string_view>

#include "engine/grammar/json_text.h"

namespace loupe::grammar {

// Refusal: "<path in the schema>: <why>".
void AddJsonSchema(NfaBuilder& nfa, StateId from, std::string_view schema, StateId to);
void AddJsonSchema(JsonText& text, StateId from, const Json& schema, StateId to);
void AddJsonObject(NfaBuilder& nfa, StateId from, StateId to);

}  // namespace loupe::grammar
