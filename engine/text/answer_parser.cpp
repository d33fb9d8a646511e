#include "engine/text/answer_parser.h"

#include <algorithm>
#include <utility>

#include "nlohmann/json.hpp"

namespace loupe {
namespace {

using Kind = AnswerPiece::Kind;

constexpr std::string_view kThink = "<think>", kEndThink = "</think>";
constexpr std::string_view kOpenCall = "<tool_call>", kCloseCall = "</tool_call>", kPythonTag = "<|python_tag|>";
constexpr std::string_view kChannel = "<|channel|>", kMessage = "<|message|>", kStartTurn = "<|start|>", kEnd = "<|end|>",
                           kCallEnd = "<|call|>", kReturn = "<|return|>";

bool IsSpace(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
bool IsName(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-'; }

bool MayBecome(std::string_view text, std::string_view tag) { return text.size() < tag.size() && tag.starts_with(text); }

// key="value", key=1 and the like, as Python writes them; null if they are something else.
nlohmann::ordered_json KeywordArguments(std::string_view text) {
  auto out = nlohmann::ordered_json::object();
  while (true) {
    while (!text.empty() && (IsSpace(text[0]) || text[0] == ',')) text.remove_prefix(1);
    if (text.empty()) return out;
    const size_t equals = text.find('=');
    const std::string_view key = text.substr(0, std::min(equals, text.size()));
    if (equals == std::string_view::npos || key.empty() || !std::all_of(key.begin(), key.end(), IsName)) return nullptr;
    text.remove_prefix(equals + 1);
    // Up to a comma outside of quotes and brackets.
    size_t end = 0;
    char quote = 0;
    int depth = 0;
    for (; end < text.size() && (quote != 0 || depth > 0 || text[end] != ','); ++end) {
      const char c = text[end];
      if (quote != 0) {
        if (c == '\\') ++end;
        else if (c == quote) quote = 0;
      } else if (c == '"' || c == '\'') {
        quote = c;
      } else {
        depth += c == '[' || c == '{' || c == '(' ? 1 : c == ']' || c == '}' || c == ')' ? -1 : 0;
      }
    }
    std::string value(text.substr(0, std::min(end, text.size())));
    text.remove_prefix(std::min(end, text.size()));
    while (!value.empty() && IsSpace(value.back())) value.pop_back();
    if (value == "True" || value == "False") value[0] = static_cast<char>(value[0] | 32);
    if (value == "None") value = "null";
    if (value.size() >= 2 && value.front() == '\'' && value.back() == '\'') {
      out[std::string(key)] = value.substr(1, value.size() - 2);
      continue;
    }
    auto parsed = nlohmann::ordered_json::parse(value, nullptr, false);
    if (parsed.is_discarded()) return nullptr;
    out[std::string(key)] = std::move(parsed);
  }
}

}  // namespace

ToolFormat ToolFormatOf(std::string_view source) {
  const auto mentions = [&](std::string_view what) { return source.find(what) != std::string_view::npos; };
  if (mentions(kChannel) && mentions(kMessage)) return ToolFormat::kHarmony;
  if (mentions(kOpenCall)) return ToolFormat::kHermes;
  if (mentions("<|start_header_id|>") && (mentions(kPythonTag) || mentions("ipython") || mentions("\"parameters\"")))
    return ToolFormat::kLlamaJson;
  return ToolFormat::kHermes;
}

const char* ToolFormatName(ToolFormat format) {
  return format == ToolFormat::kHermes ? "hermes" : format == ToolFormat::kLlamaJson ? "llama" : "harmony";
}

std::optional<ToolFormat> ParseToolFormat(std::string_view name) {
  for (const ToolFormat format : {ToolFormat::kHermes, ToolFormat::kLlamaJson, ToolFormat::kHarmony}) {
    if (name == ToolFormatName(format)) return format;
  }
  return std::nullopt;
}

AnswerParser::AnswerParser(AnswerParserOptions options)
    : options_(std::move(options)), state_(options_.begins_in_reasoning ? State::kReasoning : State::kStart) {
  first_line_end_ = options_.begins_in_reasoning;
}

void AnswerParser::Say(Kind kind, std::string text) {
  if (kind == Kind::kContent && skip_space_) {
    text.erase(0, std::min(text.find_first_not_of(" \t\r\n"), text.size()));
    if (!text.empty()) skip_space_ = false;
  }
  if (kind == Kind::kReasoning && first_line_end_ && !text.empty()) {
    first_line_end_ = false;
    if (text[0] == '\n') text.erase(0, 1);
  }
  if (text.empty()) return;
  const bool call = kind == Kind::kCall || kind == Kind::kArguments;
  if (call && !options_.parallel && num_calls_ > 1) return;
  if (!out_.empty() && kind != Kind::kCall && out_.back().kind == kind) {
    out_.back().text += text;
  } else {
    out_.push_back({kind, std::move(text), call ? num_calls_ - 1 : -1});
  }
}

bool AnswerParser::TakeUntil(const std::vector<std::string_view>& tags, Kind kind, std::string_view* found, bool last) {
  size_t at = 0;
  for (; at < buffer_.size(); ++at) {
    const std::string_view rest = std::string_view(buffer_).substr(at);
    const auto whole = std::find_if(tags.begin(), tags.end(), [&](std::string_view tag) { return rest.starts_with(tag); });
    const bool may = !last && std::any_of(tags.begin(), tags.end(), [&](std::string_view tag) { return MayBecome(rest, tag); });
    if (whole != tags.end()) *found = *whole;
    if (whole == tags.end() && !may) continue;
    Say(kind, buffer_.substr(0, at));
    buffer_.erase(0, at);
    return whole != tags.end();
  }
  Say(kind, std::exchange(buffer_, {}));
  return false;
}

void AnswerParser::BeginCall() {
  state_ = State::kCall;
  raw_.clear();
  scanner_.emplace();
  told_name_ = false;
}

// Each step returns whether it came further.
bool AnswerParser::StepStart(bool last) {
  size_t at = 0;
  while (at < buffer_.size() && IsSpace(buffer_[at])) ++at;
  const std::string_view rest = std::string_view(buffer_).substr(at);
  if (rest.empty() && !last) return false;
  if (options_.format == ToolFormat::kHarmony) {
    if (!last && (MayBecome(rest, kChannel) || MayBecome(rest, kStartTurn))) return false;
    state_ = rest.starts_with(kChannel) || rest.starts_with(kStartTurn) ? State::kHeader : State::kText;
    if (state_ == State::kHeader) buffer_.erase(0, at);
    return true;
  }
  if (options_.reasoning) {
    if (MayBecome(rest, kThink) && !last) return false;
    if (rest.starts_with(kThink)) {
      buffer_.erase(0, at + kThink.size());
      state_ = State::kReasoning;
      first_line_end_ = true;
      return true;
    }
  }
  if (options_.format == ToolFormat::kLlamaJson && !options_.tools.empty()) {
    if (MayBecome(rest, kPythonTag) && !last) return false;
    if (rest.starts_with(kPythonTag)) {
      buffer_.erase(0, at + kPythonTag.size());
      return true;
    }
    if (rest.starts_with('{')) {
      raw_ = buffer_.substr(0, at);
      buffer_.erase(0, at);
      const std::string space = raw_;
      BeginCall();
      raw_ = space;
      return true;
    }
    size_t name = 0;
    while (name < rest.size() && IsName(rest[name])) ++name;
    constexpr std::string_view kDotCall = ".call(";
    const bool known = options_.tools.contains(std::string(rest.substr(0, name)));
    if (known && rest.substr(name).starts_with(kDotCall)) return state_ = State::kPython, true;
    const bool may = name == rest.size() ? std::any_of(options_.tools.begin(), options_.tools.end(),
                                                       [&](const std::string& t) { return t.starts_with(rest); })
                                         : known && MayBecome(rest.substr(name), kDotCall);
    if (may && !last) return false;
  }
  state_ = State::kText;
  return true;
}

bool AnswerParser::StepText(bool last) {
  std::string_view found;
  if (options_.format == ToolFormat::kHarmony) {
    const Kind kind = channel_ == "analysis" ? Kind::kReasoning : Kind::kContent;
    if (!TakeUntil({kEnd, kReturn, kCallEnd, kStartTurn, kChannel}, kind, &found, last)) return false;
    if (found == kEnd || found == kReturn || found == kCallEnd) {
      buffer_.erase(0, found.size());
      return true;
    }
    state_ = State::kHeader;
    return true;
  }
  std::vector<std::string_view> tags;
  if (options_.format == ToolFormat::kHermes && !options_.tools.empty()) tags.push_back(kOpenCall);
  if (!TakeUntil(tags, Kind::kContent, &found, last)) return false;
  buffer_.erase(0, found.size());
  BeginCall();
  raw_ = kOpenCall;
  return true;
}

bool AnswerParser::StepReasoning(bool last) {
  std::string_view found;
  if (!TakeUntil({kEndThink}, Kind::kReasoning, &found, last)) return false;
  buffer_.erase(0, found.size());
  state_ = State::kStart;
  options_.reasoning = false;
  skip_space_ = true;
  return true;
}

bool AnswerParser::StepCall(bool) {
  if (buffer_.empty()) return false;
  // Byte by byte until it is clear whether this is a call, so that no cut of the text makes a difference.
  const bool bare = options_.format == ToolFormat::kLlamaJson;
  size_t taken = 0;
  bool unknown = false;
  const auto open = [&] { return !unknown && !scanner_->begun() && scanner_->state() == CallScanner::State::kOpen; };
  while (!told_name_ && taken < buffer_.size() && open()) {
    scanner_->Push(std::string_view(buffer_).substr(taken++, 1));
    unknown = bare && scanner_->has_name() && !options_.tools.contains(scanner_->name());
  }
  if (told_name_) taken = scanner_->Push(buffer_);
  if (!told_name_) raw_ += buffer_.substr(0, taken);
  buffer_.erase(0, taken);
  if (!told_name_ && (unknown || scanner_->state() == CallScanner::State::kFailed)) {
    Say(Kind::kContent, std::exchange(raw_, {}));
    state_ = State::kText;
    return true;
  }
  if (!told_name_ && scanner_->begun()) {
    told_name_ = true;
    ++num_calls_;
    Say(Kind::kCall, scanner_->name());
  }
  if (!told_name_) return false;
  Say(Kind::kArguments, scanner_->TakeArguments());
  if (scanner_->state() == CallScanner::State::kOpen) return !buffer_.empty();
  state_ = State::kAfterCall;
  skip_space_ = true;
  return true;
}

bool AnswerParser::StepAfterCall(bool last) {
  size_t at = 0;
  while (at < buffer_.size() && (IsSpace(buffer_[at]) || buffer_[at] == ';')) ++at;
  const std::string_view rest = std::string_view(buffer_).substr(at);
  if (options_.format == ToolFormat::kLlamaJson) {
    if (rest.empty() || (MayBecome(rest, kPythonTag) && !last)) return false;
    buffer_.erase(0, at);
    state_ = State::kStart;
    return true;
  }
  // Whatever stands before the closing tag belongs to a call that went wrong.
  const size_t close = buffer_.find(kCloseCall);
  if (close == std::string::npos) return false;
  buffer_.erase(0, close + kCloseCall.size());
  state_ = State::kText;
  return true;
}

// "<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>"
bool AnswerParser::StepHeader(bool) {
  const size_t message = buffer_.find(kMessage);
  if (message == std::string::npos) return false;
  const std::string header = buffer_.substr(0, message);
  buffer_.erase(0, message + kMessage.size());
  const size_t channel = header.find(kChannel);
  channel_.clear();
  for (size_t i = channel == std::string::npos ? header.size() : channel + kChannel.size(); i < header.size() && IsName(header[i]); ++i)
    channel_ += header[i];
  constexpr std::string_view kTo = "to=functions.";
  const size_t to = header.find(kTo);
  state_ = State::kText;
  if (to == std::string::npos) return true;
  std::string name;
  for (size_t i = to + kTo.size(); i < header.size() && (IsName(header[i]) || header[i] == '.'); ++i) name += header[i];
  if (name.empty() || options_.tools.empty()) return true;
  ++num_calls_;
  Say(Kind::kCall, name);
  state_ = State::kCall;
  return true;
}

void AnswerParser::EndPython() {
  const std::string text = std::exchange(buffer_, {});
  const size_t begin = text.find_first_not_of(" \t\r\n"), open = text.find(".call("), close = text.rfind(')');
  const auto arguments = close == std::string::npos || close < open
                             ? nlohmann::ordered_json()
                             : KeywordArguments(std::string_view(text).substr(open + 6, close - open - 6));
  if (arguments.is_null()) return Say(Kind::kContent, text);
  ++num_calls_;
  Say(Kind::kCall, text.substr(begin, open - begin));
  Say(Kind::kArguments, arguments.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

std::vector<AnswerPiece> AnswerParser::Run(bool last) {
  const auto step = [&] {
    switch (state_) {
      case State::kStart: return StepStart(last);
      case State::kText: return StepText(last);
      case State::kReasoning: return StepReasoning(last);
      case State::kCall: {
        if (options_.format != ToolFormat::kHarmony) return StepCall(last);
        std::string_view found;
        if (!TakeUntil({kCallEnd, kEnd, kReturn, kStartTurn}, Kind::kArguments, &found, last)) return false;
        if (found != kStartTurn) buffer_.erase(0, found.size());
        state_ = State::kStart;
        return true;
      }
      case State::kAfterCall: return StepAfterCall(last);
      case State::kHeader: return StepHeader(last);
      case State::kPython: return false;
    }
    return false;
  };
  while (step()) {
  }
  return std::exchange(out_, {});
}

std::vector<AnswerPiece> AnswerParser::Push(std::string_view text) {
  buffer_ += text;
  return Run(false);
}

std::vector<AnswerPiece> AnswerParser::Finish() {
  out_ = Run(true);
  if (state_ == State::kPython) EndPython();
  // A call whose name never came is text after all.
  if (state_ == State::kCall && options_.format != ToolFormat::kHarmony && !told_name_) Say(Kind::kContent, std::exchange(raw_, {}));
  return std::exchange(out_, {});
}

}  // namespace loupe
