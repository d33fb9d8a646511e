#include "server/tools_json.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "server/http_json.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

absl::Status Refuse(const std::string& name, const std::string& why) { return absl::InvalidArgumentError(absl::StrCat(name, ": ", why)); }

bool IsToolName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxToolName && std::all_of(name.begin(), name.end(), [](char c) {
    return c == '_' || c == '-' || c == '.' || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
  });
}

std::set<std::string> NamesOf(const Json& tools) {
  std::set<std::string> names;
  for (const Json& tool : tools) names.insert(tool["function"]["name"].get<std::string>());
  return names;
}

}  // namespace

absl::StatusOr<Json> ParseTools(const std::string& name, const Json& json) {
  if (!json.is_array()) return Refuse(name, absl::StrCat("must be a list, got ", Describe(json)));
  if (json.size() > kMaxTools) return Refuse(name, absl::StrCat("has ", json.size(), " tools, at most ", kMaxTools));
  std::set<std::string> names;
  Json tools = Json::array();
  for (size_t i = 0; i < json.size(); ++i) {
    const std::string item = absl::StrCat(name, "[", i, "]");
    const Json& tool = json[i];
    if (!tool.is_object()) return Refuse(item, absl::StrCat("must be an object, got ", Describe(tool)));
    if (tool.value("type", Json("function")) != "function")
      return Refuse(item + ".type", "must be \"function\"; other tools are not offered");
    const Json function = tool.value("function", Json());
    if (!function.is_object()) return Refuse(item + ".function", "must be an object");
    const Json tool_name = function.value("name", Json());
    if (!tool_name.is_string() || !IsToolName(tool_name.get<std::string>())) {
      return Refuse(item + ".function.name", absl::StrCat("must be 1 to ", kMaxToolName, " letters, digits, dots, dashes and underscores"));
    }
    if (!names.insert(tool_name.get<std::string>()).second) return Refuse(item + ".function.name", "is the name of an earlier tool");
    const Json parameters = function.value("parameters", Json());
    if (!parameters.is_null() && !parameters.is_object()) return Refuse(item + ".function.parameters", "must be an object, a JSON schema");
    Json copy = {{"type", "function"}, {"function", function}};
    tools.push_back(std::move(copy));
  }
  return tools;
}

absl::StatusOr<ToolChoice> ParseToolChoice(const std::string& name, const Json& json) {
  using Kind = ToolChoice::Kind;
  if (json == "none") return ToolChoice{Kind::kNone, ""};
  if (json == "auto") return ToolChoice{Kind::kAuto, ""};
  if (json == "required") return ToolChoice{Kind::kRequired, ""};
  const Json function = json.is_object() ? json.value("function", Json()) : Json();
  const Json tool = function.is_object() ? function.value("name", Json()) : Json();
  if (tool.is_string() && json.value("type", Json("function")) == "function") return ToolChoice{Kind::kNamed, tool.get<std::string>()};
  return Refuse(name,
                absl::StrCat("must be \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": ...}}, got ",
                             Describe(json)));
}

absl::Status CheckTools(const ToolOptions& options, bool has_form) {
  const ToolChoice& choice = options.choice;
  if (choice.forced() && options.tools.empty()) return Refuse("tool_choice", "asks for a call, but there are no tools");
  if (choice.kind == ToolChoice::Kind::kNamed && !NamesOf(options.tools).contains(choice.name)) {
    return Refuse("tool_choice",
                  absl::StrCat("names '", choice.name.substr(0, 80), "', which is none of the ", options.tools.size(), " tools"));
  }
  if (has_form && options.active()) {
    return Refuse("tool_choice", "must be \"none\" if the answer's form is asked for, too (response_format, regex, choice)");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<GrammarSpec>> ToolGrammar(const ToolOptions& options, ToolFormat format) {
  if (!options.active() || !options.choice.forced()) return std::optional<GrammarSpec>();
  if (format == ToolFormat::kHarmony) {
    return absl::InvalidArgumentError("tool_choice: a call cannot be forced in the harmony format; use \"auto\"");
  }
  Json tools = Json::array();
  for (const Json& tool : options.tools) {
    const Json& function = tool["function"];
    if (options.choice.kind == ToolChoice::Kind::kNamed && function["name"] != options.choice.name) continue;
    const Json parameters = function.value("parameters", Json());
    tools.push_back({{"name", function["name"]}, {"parameters", parameters.is_null() ? Json::object() : parameters}});
  }
  // A named tool is called once.
  const bool parallel = options.parallel && options.choice.kind == ToolChoice::Kind::kRequired;
  const Json calls = {{"format", ToolFormatName(format)}, {"parallel", parallel}, {"tools", std::move(tools)}};
  return GrammarSpec{GrammarSpec::Kind::kToolCalls, DumpJson(calls), {}};
}

bool ShowsTools(const ChatTemplate& chat_template) { return chat_template.source().find("tools") != std::string::npos; }

Json WithToolMessage(const Json& messages, const Json& tools) {
  std::string text = "You can call functions. They are:\n";
  for (const Json& tool : tools) absl::StrAppend(&text, DumpJson(tool["function"]), "\n");
  text +=
      "To call one, answer with its name and arguments as JSON between tags:\n<tool_call>\n{\"name\": \"...\", \"arguments\": "
      "{...}}\n</tool_call>";
  Json out = messages;
  if (!out.empty() && out[0]["role"] == "system") {
    out[0]["content"] = absl::StrCat(out[0]["content"].get<std::string>(), "\n\n", text);
  } else {
    out.insert(out.begin(), Json{{"role", "system"}, {"content", text}});
  }
  return out;
}

std::optional<AnswerParserOptions> MakeParserOptions(const ToolOptions& options, ToolFormat format, const ChatTemplate& chat_template,
                                                     bool structured, std::string_view prompt_end) {
  AnswerParserOptions parser;
  parser.format = format;
  parser.parallel = options.parallel;
  if (options.active()) parser.tools = NamesOf(options.tools);
  parser.reasoning = !structured && !options.choice.forced() && chat_template.source().find("</think>") != std::string::npos;
  while (!prompt_end.empty() && (prompt_end.back() == '\n' || prompt_end.back() == ' ')) prompt_end.remove_suffix(1);
  parser.begins_in_reasoning = parser.reasoning && prompt_end.ends_with("<think>");
  if (parser.tools.empty() && !parser.reasoning && format != ToolFormat::kHarmony) return std::nullopt;
  return parser;
}

}  // namespace loupe
