#include "server/http_status.h"

#include <cctype>
#include <string_view>

#include "server/retry_after.h"

namespace loupe {
namespace {

constexpr std::string_view kTooLong = "context_length_exceeded: ";

struct ErrorParts {
  int status = 500;
  std::string message, param, code;
};

// The field that a message opens with: "messages[0].role: is missing". Empty if it opens otherwise.
std::string LeadingField(const std::string& message) {
  const size_t colon = message.find(": ");
  if (colon == std::string::npos || colon == 0 || colon > 100) return "";
  for (const char c : message.substr(0, colon)) {
    const bool part_of_name =
        std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '[' || c == ']' || c == '-';
    if (!part_of_name) return "";
  }
  return message.substr(0, colon);
}

ErrorParts Split(const absl::Status& status) {
  ErrorParts parts;
  parts.status = HttpStatusOf(status);
  parts.message = std::string(status.message());
  if (parts.message.starts_with(kTooLong)) {
    parts.message = parts.message.substr(kTooLong.size());
    parts.code = "context_length_exceeded";
    return parts;
  }
  if (parts.status == 400 || parts.status == 404) parts.param = LeadingField(parts.message);
  if (parts.status == 404 && parts.param == "model") parts.code = "model_not_found";
  return parts;
}

}  // namespace

int HttpStatusOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kUnimplemented:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kDeadlineExceeded:
      return 408;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kCancelled:
      return 499;
    case absl::StatusCode::kUnavailable:
      return 503;
    default:
      return 500;
  }
}

HttpResponse ErrorResponse(const absl::Status& status) {
  const ErrorParts parts = Split(status);
  HttpResponse response = ErrorResponse(parts.status, parts.message, parts.param, parts.code);
  if (parts.status == 429) response.headers.emplace_back("Retry-After", std::to_string(RetryAfterOf(status).value_or(1)));
  if (parts.status == 503) response.headers.emplace_back("Retry-After", "2");
  return response;
}

nlohmann::ordered_json ErrorObject(const absl::Status& status) {
  const ErrorParts parts = Split(status);
  return ErrorObject(parts.status, parts.message, parts.param, parts.code);
}

}  // namespace loupe
