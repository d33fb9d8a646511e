// Tools of a chat: what clients send of them, what the model is told, and how its answer is taken apart. Pure, any thread;
// errors are INVALID_ARGUMENT, "<field>: <what is wrong>".
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/grammar/grammar.h"
#include "engine/text/answer_parser.h"
#include "engine/text/chat_template.h"
#include "nlohmann/json.hpp"

namespace loupe {

inline constexpr size_t kMaxTools = 128;
inline constexpr size_t kMaxToolName = 64;  // bytes

struct ToolChoice {
  enum class Kind { kNone, kAuto, kRequired, kNamed };
  Kind kind = Kind::kAuto;
  std::string name;  // kNamed
  bool forced() const { return kind == Kind::kRequired || kind == Kind::kNamed; }
};

struct ToolOptions {
  nlohmann::ordered_json tools = nlohmann::ordered_json::array();  // as OpenAI writes them; checked
  ToolChoice choice;
  bool parallel = true;
  bool active() const { return !tools.empty() && choice.kind != ToolChoice::Kind::kNone; }
};

absl::StatusOr<nlohmann::ordered_json> ParseTools(const std::string& name, const nlohmann::ordered_json& json);
absl::StatusOr<ToolChoice> ParseToolChoice(const std::string& name, const nlohmann::ordered_json& json);
// The choice fits the tools. `has_form`: the answer's form is asked for by another field, too.
absl::Status CheckTools(const ToolOptions& options, bool has_form);

// The grammar of an answer that has to call; nothing if it need not.
absl::StatusOr<std::optional<GrammarSpec>> ToolGrammar(const ToolOptions& options, ToolFormat format);
// A template that knows nothing of tools: they are told in a system message in front, in the form of ToolFormat::kHermes.
nlohmann::ordered_json WithToolMessage(const nlohmann::ordered_json& messages, const nlohmann::ordered_json& tools);
// Whether the template shows tools by itself.
bool ShowsTools(const ChatTemplate& chat_template);

// How an answer of this conversation is taken apart; nothing if it is text alone. `structured`: a grammar that is not that
// of calls holds it, so that it holds no thoughts. `prompt_end`: the last bytes of the prompt.
std::optional<AnswerParserOptions> MakeParserOptions(const ToolOptions& options, ToolFormat format, const ChatTemplate& chat_template,
                                                     bool structured, std::string_view prompt_end);

}  // namespace loupe
