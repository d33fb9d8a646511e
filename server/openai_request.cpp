#include "server/openai_request.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/validate.h"
#include "server/http_json.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

absl::Status Refuse(const std::string& name, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", why));
}

// A string, or a list of {"type": "text", "text": ...}, which are joined by line ends.
absl::StatusOr<std::string> ReadContent(const std::string& name, const Json& content) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) {
    return Refuse(name, absl::StrCat("must be a string or a list of parts {\"type\": \"text\", \"text\": ...}, got ",
                                     Describe(content)));
  }
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string part_name = absl::StrCat(name, "[", i, "]");
    const Json& part = content[i];
    if (!part.is_object()) return Refuse(part_name, absl::StrCat("must be an object, got ", Describe(part)));
    const auto type = part.find("type");
    if (type == part.end() || !type->is_string()) return Refuse(part_name + ".type", "must be a string");
    if (*type != "text" && *type != "input_text") {
      return Refuse(part_name + ".type",
                    absl::StrCat(DumpJson(*type).substr(0, 60), " is not offered, this model reads text only"));
    }
    const auto part_text = part.find("text");
    if (part_text == part.end() || !part_text->is_string()) return Refuse(part_name + ".text", "must be a string");
    if (i > 0) text += "\n";
    text += part_text->get<std::string>();
  }
  return text;
}

// Calls that the assistant made earlier in the conversation. Arguments become an object, as templates expect.
absl::StatusOr<Json> ReadToolCalls(const std::string& name, const Json& calls) {
  if (!calls.is_array()) return Refuse(name, absl::StrCat("must be a list, got ", Describe(calls)));
  Json out = Json::array();
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string path = absl::StrCat(name, "[", i, "].function");
    const Json& call = calls[i];
    if (!call.is_object() || !call.contains("function") || !call["function"].is_object())
      return Refuse(path, "must be an object");
    const Json& function = call["function"];
    if (!function.contains("name") || !function["name"].is_string()) return Refuse(path + ".name", "must be a string");
    Json copy = call;
    if (const auto arguments = function.find("arguments"); arguments != function.end() && arguments->is_string()) {
      auto parsed = ParseJson(arguments->get<std::string>());
      if (!parsed.ok()) return Refuse(path + ".arguments", "is not valid JSON");
      copy["function"]["arguments"] = *std::move(parsed);
    }
    out.push_back(std::move(copy));
  }
  return out;
}

absl::StatusOr<Json> ReadMessage(const std::string& name, const Json& message) {
  if (!message.is_object()) return Refuse(name, absl::StrCat("must be an object, got ", Describe(message)));
  static const char* const kRoles[] = {"system", "user", "assistant", "tool", "developer"};
  const auto role = message.find("role");
  if (role == message.end())
    return Refuse(name + ".role", "is missing; roles are system, user, assistant, tool, developer");
  if (!role->is_string() ||
      std::find(std::begin(kRoles), std::end(kRoles), role->get_ref<const std::string&>()) == std::end(kRoles)) {
    return Refuse(name + ".role", absl::StrCat("is ", DumpJson(*role).substr(0, 60),
                                               ", must be system, user, assistant, tool or developer"));
  }
  Json out = {{"role", *role}};
  const auto present = [&](const char* key) {
    const auto found = message.find(key);
    return found != message.end() && !found->is_null() ? &*found : nullptr;
  };
  const Json* calls = present("tool_calls");
  if (calls != nullptr && *role != "assistant") return Refuse(name + ".tool_calls", "belongs to role assistant only");
  const Json* content = present("content");
  if (content == nullptr && calls == nullptr) return Refuse(name + ".content", "is missing");
  out["content"] = "";
  if (content != nullptr) {
    auto text = ReadContent(name + ".content", *content);
    if (!text.ok()) return text.status();
    out["content"] = *std::move(text);
  }
  if (calls != nullptr) {
    auto read = ReadToolCalls(name + ".tool_calls", *calls);
    if (!read.ok()) return read.status();
    if (!read->empty()) out["tool_calls"] = *std::move(read);
  }
  for (const char* key : {"name", "tool_call_id", "reasoning_content"}) {
    const Json* value = present(key);
    if (value == nullptr) continue;
    if (!value->is_string())
      return Refuse(absl::StrCat(name, ".", key), absl::StrCat("must be a string, got ", Describe(*value)));
    out[key] = *value;
  }
  if (present("audio") != nullptr) return Refuse(name + ".audio", "is not offered, this model reads text only");
  return out;
}

