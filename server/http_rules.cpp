#include "server/http_rules.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

namespace http = boost::beast::http;

std::string Quote(boost::beast::string_view value) {
  return absl::StrCat("'", std::string(value.data(), std::min<size_t>(value.size(), 60)), "'");
}

}  // namespace

std::optional<HttpRefusal> CheckHead(const http::request_header<>& head) {
  const size_t hosts = head.count(http::field::host);
  if (hosts > 1 || (hosts == 0 && head.version() >= 11)) {
    return HttpRefusal{400, absl::StrCat("the request has ", hosts, " Host headers; HTTP/1.1 asks for exactly 1")};
  }
  const size_t codings = head.count(http::field::transfer_encoding), lengths = head.count(http::field::content_length);
  if (codings > 0 && lengths > 0) {
    return HttpRefusal{400, "the request has both Content-Length and Transfer-Encoding; send one of them"};
  }
  if (lengths > 1) return HttpRefusal{400, absl::StrCat("the request has ", lengths, " Content-Length headers; send 1")};
  const auto length = head[http::field::content_length];
  if (length.find_first_not_of("0123456789") != length.npos) {  // the parser would take "5, 5" for 5
    return HttpRefusal{400, absl::StrCat("the Content-Length ", Quote(length), " is no number of bytes")};
  }
  if (codings > 0) {
    const auto value = head[http::field::transfer_encoding];
    if (codings > 1 || head.version() < 11 || !absl::EqualsIgnoreCase({value.data(), value.size()}, "chunked")) {
      return HttpRefusal{400, absl::StrCat("the Transfer-Encoding ", Quote(value), " (", codings,
                                           " headers) does not say where the body ends; only 'chunked' of HTTP/1.1 does")};
    }
  }
  const auto expect = head[http::field::expect];
  if (!expect.empty() && !absl::EqualsIgnoreCase({expect.data(), expect.size()}, "100-continue")) {
    return HttpRefusal{417, absl::StrCat("Expect ", Quote(expect), " cannot be met; only 100-continue can")};
  }
  return std::nullopt;
}

std::string PathOf(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!absl::StartsWithIgnoreCase({target.data(), target.size()}, {scheme.data(), scheme.size()})) continue;
    const size_t slash = target.find_first_of("/?#", scheme.size());
    target = slash == std::string_view::npos || target[slash] != '/' ? "/" : target.substr(slash);
    break;
  }
  return std::string(target.substr(0, target.find_first_of("?#")));
}

}  // namespace loupe
