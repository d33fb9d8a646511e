// Which web pages may call: --cors-origins. Browsers enforce it by the headers made here. Immutable, any thread.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace loupe {

class CorsPolicy {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;

  // Origins as browsers send them ("https://app.example.org", with port if not the default), separated by commas; "*"
  // lets every page in; empty: none. INVALID_ARGUMENT names the entry that is no origin.
  static absl::StatusOr<CorsPolicy> Parse(const std::string& list);

  // Of an answer to a page of `origin`: empty if it may not read it.
  Headers AnswerHeaders(const std::string& origin) const;
  // Beside those, of the answer to OPTIONS by which the browser asks beforehand; `methods` are those of the route.
  static Headers PreflightHeaders(const std::string& methods);

 private:
  bool any_ = false;
  std::vector<std::string> origins_;
};

}  // namespace loupe