absl::Status CheckChat(const ApiRequest& r) {
  if (auto status = CheckTools(r.tools, r.grammar.has_value()); !status.ok()) return status;
  if (r.tools.active() && !r.prompts.empty()) return Refuse("tools", "need messages; with prompt_token_ids the prompt has to show them");
  if (!r.prompts.empty() && !r.messages.empty())
    return Refuse("prompt_token_ids", "excludes messages; send one of them");
  if (r.top_logprobs > 0 && !r.logprobs) return Refuse("top_logprobs", "needs \"logprobs\": true");
  return r.prompts.empty() ? CheckConversation(r) : absl::OkStatus();
}

absl::Status CheckCompletion(const ApiRequest& r) {
  if (r.prompts.empty()) return Refuse("prompt", "is missing");
  const int64_t choices = static_cast<int64_t>(r.prompts.size()) * r.engine.n;
  if (choices <= kMaxChoices) return absl::OkStatus();
  return Refuse("n", absl::StrCat(r.prompts.size(), " prompts times n of ", r.engine.n, " make ", choices,
                                  " choices, at most ", kMaxChoices, " go into one request"));
}

}  // namespace

absl::Status CheckConversation(const ApiRequest& r) {
  if (r.messages.empty()) return Refuse("messages", "is missing");
  if (r.template_kwargs.contains("messages")) {
    return Refuse("chat_template_kwargs.messages", "would replace the conversation");
  }
  if (!r.continue_final_message) return absl::OkStatus();
  if (r.add_generation_prompt.value_or(false)) {
    return Refuse("continue_final_message",
                  "excludes add_generation_prompt: one continues the last message, the other opens a new one");
  }
  const bool assistant = !r.messages.empty() && r.messages.back()["role"] == "assistant";
  return assistant ? absl::OkStatus() : Refuse("continue_final_message", "the last message must be the assistant's");
}

absl::StatusOr<Json> ParseMessages(const std::string& name, const Json& messages) {
  if (!messages.is_array()) return Refuse(name, absl::StrCat("must be a list, got ", Describe(messages)));
  if (messages.empty()) return Refuse(name, "must not be empty");
  Json out = Json::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    auto message = ReadMessage(absl::StrCat(name, "[", i, "]"), messages[i]);
    if (!message.ok()) return message.status();
    out.push_back(*std::move(message));
  }
  return out;
}

absl::StatusOr<ApiRequest> ParseApiRequest(Endpoint endpoint, std::string_view body, bool strict_fields) {
  auto json = ParseJson(body);
  if (!json.ok()) return json.status();
  if (!json->is_object())
    return absl::InvalidArgumentError(absl::StrCat("the body must be a JSON object, got ", Describe(*json)));
  ApiRequest request;
  request.endpoint = endpoint;
  if (endpoint == Endpoint::kCompletion) request.engine.sampling.max_tokens = kDefaultMaxTokens;
  for (const auto& [name, value] : json->items()) {
    const FieldReader reader = FindField(endpoint, name);
    if (reader == nullptr) {
      if (!strict_fields) continue;
      return Refuse(name.size() <= 80 ? name : "body", "unknown field; the server was started with --strict-fields");
    }
    if (value.is_null()) continue;
    if (auto status = reader(name, value, &request); !status.ok()) return status;
  }
  if (endpoint == Endpoint::kCompletion && json->value("prompt", Json()) != nullptr &&
      json->value("prompt_token_ids", Json()) != nullptr) {
    return Refuse("prompt_token_ids", "excludes prompt; send one of them");
  }
  // The newer name wins, whatever the order.
  if (endpoint == Endpoint::kChat && json->contains("max_completion_tokens") &&
      !(*json)["max_completion_tokens"].is_null()) {
    request.engine.sampling.max_tokens = static_cast<int>((*json)["max_completion_tokens"].get<double>());
  }
  if ((request.include_usage || request.continuous_usage) && !request.stream) {
    return Refuse("stream_options", "needs \"stream\": true");
  }
  if (request.logprobs) request.engine.sampling.logprobs = request.top_logprobs;
  // The log-probabilities of an echoed prompt go in front of the answer's, and those end with the token that ended it:
  // whoever scores a text by them counts on it.
  const bool scores = request.echo && request.logprobs;
  request.engine.sampling.end_logprobs = scores;
  request.engine.sampling.prompt_logprobs = std::max(request.prompt_logprobs, scores ? request.top_logprobs : -1);
  const absl::Status consistent = endpoint == Endpoint::kChat ? CheckChat(request) : CheckCompletion(request);
  if (!consistent.ok()) return consistent;
  if (auto status = ValidateRequest(request.engine); !status.ok()) return status;
  return request;
}

}  // namespace loupe
