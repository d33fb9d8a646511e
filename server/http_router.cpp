#include "server/http_router.h"

#include <optional>

namespace loupe {
namespace {

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// The text of {id}, empty if the pattern has none; nothing if the path does not fit.
std::optional<std::string> FitPattern(std::string_view pattern, std::string_view path) {
  const size_t hole = pattern.find("{id}");
  if (hole == std::string_view::npos) {
    if (path == pattern) return "";
    return std::nullopt;
  }
  const std::string_view before = pattern.substr(0, hole), after = pattern.substr(hole + 4);
  if (path.size() <= before.size() + after.size()) return std::nullopt;
  if (!path.starts_with(before) || !path.ends_with(after)) return std::nullopt;
  return PercentDecode(path.substr(before.size(), path.size() - before.size() - after.size()));
}

}  // namespace

std::string PercentDecode(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && HexDigit(text[i + 1]) >= 0 && HexDigit(text[i + 2]) >= 0) {
      out.push_back(static_cast<char>(HexDigit(text[i + 1]) * 16 + HexDigit(text[i + 2])));
      i += 2;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

void HttpRouter::Add(const std::string& method, const std::string& pattern, HttpHandler handler) {
  routes_.push_back({method, pattern, std::move(handler), false});
}

void HttpRouter::AddOpen(const std::string& method, const std::string& pattern, HttpHandler handler) {
  routes_.push_back({method, pattern, std::move(handler), true});
}

HttpRouter::Match HttpRouter::Find(const std::string& method, const std::string& path) const {
  const std::string wanted = method == "HEAD" ? "GET" : method;
  Match match;
  for (const Route& route : routes_) {
    const auto parameter = FitPattern(route.pattern, path);
    if (!parameter) continue;
    if (!match.allowed.empty()) match.allowed += ", ";
    match.allowed += route.method == "GET" ? "GET, HEAD" : route.method;
    if (match.handler == nullptr && route.method == wanted) {
      match.handler = &route.handler;
      match.open = route.open;
      match.parameter = *parameter;
    }
  }
  return match;
}

std::string HttpRouter::Offered() const {
  std::string text;
  for (const Route& route : routes_) text += (text.empty() ? "" : ", ") + route.method + " " + route.pattern;
  return text;
}

}  // namespace loupe
