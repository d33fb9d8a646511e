// GET /openapi.json: what the main listener takes and answers, as OpenAPI 3.1. Request fields come from the table that the
// parser reads by; the routes are checked against the router's by a test. Pure, any thread.
#pragma once

#include "nlohmann/json.hpp"

namespace loupe {

// `with_keys`: the server asks for API keys.
nlohmann::ordered_json OpenApiDocument(bool with_keys);

}  // namespace loupe
