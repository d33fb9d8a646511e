// The one table of the fields of /v1/chat/completions and /v1/completions: the parser reads by it, /openapi.json and
// docs/api.md are written from it. Immutable, any thread.
#pragma once

#include <span>

#include "server/openai_request.h"

namespace loupe {

enum class FieldSupport {
  kHonoured,
  kRefused,  // 400 that names the field, unless the value asks for what happens anyway
  kIgnored,  // nothing is lost: it labels the request, or asks for what happens anyway
};
enum class FieldOf { kBoth, kChat, kCompletion };

struct FieldSpec {
  const char* name;
  FieldOf of;
  FieldSupport support;
  const char* schema;  // JSON Schema of what is taken, beside null, which means absent; "null": nothing else
  const char* note;    // for people; ranges stand in the schema
  FieldReader reader;
};

std::span<const FieldSpec> ApiFields();
bool IsFieldOf(const FieldSpec& field, Endpoint endpoint);
const char* FieldSupportName(FieldSupport support);  // honoured, refused, ignored

}  // namespace loupe
