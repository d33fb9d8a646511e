// The table of all fields of both endpoints: one row a field, one small reader a shape. A value of null never gets
// here: it means that the field is absent.
#include <string_view>
#include <unordered_map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/http_json.h"
#include "server/kv_json.h"
#include "server/openai_request.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;
using Status = absl::Status;
using Name = const std::string&;
using Value = const Json&;

Status Refuse(Name name, const std::string& why) { return absl::InvalidArgumentError(absl::StrCat(name, ": ", why)); }

Status NotOffered(Name name, Value) { return Refuse(name, "is not offered by this server; leave it out"); }
Status NotOfferedYet(Name name, Value v, ApiRequest*) { return NotOffered(name, v); }

// ---- accepted because nothing is lost: they label the request, or ask for what happens anyway
Status AnyString(Name name, Value v, ApiRequest*) {
  std::string ignored;
  return ReadString(name, v, &ignored);
}
Status AnyBool(Name name, Value v, ApiRequest*) {
  bool ignored = false;
  return ReadBool(name, v, &ignored);
}
Status AnyObject(Name name, Value v, ApiRequest*) {
  return v.is_object() ? absl::OkStatus() : Refuse(name, absl::StrCat("must be an object, got ", Describe(v)));
}
Status OnlyFalse(Name name, Value v, ApiRequest*) {
  bool value = false;
  if (auto status = ReadBool(name, v, &value); !status.ok()) return status;
  return value ? NotOffered(name, v) : absl::OkStatus();
}
Status ServiceTier(Name name, Value v, ApiRequest*) {
  std::string tier;
  if (auto status = ReadString(name, v, &tier); !status.ok()) return status;
  return tier == "auto" || tier == "default" ? absl::OkStatus() : Refuse(name, "there is one tier here; use \"auto\"");
}
Status Tools(Name name, Value v, ApiRequest*) {
  if (!v.is_array()) return Refuse(name, absl::StrCat("must be a list, got ", Describe(v)));
  return v.empty() ? absl::OkStatus() : NotOffered(name, v);
}
Status ToolChoice(Name name, Value v, ApiRequest*) {
  return v == "none" || v == "auto" ? absl::OkStatus() : NotOffered(name, v);  // without tools both mean no call
}
Status ResponseFormat(Name name, Value v, ApiRequest*) {
  if (!v.is_object()) return Refuse(name, absl::StrCat("must be an object, got ", Describe(v)));
  const auto type = v.find("type");
  if (type == v.end() || !type->is_string()) return Refuse(name + ".type", "must be a string");
  return *type == "text" ? absl::OkStatus() : Refuse(name, "only {\"type\": \"text\"} is offered by this server");
}
Status Modalities(Name name, Value v, ApiRequest*) {
  return v == Json::array({"text"}) ? absl::OkStatus() : Refuse(name, "only [\"text\"] is offered by this server");
}
Status Verbosity(Name name, Value v, ApiRequest*) { return v == "medium" ? absl::OkStatus() : NotOffered(name, v); }
Status Suffix(Name name, Value v, ApiRequest*) { return v == "" ? absl::OkStatus() : NotOffered(name, v); }

