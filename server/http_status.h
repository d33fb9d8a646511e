// The one table from absl's status codes to HTTP, and from a status to an error answer. Pure, any thread.
#pragma once

#include "absl/status/status.h"
#include "server/http_message.h"

namespace loupe {

int HttpStatusOf(const absl::Status& status);

// The answer for a status: "<field>: ..." fills `param`, a prompt that is too long and an unknown model get OpenAI's
// `code`, 429 and 503 say when to try again.
HttpResponse ErrorResponse(const absl::Status& status);
// The same error as the object that goes into a stream that has begun.
nlohmann::ordered_json ErrorObject(const absl::Status& status);

}  // namespace loupe
