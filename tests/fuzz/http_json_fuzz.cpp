// Bodies of strangers through the parsers of both endpoints. Whatever the bytes are: no crash, no exception, and an
// error is INVALID_ARGUMENT with a message that can be sent.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "server/http_status.h"
#include "server/openai_request.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  for (const loupe::Endpoint endpoint : {loupe::Endpoint::kChat, loupe::Endpoint::kCompletion}) {
    for (const bool strict : {false, true}) {
      const auto request = loupe::ParseApiRequest(endpoint, body, strict);
      if (request.ok()) continue;
      const loupe::HttpResponse response = loupe::ErrorResponse(request.status());
      if (response.status != 400 || response.body.empty()) {
        std::fprintf(stderr, "status %d: %s\n", response.status, request.status().ToString().c_str());
        std::abort();
      }
    }
  }
  return 0;
}