// ---- the request itself
Status Model(Name name, Value v, ApiRequest* r) { return ReadString(name, v, &r->model); }
Status Messages(Name name, Value v, ApiRequest* r) {
  auto messages = ParseMessages(name, v);
  if (!messages.ok()) return messages.status();
  r->messages = *std::move(messages);
  return absl::OkStatus();
}
Status TokenPrompt(Name name, Value v, ApiRequest* r) {
  ApiPrompt prompt;
  prompt.is_text = false;
  if (auto status = ReadInts(name, v, &prompt.ids); !status.ok()) return status;
  if (prompt.ids.empty()) return Refuse(name, "must not be empty");
  r->prompts.push_back(std::move(prompt));
  return absl::OkStatus();
}
Status TextPrompt(Name name, Value v, ApiRequest* r) {
  ApiPrompt prompt;
  if (auto status = ReadString(name, v, &prompt.text); !status.ok()) return status;
  r->prompts.push_back(std::move(prompt));
  return absl::OkStatus();
}
Status Prompt(Name name, Value v, ApiRequest* r) {
  if (v.is_string()) return TextPrompt(name, v, r);
  if (!v.is_array())
    return Refuse(
        name, absl::StrCat("must be a string, a list of strings, token ids or lists of token ids, got ", Describe(v)));
  if (v.empty()) return Refuse(name, "must not be empty");
  if (v[0].is_number()) return TokenPrompt(name, v, r);
  if (v.size() > kMaxPrompts)
    return Refuse(name, absl::StrCat("has ", v.size(), " prompts, at most ", kMaxPrompts, " go into one request"));
  for (size_t i = 0; i < v.size(); ++i) {
    const std::string item = absl::StrCat(name, "[", i, "]");
    const Status status = v[i].is_array() ? TokenPrompt(item, v[i], r) : TextPrompt(item, v[i], r);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}
Status PromptTokenIds(Name name, Value v, ApiRequest* r) { return TokenPrompt(name, v, r); }
Status AddSpecialTokens(Name name, Value v, ApiRequest* r) {
  return ReadBool(name, v, &r->add_special_tokens.emplace());
}
Status TemplateKwargs(Name name, Value v, ApiRequest* r) {
  if (!v.is_object()) return Refuse(name, absl::StrCat("must be an object, got ", Describe(v)));
  r->template_kwargs = v;
  return absl::OkStatus();
}
Status AddGenerationPrompt(Name name, Value v, ApiRequest* r) {
  return ReadBool(name, v, &r->add_generation_prompt.emplace());
}
Status ContinueFinalMessage(Name name, Value v, ApiRequest* r) { return ReadBool(name, v, &r->continue_final_message); }

// ---- length and sampling
Status MaxTokens(Name name, Value v, ApiRequest* r) {
  if (auto status = ReadInt(name, v, &r->engine.sampling.max_tokens); !status.ok()) return status;
  if (r->engine.sampling.max_tokens >= 0) return absl::OkStatus();
  return Refuse(name, absl::StrCat("is ", r->engine.sampling.max_tokens, ", must be 0 or more"));
}
Status MinTokens(Name name, Value v, ApiRequest* r) { return ReadInt(name, v, &r->engine.sampling.min_tokens); }
Status Temperature(Name name, Value v, ApiRequest* r) { return ReadFloat(name, v, &r->engine.sampling.temperature); }
Status TopP(Name name, Value v, ApiRequest* r) { return ReadFloat(name, v, &r->engine.sampling.top_p); }
Status TopK(Name name, Value v, ApiRequest* r) {
  if (auto status = ReadInt(name, v, &r->engine.sampling.top_k); !status.ok()) return status;
  if (r->engine.sampling.top_k == -1) r->engine.sampling.top_k = 0;  // vLLM's way to say off
  return absl::OkStatus();
}
Status MinP(Name name, Value v, ApiRequest* r) { return ReadFloat(name, v, &r->engine.sampling.min_p); }
Status Repetition(Name name, Value v, ApiRequest* r) {
  return ReadFloat(name, v, &r->engine.sampling.repetition_penalty);
}
Status Frequency(Name name, Value v, ApiRequest* r) {
  return ReadFloat(name, v, &r->engine.sampling.frequency_penalty);
}
Status Presence(Name name, Value v, ApiRequest* r) { return ReadFloat(name, v, &r->engine.sampling.presence_penalty); }
Status Seed(Name name, Value v, ApiRequest* r) {
  if (v.is_number_unsigned()) {
    r->engine.sampling.seed = v.get<uint64_t>();
    return absl::OkStatus();
  }
  int64_t seed = 0;
  if (auto status = ReadInt64(name, v, &seed); !status.ok()) return status;
  r->engine.sampling.seed = static_cast<uint64_t>(seed);
  return absl::OkStatus();
}
Status N(Name name, Value v, ApiRequest* r) { return ReadInt(name, v, &r->engine.n); }
Status BestOf(Name name, Value v, ApiRequest*) {
  int best_of = 0;
  if (auto status = ReadInt(name, v, &best_of); !status.ok()) return status;
  return best_of == 1 ? absl::OkStatus()
                      : Refuse(name, absl::StrCat("is ", best_of, ", only 1 is offered by this server; use n"));
}
Status LogitBias(Name name, Value v, ApiRequest* r) {
  if (!v.is_object())
    return Refuse(name, absl::StrCat("must be an object of token ids and numbers, got ", Describe(v)));
  for (const auto& [key, bias] : v.items()) {
    int32_t id = 0;
    float value = 0;
    if (!absl::SimpleAtoi(key, &id))
      return Refuse(name, absl::StrCat("the key \"", key.substr(0, 40), "\" is no token id"));
    if (auto status = ReadFloat(absl::StrCat(name, ".", key), bias, &value); !status.ok()) return status;
    r->engine.sampling.logit_bias.emplace_back(id, value);
  }
  return absl::OkStatus();
}

// ---- when to stop
Status Stop(Name name, Value v, ApiRequest* r) {
  if (v.is_string()) {
    r->engine.sampling.stop = {v.get<std::string>()};
    return absl::OkStatus();
  }
  if (!v.is_array()) return Refuse(name, absl::StrCat("must be a string or a list of strings, got ", Describe(v)));
  for (size_t i = 0; i < v.size(); ++i) {
    std::string text;
    if (auto status = ReadString(absl::StrCat(name, "[", i, "]"), v[i], &text); !status.ok()) return status;
    r->engine.sampling.stop.push_back(std::move(text));
  }
  return absl::OkStatus();
}
Status StopTokenIds(Name name, Value v, ApiRequest* r) { return ReadInts(name, v, &r->engine.sampling.stop_token_ids); }
Status IgnoreEos(Name name, Value v, ApiRequest* r) { return ReadBool(name, v, &r->engine.sampling.ignore_eos); }
Status IncludeStop(Name name, Value v, ApiRequest* r) {
  return ReadBool(name, v, &r->engine.sampling.include_stop_str_in_output);
}
Status TimeoutMs(Name name, Value v, ApiRequest* r) {
  if (auto status = ReadInt64(name, v, &r->timeout_ms); !status.ok()) return status;
  constexpr int64_t kDayMs = 86'400'000;
  if (r->timeout_ms >= 1 && r->timeout_ms <= kDayMs) return absl::OkStatus();
  return Refuse(name, absl::StrCat("is ", r->timeout_ms, ", must be from 1 to ", kDayMs));
}

// ---- what comes back
Status Stream(Name name, Value v, ApiRequest* r) { return ReadBool(name, v, &r->stream); }
Status StreamOptions(Name name, Value v, ApiRequest* r) {
  if (!v.is_object()) return Refuse(name, absl::StrCat("must be an object, got ", Describe(v)));
  for (const auto& [key, value] : v.items()) {
    bool obfuscation = false;
    bool* out = key == "include_usage"            ? &r->include_usage
                : key == "continuous_usage_stats" ? &r->continuous_usage
                : key == "include_obfuscation"    ? &obfuscation
                                                  : nullptr;
    if (out == nullptr) return Refuse(name + "." + key, "unknown; known are include_usage and continuous_usage_stats");
    if (value.is_null()) continue;
    if (auto status = ReadBool(name + "." + key, value, out); !status.ok()) return status;
    if (obfuscation) return NotOffered(name + "." + key, value);
  }
  return absl::OkStatus();
}
Status ChatLogprobs(Name name, Value v, ApiRequest* r) { return ReadBool(name, v, &r->logprobs); }
Status TopLogprobs(Name name, Value v, ApiRequest* r) {
  if (auto status = ReadInt(name, v, &r->top_logprobs); !status.ok()) return status;
  if (r->top_logprobs >= 0 && r->top_logprobs <= 20) return absl::OkStatus();
  return Refuse(name, absl::StrCat("is ", r->top_logprobs, ", must be from 0 to 20"));
}
Status CompletionLogprobs(Name name, Value v, ApiRequest* r) {
  r->logprobs = true;
  return TopLogprobs(name, v, r);
}
Status Echo(Name name, Value v, ApiRequest* r) { return ReadBool(name, v, &r->echo); }
Status ReturnTokenIds(Name name, Value v, ApiRequest* r) { return ReadBool(name, v, &r->return_token_ids); }

// ---- ours
Status Kv(Name, Value v, ApiRequest* r) {
  auto kv = ParseKvOptions(v);
  if (!kv.ok()) return kv.status();
  r->engine.kv = *std::move(kv);
  return absl::OkStatus();
}
Status Priority(Name name, Value v, ApiRequest* r) { return ReadInt(name, v, &r->engine.priority); }

using Table = std::unordered_map<std::string, FieldReader>;

// Fields of both endpoints.
const Table& SharedFields() {
  static const Table table = {
      {"model", Model},
      {"max_tokens", MaxTokens},
      {"min_tokens", MinTokens},
      {"temperature", Temperature},
      {"top_p", TopP},
      {"top_k", TopK},
      {"min_p", MinP},
      {"repetition_penalty", Repetition},
      {"frequency_penalty", Frequency},
      {"presence_penalty", Presence},
      {"seed", Seed},
      {"n", N},
      {"best_of", BestOf},
      {"logit_bias", LogitBias},
      {"stop", Stop},
      {"stop_token_ids", StopTokenIds},
      {"ignore_eos", IgnoreEos},
      {"include_stop_str_in_output", IncludeStop},
      {"timeout_ms", TimeoutMs},
      {"stream", Stream},
      {"stream_options", StreamOptions},
      {"return_token_ids", ReturnTokenIds},
      {"prompt_token_ids", PromptTokenIds},
      {"add_special_tokens", AddSpecialTokens},
      {"kv", Kv},
      {"priority", Priority},
      // There is no prefix cache, so a salt separates what is separate already.
      {"cache_salt", AnyString},
      {"user", AnyString},
      {"safety_identifier", AnyString},
      {"metadata", AnyObject},
      {"prompt_cache_key", AnyString},
      {"prompt_cache_retention", AnyString},
      {"store", OnlyFalse},
      {"service_tier", ServiceTier},
      {"response_format", ResponseFormat},
      {"regex", NotOfferedYet},
      {"choice", NotOfferedYet},
      {"grammar", NotOfferedYet},
      {"json_schema", NotOfferedYet},
      {"guided_json", NotOfferedYet},
      {"guided_regex", NotOfferedYet},
      {"guided_choice", NotOfferedYet},
      {"guided_grammar", NotOfferedYet},
      {"structured_outputs", NotOfferedYet},
      {"prompt_logprobs", NotOfferedYet},
      {"use_beam_search", OnlyFalse},
      {"length_penalty", NotOfferedYet},
      {"bad_words", NotOfferedYet},
  };
  return table;
}

const Table& ChatFields() {
  static const Table table = {
      {"messages", Messages},
      {"max_completion_tokens", MaxTokens},
      {"logprobs", ChatLogprobs},
      {"top_logprobs", TopLogprobs},
      {"chat_template_kwargs", TemplateKwargs},
      {"add_generation_prompt", AddGenerationPrompt},
      {"continue_final_message", ContinueFinalMessage},
      {"tools", Tools},
      {"tool_choice", ToolChoice},
      {"functions", Tools},
      {"function_call", ToolChoice},
      {"parallel_tool_calls", AnyBool},
      {"modalities", Modalities},
      {"audio", NotOfferedYet},
      // A guess of the answer speeds others up; it changes no token.
      {"prediction", AnyObject},
      {"web_search_options", NotOfferedYet},
      {"reasoning_effort", NotOfferedYet},
      {"verbosity", Verbosity},
      {"chat_template", NotOfferedYet},
      {"documents", NotOfferedYet},
      {"echo", OnlyFalse},
      {"moderation", NotOfferedYet},
  };
  return table;
}

const Table& CompletionFields() {
  static const Table table = {{"prompt", Prompt}, {"logprobs", CompletionLogprobs}, {"echo", Echo}, {"suffix", Suffix}};
  return table;
}

}  // namespace

FieldReader FindField(Endpoint endpoint, const std::string& name) {
  const Table& own = endpoint == Endpoint::kChat ? ChatFields() : CompletionFields();
  if (const auto found = own.find(name); found != own.end()) return found->second;
  const auto found = SharedFields().find(name);
  return found == SharedFields().end() ? nullptr : found->second;
}

}  // namespace loupe
