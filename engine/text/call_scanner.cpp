#include "engine/text/call_scanner.h"

#include <utility>

#include "nlohmann/json.hpp"

namespace loupe {
namespace {

bool IsSpace(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// What a string in quotes says; false if it is none.
bool Unquote(const std::string& quoted, std::string* out) {
  const auto json = nlohmann::json::parse(quoted, nullptr, false);
  if (!json.is_string()) return false;
  *out = json.get<std::string>();
  return true;
}

}  // namespace

size_t CallScanner::Push(std::string_view text) {
  size_t taken = 0;
  while (taken < text.size() && state_ == State::kOpen) Step(text[taken++]);
  return taken;
}

std::string CallScanner::TakeArguments() {
  if (hands_out()) arguments_ += std::exchange(value_, {});
  return std::exchange(arguments_, {});
}

void CallScanner::Step(char c) {
  if (at_ == At::kInValue) return InValue(c);
  if (at_ == At::kKey) {
    key_ += c;
    if (!escaped_ && c == '"') at_ = At::kColon;
    escaped_ = !escaped_ && c == '\\';
    return;
  }
  if (IsSpace(c)) return;
  switch (at_) {
    case At::kBegin:
      if (c == '{') return void(at_ = At::kKeyOrEnd);
      break;
    case At::kKeyOrEnd:
      if (c == '"') return key_ = c, void(at_ = At::kKey);
      break;
    case At::kColon:
      if (c == ':') return void(at_ = At::kValue);
      break;
    case At::kValue: return BeginValue(c);
    case At::kCommaOrEnd:
      if (c == ',') return void(at_ = At::kKeyOrEnd);
      if (c == '}' && has_name_) {
        if (!has_arguments_) arguments_ = "{}";
        return void(state_ = State::kDone);
      }
      break;
    default: break;
  }
  state_ = State::kFailed;
}

void CallScanner::BeginValue(char c) {
  const bool is_name = key_ == "\"name\"";
  is_arguments_ = key_ == "\"arguments\"" || key_ == "\"parameters\"";
  const bool passed_over = key_ == "\"type\"" || key_ == "\"id\"";
  const bool twice = (is_name && has_name_) || (is_arguments_ && has_arguments_);
  quoted_ = c == '"';
  if ((!is_name && !is_arguments_ && !passed_over) || twice || (is_name && !quoted_) ||
      (is_arguments_ && !quoted_ && c != '{' && c != 'n')) {
    state_ = State::kFailed;
    return;
  }
  value_ = c;
  at_ = At::kInValue;
  in_string_ = quoted_;
  escaped_ = false;
  literal_ = !quoted_ && c != '{' && c != '[';
  depth_ = c == '{' || c == '[' ? 1 : 0;
}

void CallScanner::InValue(char c) {
  if (literal_ && (c == ',' || c == '}' || IsSpace(c))) {
    EndValue();
    if (state_ == State::kOpen) Step(c);
    return;
  }
  value_ += c;
  if (in_string_) {
    if (!escaped_ && c == '"') {
      in_string_ = false;
      if (depth_ == 0) EndValue();
    }
    escaped_ = !escaped_ && c == '\\';
    return;
  }
  if (c == '"') in_string_ = true, escaped_ = false;
  if (c == '{' || c == '[') ++depth_;
  if ((c == '}' || c == ']') && --depth_ == 0) EndValue();
}

void CallScanner::EndValue() {
  at_ = At::kCommaOrEnd;
  if (is_arguments_) {
    has_arguments_ = true;
    if (quoted_ && !Unquote(value_, &value_)) state_ = State::kFailed;
    if (literal_) {
      if (value_ != "null") state_ = State::kFailed;
      value_ = "{}";
    }
    arguments_ += std::exchange(value_, {});
  } else if (key_ == "\"name\"") {
    has_name_ = Unquote(value_, &name_) && !name_.empty();
    if (!has_name_) state_ = State::kFailed;
  }
}

}  // namespace loupe
