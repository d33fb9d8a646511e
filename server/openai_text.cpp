#include "server/openai_text.h"

#include "absl/strings/str_cat.h"
#include "server/http_json.h"
#include "server/openai_prompt.h"
#include "server/openai_request.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

absl::Status Refuse(const std::string& name, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", why));
}

absl::StatusOr<Json> ParseObject(std::string_view body) {
  auto json = ParseJson(body);
  if (json.ok() && !json->is_object())
    return absl::InvalidArgumentError(absl::StrCat("the body must be a JSON object, got ", Describe(*json)));
  return json;
}

const Json* Present(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && !found->is_null() ? &*found : nullptr;
}

absl::Status ReadFlag(const Json& object, const char* name, bool* out) {
  const Json* value = Present(object, name);
  return value == nullptr ? absl::OkStatus() : ReadBool(name, *value, out);
}

// The prompt of a conversation, from the fields that a chat request has too.
absl::StatusOr<std::string> RenderBody(const Json& object, const ChatTemplate& chat_template) {
  ApiRequest request;
  for (const char* name : {"messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}) {
    const Json* value = Present(object, name);
    if (value == nullptr) continue;
    if (auto status = FindField(Endpoint::kChat, name)(name, *value, &request); !status.ok()) return status;
  }
  return RenderChat(request, chat_template);
}

}  // namespace

absl::StatusOr<Json> Tokenize(const Tokenizer& tokenizer, const ChatTemplate& chat_template, std::string_view body) {
  const auto object = ParseObject(body);
  if (!object.ok()) return object.status();
  const bool is_chat = Present(*object, "messages") != nullptr;
  bool add_special = false, parse_special = is_chat;
  if (auto status = ReadFlag(*object, "add_special", &add_special); !status.ok()) return status;
  if (auto status = ReadFlag(*object, "parse_special", &parse_special); !status.ok()) return status;
  std::string text;
  if (is_chat) {
    if (Present(*object, "text") != nullptr) return Refuse("text", "excludes messages; send one of them");
    auto rendered = RenderBody(*object, chat_template);
    if (!rendered.ok()) return rendered.status();
    text = *std::move(rendered);
  } else {
    const Json* value = Present(*object, "text");
    if (value == nullptr) return Refuse("text", "is missing; send text or messages");
    if (auto status = ReadString("text", *value, &text); !status.ok()) return status;
  }
  if (auto status = CheckTextBytes(is_chat ? "messages" : "text", static_cast<int64_t>(text.size())); !status.ok()) {
    return status;
  }
  const std::vector<int32_t> tokens = tokenizer.Encode(text, add_special, parse_special);
  Json pieces = Json::array();
  for (const int32_t id : tokens) pieces.push_back(std::string(tokenizer.Piece(id)));
  return Json{{"tokens", tokens}, {"pieces", std::move(pieces)}, {"count", tokens.size()}};
}

absl::StatusOr<Json> Detokenize(const Tokenizer& tokenizer, std::string_view body) {
  const auto object = ParseObject(body);
  if (!object.ok()) return object.status();
  const Json* value = Present(*object, "tokens");
  if (value == nullptr) return Refuse("tokens", "is missing");
  std::vector<int32_t> ids;
  if (auto status = ReadInts("tokens", *value, &ids); !status.ok()) return status;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < tokenizer.vocab_size()) continue;
    return Refuse(absl::StrCat("tokens[", i, "]"),
                  absl::StrCat("is ", ids[i], ", must be from 0 to ", tokenizer.vocab_size() - 1));
  }
  return Json{{"text", tokenizer.Decode(ids, /*skip_control=*/false)}};
}

absl::StatusOr<Json> TokenizeBody(const Engine& engine, std::string_view body) {
  return Tokenize(engine.tokenizer(), engine.chat_template(), body);
}

absl::StatusOr<Json> DetokenizeBody(const Engine& engine, std::string_view body) {
  return Detokenize(engine.tokenizer(), body);
}

absl::StatusOr<Json> ApplyTemplateBody(const Engine& engine, std::string_view body) {
  const auto object = ParseObject(body);
  if (!object.ok()) return object.status();
  const auto prompt = RenderBody(*object, engine.chat_template());
  if (!prompt.ok()) return prompt.status();
  return Json{{"prompt", *prompt}};
}

}  // namespace loupe
