// Which handler answers a path. Filled before the server starts, read-only afterwards.
#pragma once

#include <string>
#include <vector>

#include "server/http_message.h"

namespace loupe {

class HttpRouter {
 public:
  // `pattern` may hold one {id}, which stands for any non-empty text, slashes included (models are called org/name).
  void Add(const std::string& method, const std::string& pattern, HttpHandler handler);
  // Of a route that is answered without an API key.
  void AddOpen(const std::string& method, const std::string& pattern, HttpHandler handler);

  struct Match {
    const HttpHandler* handler = nullptr;  // null: nobody answers this method here
    std::string parameter;                 // of {id}, percent-decoded
    std::string allowed;                   // methods of this path, "GET, HEAD"; empty: no such path
    bool open = false;                     // needs no API key
  };
  // HEAD is answered by GET's handler.
  Match Find(const std::string& method, const std::string& path) const;

  // "POST /v1/completions, GET /health", for the 404 that names what exists.
  std::string Offered() const;

 private:
  struct Route {
    std::string method, pattern;
    HttpHandler handler;
    bool open = false;
  };
  std::vector<Route> routes_;
};

// %41 to A; a % without two hex digits stays as it is.
std::string PercentDecode(std::string_view text);

}  // namespace loupe
