#include "server/cors.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace loupe {

absl::StatusOr<CorsPolicy> CorsPolicy::Parse(const std::string& list) {
  CorsPolicy policy;
  for (const absl::string_view part : absl::StrSplit(list, ',', absl::SkipWhitespace())) {
    const std::string origin(absl::StripAsciiWhitespace(part));
    if (origin == "*") {
      policy.any_ = true;
      continue;
    }
    const size_t host = origin.find("://");
    const bool fits = host != std::string::npos && host > 0 && host + 3 < origin.size() &&
                      origin.find_first_of("/?# ", host + 3) == std::string::npos;
    if (!fits) {
      return absl::InvalidArgumentError(
          absl::StrCat("--cors-origins: '", origin, "' is no origin; write https://HOST or https://HOST:PORT, without a path, or *"));
    }
    policy.origins_.push_back(origin);
  }
  return policy;
}

CorsPolicy::Headers CorsPolicy::AnswerHeaders(const std::string& origin) const {
  if (origin.empty()) return {};
  const auto same = [&](const std::string& listed) { return absl::EqualsIgnoreCase(listed, origin); };
  const bool listed = std::any_of(origins_.begin(), origins_.end(), same);
  if (!any_ && !listed) return {};
  Headers headers = {{"Access-Control-Allow-Origin", any_ ? "*" : origin},
                     {"Access-Control-Expose-Headers", "X-Request-Id, Retry-After"}};
  if (!any_) headers.emplace_back("Vary", "Origin");
  return headers;
}

CorsPolicy::Headers CorsPolicy::PreflightHeaders(const std::string& methods) {
  // A star does not stand for Authorization.
  return {{"Access-Control-Allow-Methods", methods},
          {"Access-Control-Allow-Headers", "Authorization, *"},
          {"Access-Control-Max-Age", "600"}};
}

}  // namespace loupe
