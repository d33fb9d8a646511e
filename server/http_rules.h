// What RFC 9112 asks of a request's head beyond its syntax, which the parser checks: how its body is framed, Host, Expect.
// Two readers that disagree about where a request ends are how requests get smuggled, so whatever leaves room for a
// second reading is refused and the connection closed. Pure, any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "boost/beast/http/message.hpp"

namespace loupe {

struct HttpRefusal {
  int status = 400;
  std::string why;
};

// Nothing: the head is in order.
std::optional<HttpRefusal> CheckHead(const boost::beast::http::request_header<>& head);

// The path of a target, "/a/b?c" or "http://host/a/b?c" (RFC 9112 3.2), without query.
std::string PathOf(std::string_view target);

}  // namespace loupe
