#include "server/openai_prompt.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

std::string_view Trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

// Cuts what the template puts after the last message, so that the model goes on inside it. Templates may trim content,
// so the trimmed text is looked for, and white space that did survive is kept.
absl::StatusOr<std::string> CutAfterFinalMessage(std::string rendered, const std::string& content) {
  const std::string_view core = Trim(content);
  if (core.empty()) return absl::InvalidArgumentError("continue_final_message: the last message is empty");
  const size_t found = rendered.rfind(core);
  if (found == std::string::npos) {
    return absl::InvalidArgumentError(
        "continue_final_message: the chat template of this model changes the last message");
  }
  size_t end = found + core.size();
  const std::string_view tail = std::string_view(content).substr(content.find(core) + core.size());
  if (std::string_view(rendered).substr(end).starts_with(tail)) end += tail.size();
  rendered.resize(end);
  return rendered;
}

// Before OpenAI renamed it, developer was called system, and most templates only know that name.
Json WithoutDeveloper(const Json& messages, const std::string& template_source) {
  Json out = messages;
  if (template_source.find("developer") != std::string::npos) return out;
  for (Json& message : out) {
    if (message["role"] == "developer") message["role"] = "system";
  }
  return out;
}

}  // namespace

int LongestTokenBytes(const Tokenizer& tokenizer) {
  size_t longest = 1;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) longest = std::max(longest, tokenizer.TokenBytes(id).size());
  return static_cast<int>(longest);
}

absl::StatusOr<std::string> RenderChat(const ApiRequest& request, const ChatTemplate& chat_template) {
  if (auto status = CheckConversation(request); !status.ok()) return status;
  Json messages = WithoutDeveloper(request.messages, chat_template.source());
  const bool tools = request.tools.active();
  if (tools && !ShowsTools(chat_template)) messages = WithToolMessage(messages, request.tools.tools);
  Json variables = {{"messages", std::move(messages)},
                    {"tools", tools ? request.tools.tools : Json()},
                    {"add_generation_prompt", request.add_generation_prompt.value_or(!request.continue_final_message)}};
  variables.update(request.template_kwargs);
  auto rendered = chat_template.Render(variables);
  if (!rendered.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("messages: the chat template refuses them: ", std::string(rendered.status().message())));
  }
  if (!request.continue_final_message) return rendered;
  return CutAfterFinalMessage(*std::move(rendered), request.messages.back()["content"].get<std::string>());
}

absl::Status CheckTextBytes(const std::string& field, int64_t bytes) {
  if (bytes <= kMaxTextBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": has ", bytes, " bytes of text, at most ", kMaxTextBytes, " go into one request; send it in pieces"));
}

absl::StatusOr<std::vector<int32_t>> EncodePrompt(const std::string& text, bool add_special, const Tokenizer& tokenizer,
                                                  const PromptLimits& limits) {
  if (limits.longest_token_bytes > 0) {
    const int64_t least = static_cast<int64_t>(text.size()) / limits.longest_token_bytes;
    if (least > limits.max_context) {
      return absl::InvalidArgumentError(absl::StrCat("context_length_exceeded: the prompt has ", text.size(),
                                                     " bytes, which make at least ", least,
                                                     " tokens, but the context holds ", limits.max_context));
    }
  }
  if (auto status = CheckTextBytes("prompt", static_cast<int64_t>(text.size())); !status.ok()) return status;
  return tokenizer.Encode(text, add_special, /*parse_special=*/true);
}

absl::StatusOr<std::vector<std::vector<int32_t>>> BuildPrompts(const ApiRequest& request,
                                                               const ChatTemplate& chat_template,
                                                               const Tokenizer& tokenizer, const PromptLimits& limits) {
  std::vector<std::vector<int32_t>> prompts;
  if (request.endpoint == Endpoint::kChat && request.prompts.empty()) {
    const auto text = RenderChat(request, chat_template);
    if (!text.ok()) return text.status();
    auto ids = EncodePrompt(*text, request.add_special_tokens.value_or(false), tokenizer, limits);
    if (!ids.ok()) return ids.status();
    prompts.push_back(*std::move(ids));
    return prompts;
  }
  int64_t text_bytes = 0;
  for (const ApiPrompt& prompt : request.prompts) text_bytes += static_cast<int64_t>(prompt.text.size());
  if (request.prompts.size() > 1) {
    if (auto status = CheckTextBytes("prompt", text_bytes); !status.ok()) return status;
  }
  for (const ApiPrompt& prompt : request.prompts) {
    if (!prompt.is_text) {
      prompts.push_back(prompt.ids);
      continue;
    }
    auto ids = EncodePrompt(prompt.text, request.add_special_tokens.value_or(true), tokenizer, limits);
    if (!ids.ok()) return ids.status();
    prompts.push_back(*std::move(ids));
  }
  return prompts;
}

}  // namespace loupe
