// JSON bodies of /v1/chat/completions and /v1/completions to what the engine takes. Every field that OpenAI's clients
// can send is honoured, or refused by name if its effect would be silently lost; unknown fields are ignored unless
// strict. Needs neither engine nor model. Pure, any thread; errors are INVALID_ARGUMENT, "<field>: <what is wrong>".
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/grammar/grammar.h"
#include "engine/request.h"
#include "nlohmann/json.hpp"
#include "server/tools_json.h"

namespace loupe {

enum class Endpoint { kChat, kCompletion };

inline constexpr int kMaxPrompts = 128;       // in one completion request
inline constexpr int kMaxChoices = 256;       // prompts times n
inline constexpr int64_t kMaxTimeoutMs = 86'400'000;  // a day
inline constexpr int kDefaultMaxTokens = 16;  // of /v1/completions, OpenAI's; chat goes on to the end of the context

struct ApiPrompt {
  bool is_text = true;
  std::string text;
  std::vector<int32_t> ids;
};

struct ApiRequest {
  Endpoint endpoint = Endpoint::kChat;
  std::string model;       // empty: the one that is served
  Request engine;          // all but id, prompt, grammar, arrival and deadline
  std::optional<GrammarSpec> grammar;  // what the answer may be, and the field that said so
  std::string grammar_field;
  int64_t timeout_ms = 0;  // 0: none

  bool stream = false;
  bool include_usage = false;     // stream_options: a last chunk with usage
  bool continuous_usage = false;  // and token counts in every chunk
  bool return_token_ids = false;
  bool logprobs = false;
  int top_logprobs = 0;
  int prompt_logprobs = -1;  // so many best beside each prompt token; -1: not shown
  std::optional<bool> add_special_tokens;  // of raw text; default as the model wants

  // Chat. Messages are normalised: content is one string, roles are checked.
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  nlohmann::ordered_json template_kwargs = nlohmann::ordered_json::object();
  std::optional<bool> add_generation_prompt;
  bool continue_final_message = false;
  ToolOptions tools;

  // Completion, or prompt_token_ids.
  std::vector<ApiPrompt> prompts;
  bool echo = false;
};

absl::StatusOr<ApiRequest> ParseApiRequest(Endpoint endpoint, std::string_view body, bool strict_fields);

// The conversation of a chat as a whole: messages, template variables and continue_final_message fit together.
absl::Status CheckConversation(const ApiRequest& request);

// The messages of a chat, checked and normalised. `name` is the field's, for error messages.
absl::StatusOr<nlohmann::ordered_json> ParseMessages(const std::string& name, const nlohmann::ordered_json& messages);

// One field of a body; openai_fields.h has the table. Null when no field of that name is known at this endpoint.
using FieldReader = absl::Status (*)(const std::string& name, const nlohmann::ordered_json& value, ApiRequest* request);
FieldReader FindField(Endpoint endpoint, const std::string& name);

}  // namespace loupe
