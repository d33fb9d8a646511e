// One small reader a shape of value, then the table: one row a field. A value of null never gets here: it means that the
// field is absent.
#include "server/openai_fields.h"

#include <string_view>
#include <unordered_map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/validate.h"
#include "server/grammar_json.h"
#include "server/http_json.h"
#include "server/kv_json.h"

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
// The old names of tools and tool_choice.
Status Functions(Name name, Value v, ApiRequest*) {
  if (!v.is_array()) return Refuse(name, absl::StrCat("must be a list, got ", Describe(v)));
  return v.empty() ? absl::OkStatus() : Refuse(name, "is not offered by this server; use tools");
}
Status FunctionCall(Name name, Value v, ApiRequest*) {
  return v == "none" || v == "auto" ? absl::OkStatus() : Refuse(name, "is not offered by this server; use tool_choice");
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
Status Tools(Name name, Value v, ApiRequest* r) {
  auto tools = ParseTools(name, v);
  if (!tools.ok()) return tools.status();
  r->tools.tools = *std::move(tools);
  return absl::OkStatus();
}
Status ChooseTool(Name name, Value v, ApiRequest* r) {
  auto choice = ParseToolChoice(name, v);
  if (!choice.ok()) return choice.status();
  r->tools.choice = *std::move(choice);
  return absl::OkStatus();
}
Status ParallelToolCalls(Name name, Value v, ApiRequest* r) { return ReadBool(name, v, &r->tools.parallel); }
Status AddGenerationPrompt(Name name, Value v, ApiRequest* r) {
  return ReadBool(name, v, &r->add_generation_prompt.emplace());
}
Status ContinueFinalMessage(Name name, Value v, ApiRequest* r) { return ReadBool(name, v, &r->continue_final_message); }

// ---- what the answer may be
Status AnswerForm(Name name, Value v, ApiRequest* r, Status (*read)(Name, Value, std::optional<GrammarSpec>*)) {
  std::optional<GrammarSpec> form;
  if (auto status = read(name, v, &form); !status.ok() || !form) return status;
  if (r->grammar) return Refuse(name, absl::StrCat("excludes ", r->grammar_field, "; send one of them"));
  r->grammar = std::move(form);
  r->grammar_field = name;
  return absl::OkStatus();
}
Status ResponseFormat(Name name, Value v, ApiRequest* r) { return AnswerForm(name, v, r, ReadResponseFormat); }
Status Regex(Name name, Value v, ApiRequest* r) { return AnswerForm(name, v, r, ReadRegex); }
Status Choice(Name name, Value v, ApiRequest* r) { return AnswerForm(name, v, r, ReadChoice); }

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
  if (r->timeout_ms >= 1 && r->timeout_ms <= kMaxTimeoutMs) return absl::OkStatus();
  return Refuse(name, absl::StrCat("is ", r->timeout_ms, ", must be from 1 to ", kMaxTimeoutMs));
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
Status PromptLogprobs(Name name, Value v, ApiRequest* r) {
  if (auto status = ReadInt(name, v, &r->prompt_logprobs); !status.ok()) return status;
  if (r->prompt_logprobs >= 0 && r->prompt_logprobs <= kMaxLogprobs) return absl::OkStatus();
  return Refuse(name, absl::StrCat("is ", r->prompt_logprobs, ", must be from 0 to ", kMaxLogprobs));
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

// ---- the table

constexpr const char* kString = R"({"type": "string"})";
constexpr const char* kBool = R"({"type": "boolean"})";
constexpr const char* kObject = R"({"type": "object"})";
constexpr const char* kOnlyFalse = R"({"const": false})";
constexpr const char* kCount = R"({"type": "integer", "minimum": 0, "maximum": 2147483647})";
constexpr const char* kPenalty = R"({"type": "number", "minimum": -2, "maximum": 2})";
constexpr const char* kIds = R"({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2147483647}})";
constexpr const char* kSomeIds =
    R"({"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2147483647}})";
// An assistant that called tools need not have said anything.
constexpr const char* kMessages = R"({"type": "array", "minItems": 1, "items": {"anyOf": [
  {"type": "object", "required": ["role", "content"], "properties": {
    "role": {"enum": ["system", "user", "assistant", "tool", "developer"]},
    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object", "required": ["type", "text"],
      "properties": {"type": {"enum": ["text", "input_text"]}, "text": {"type": "string"}}}}]},
    "name": {"type": ["string", "null"]}, "tool_call_id": {"type": ["string", "null"]}, "reasoning_content": {"type": ["string", "null"]},
    "tool_calls": {"type": "null"}, "audio": {"type": "null"}}},
  {"type": "object", "required": ["role", "tool_calls"], "properties": {"role": {"const": "assistant"}, "content": {"type": "null"},
    "name": {"type": ["string", "null"]}, "audio": {"type": "null"}, "reasoning_content": {"type": ["string", "null"]},
    "tool_call_id": {"type": ["string", "null"]},
    "tool_calls": {"type": "array", "items": {"type": "object", "required": ["function"], "properties": {"function": {"type": "object",
      "required": ["name"], "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}}}}}}}}]}})";
constexpr const char* kPrompt = R"({"anyOf": [{"type": "string"},
  {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2147483647}},
  {"type": "array", "minItems": 1, "maxItems": 128, "items": {"anyOf": [{"type": "string"},
    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2147483647}}]}}]})";
constexpr const char* kStop = R"({"anyOf": [{"type": "string", "minLength": 1},
  {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1}}]})";
constexpr const char* kStreamOptions = R"({"type": "object", "additionalProperties": false, "properties": {
  "include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}, "include_obfuscation": {"const": false}}})";
constexpr const char* kTools = R"({"type": "array", "maxItems": 128, "items": {"type": "object", "required": ["function"], "properties": {
  "type": {"const": "function"}, "function": {"type": "object", "required": ["name"], "properties": {
    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}, "description": {"type": "string"}, "parameters": {"type": "object"},
    "strict": {"type": ["boolean", "null"]}}}}}})";
constexpr const char* kToolChoice = R"({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object", "required": ["function"],
  "properties": {"type": {"const": "function"}, "function": {"type": "object", "required": ["name"],
    "properties": {"name": {"type": "string"}}}}}]})";
constexpr const char* kResponseFormat = R"({"anyOf": [
  {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
  {"type": "object", "required": ["type", "json_schema"], "properties": {"type": {"const": "json_schema"},
    "json_schema": {"type": "object", "required": ["schema"], "properties": {"name": {"type": "string"}, "description": {"type": "string"},
      "strict": {"type": "boolean"}, "schema": {"type": "object"}}}}}]})";
constexpr const char* kKv = R"({"type": "object", "additionalProperties": false, "properties": {
  "policy": {"type": "string"}, "strategy": {"type": "string"}, "params": {"type": "object"},
  "budget": {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": false,
    "properties": {"ratio": {"type": "number"}, "tokens": {"type": "number"}, "bytes": {"type": "number"}}},
  "bits": {"type": "object"}, "protect": {"type": "object"}, "floor": {"type": "object"}, "on_miss": {"type": "string"}}})";

using enum FieldOf;
using enum FieldSupport;

constexpr const char* kGone = "not offered by this server";
constexpr const char* kLabel = "labels the request; read by nothing here";

const FieldSpec kFields[] = {
    // What is asked.
    {"model", kBoth, kHonoured, kString, "the served model's name; may be left out", Model},
    {"messages", kChat, kHonoured, kMessages, "the conversation; content is text, or parts of text", Messages},
    {"prompt", kCompletion, kHonoured, kPrompt,
     "one text, one list of token ids, or up to 128 of either; special tokens in text are parsed", Prompt},
    {"prompt_token_ids", kBoth, kHonoured, kSomeIds, "in place of messages or prompt: ids as they are", PromptTokenIds},
    {"add_special_tokens", kBoth, kHonoured, kBool, "whether text gets the tokens that the model wants around it (BOS)", AddSpecialTokens},
    {"chat_template_kwargs", kChat, kHonoured, kObject, "further variables of the chat template", TemplateKwargs},
    {"add_generation_prompt", kChat, kHonoured, kBool, "whether the template opens the answer; true by default", AddGenerationPrompt},
    {"continue_final_message", kChat, kHonoured, kBool, "go on inside the last message, which is the assistant's", ContinueFinalMessage},
    {"echo", kCompletion, kHonoured, kBool, "the prompt in front of the answer, with logprobs also theirs; max_tokens may be 0", Echo},
    // How long.
    {"max_tokens", kBoth, kHonoured, kCount, "16 by default for completions, to the end of the context for chat", MaxTokens},
    {"max_completion_tokens", kChat, kHonoured, kCount, "the newer name of max_tokens, and stronger", MaxTokens},
    {"min_tokens", kBoth, kHonoured, kCount, "no stop before so many; at most max_tokens", MinTokens},
    {"stop", kBoth, kHonoured, kStop, "up to 16 strings of up to 4096 bytes, found across tokens", Stop},
    {"stop_token_ids", kBoth, kHonoured, kIds, "up to 256 further ends", StopTokenIds},
    {"ignore_eos", kBoth, kHonoured, kBool, "go on behind the model's own end", IgnoreEos},
    {"include_stop_str_in_output", kBoth, kHonoured, kBool, "the matched stop string stays in the text", IncludeStop},
    {"timeout_ms", kBoth, kHonoured, R"({"type": "integer", "minimum": 1, "maximum": 86400000})",
     "over queue, prompt and answer: 408 before the first token, later the answer so far", TimeoutMs},
    // Tools, and what the answer may be.
    {"tools", kChat, kHonoured, kTools, "functions that the model may call, up to 128", Tools},
    {"tool_choice", kChat, kHonoured, kToolChoice, "auto by default; required and a named function force a call with valid arguments",
     ChooseTool},
    {"parallel_tool_calls", kChat, kHonoured, kBool, "whether an answer may hold several calls; true by default", ParallelToolCalls},
    {"response_format", kBoth, kHonoured, kResponseFormat, "text, json_object (any JSON object) or json_schema; below", ResponseFormat},
    {"regex", kBoth, kHonoured, R"({"type": "string"})", "the answer matches it as a whole; below", Regex},
    {"choice", kBoth, kHonoured, R"({"type": "array", "minItems": 1, "maxItems": 1024, "items": {"type": "string", "minLength": 1}})",
     "the answer is one of these strings, up to 65,536 bytes in all", Choice},
    // How tokens are drawn.
    {"temperature", kBoth, kHonoured, R"({"type": "number", "minimum": 0, "maximum": 2})", "1 by default, 0 is greedy", Temperature},
    {"top_p", kBoth, kHonoured, R"({"type": "number", "exclusiveMinimum": 0, "maximum": 1})", "1 by default", TopP},
    {"top_k", kBoth, kHonoured, R"({"type": "integer", "minimum": -1, "maximum": 2147483647})", "0 or -1: off", TopK},
    {"min_p", kBoth, kHonoured, R"({"type": "number", "minimum": 0, "maximum": 1})", "0: off", MinP},
    {"repetition_penalty", kBoth, kHonoured, R"({"type": "number", "minimum": 0.001, "maximum": 100})", "over prompt and answer; 1: off",
     Repetition},
    {"frequency_penalty", kBoth, kHonoured, kPenalty, "over the answer; 0: off", Frequency},
    {"presence_penalty", kBoth, kHonoured, kPenalty, "over the answer; 0: off", Presence},
    {"seed", kBoth, kHonoured, R"({"type": "integer", "minimum": -9223372036854775808, "maximum": 18446744073709551615})",
     "the same seed gives the same text on the same server, whatever else runs; sample i of n uses seed + i", Seed},
    {"logit_bias", kBoth, kHonoured, R"({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}})",
     "token ids to numbers, up to 4096", LogitBias},
    {"n", kBoth, kHonoured, R"({"type": "integer", "minimum": 1, "maximum": 128})",
     "samples, which share the prompt's pages; prompts times n at most 256", N},
    {"best_of", kBoth, kRefused, R"({"const": 1})", "use n", BestOf},
    // What comes back.
    {"stream", kBoth, kHonoured, kBool, "server-sent events, closed by data: [DONE]", Stream},
    {"stream_options", kBoth, kHonoured, kStreamOptions, "needs stream", StreamOptions},
    {"logprobs", kChat, kHonoured, kBool, "of the answer's tokens, with their exact bytes", ChatLogprobs},
    {"logprobs", kCompletion, kHonoured, R"({"type": "integer", "minimum": 0, "maximum": 20})", "so many best beside each token",
     CompletionLogprobs},
    {"top_logprobs", kChat, kHonoured, R"({"type": "integer", "minimum": 0, "maximum": 20})", "needs logprobs", TopLogprobs},
    {"prompt_logprobs", kBoth, kHonoured, R"({"type": "integer", "minimum": 0, "maximum": 20})",
     "of the prompt's tokens, with so many best beside each; up to 1,048,576 in all", PromptLogprobs},
    {"return_token_ids", kBoth, kHonoured, kBool, "token_ids and prompt_token_ids in the answer", ReturnTokenIds},
    // This server's own.
    {"kv", kBoth, kHonoured, kKv, "what the request's KV cache keeps; docs/kvcache.md", Kv},
    {"priority", kBoth, kHonoured, R"({"type": "integer", "minimum": -2147483648, "maximum": 2147483647})", "higher first; 0 by default",
     Priority},
    // There is no prefix cache, so a salt separates what is separate already.
    {"cache_salt", kBoth, kIgnored, kString, "no two requests share cache", AnyString},
    {"user", kBoth, kIgnored, kString, kLabel, AnyString},
    {"safety_identifier", kBoth, kIgnored, kString, kLabel, AnyString},
    {"metadata", kBoth, kIgnored, kObject, kLabel, AnyObject},
    {"prompt_cache_key", kBoth, kIgnored, kString, "there is no prefix cache", AnyString},
    {"prompt_cache_retention", kBoth, kIgnored, kString, "there is no prefix cache", AnyString},
    {"prompt_cache_options", kBoth, kIgnored, kObject, "there is no prefix cache", AnyObject},
    // A guess of the answer speeds others up; it changes no token.
    {"prediction", kChat, kIgnored, kObject, "a guess changes no token", AnyObject},
    {"service_tier", kBoth, kRefused, R"({"enum": ["auto", "default"]})", "there is one tier", ServiceTier},
    {"store", kBoth, kRefused, kOnlyFalse, "nothing is stored", OnlyFalse},
    {"modalities", kChat, kRefused, R"({"const": ["text"]})", "text only", Modalities},
    {"verbosity", kChat, kRefused, R"({"const": "medium"})", "models here know no other", Verbosity},
    {"suffix", kCompletion, kRefused, R"({"const": ""})", kGone, Suffix},
    {"echo", kChat, kRefused, kOnlyFalse, "of completions only", OnlyFalse},
    {"functions", kChat, kRefused, R"({"type": "array", "maxItems": 0})", "use tools", Functions},
    {"function_call", kChat, kRefused, R"({"enum": ["none", "auto"]})", "use tool_choice", FunctionCall},
    {"use_beam_search", kBoth, kRefused, kOnlyFalse, kGone, OnlyFalse},
    {"grammar", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"ebnf", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"json_schema", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"guided_json", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"guided_regex", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"guided_choice", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"guided_grammar", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"structured_outputs", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"stop_regex", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"length_penalty", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"bad_words", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"allowed_token_ids", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"truncate_prompt_tokens", kBoth, kRefused, "null", kGone, NotOfferedYet},
    {"audio", kChat, kRefused, "null", kGone, NotOfferedYet},
    {"web_search_options", kChat, kRefused, "null", kGone, NotOfferedYet},
    {"reasoning_effort", kChat, kRefused, "null", kGone, NotOfferedYet},
    {"moderation", kChat, kRefused, "null", kGone, NotOfferedYet},
    {"chat_template", kChat, kRefused, "null", "the operator's choice: --chat-template", NotOfferedYet},
    {"documents", kChat, kRefused, "null", kGone, NotOfferedYet},
};

using Readers = std::unordered_map<std::string, FieldReader>;

Readers MakeReaders(Endpoint endpoint) {
  Readers readers;
  for (const FieldSpec& field : kFields) {
    if (IsFieldOf(field, endpoint)) readers.emplace(field.name, field.reader);
  }
  return readers;
}

}  // namespace

std::span<const FieldSpec> ApiFields() { return kFields; }

bool IsFieldOf(const FieldSpec& field, Endpoint endpoint) {
  return field.of == FieldOf::kBoth || (field.of == FieldOf::kChat) == (endpoint == Endpoint::kChat);
}

const char* FieldSupportName(FieldSupport support) {
  return support == FieldSupport::kHonoured ? "honoured" : support == FieldSupport::kRefused ? "refused" : "ignored";
}

FieldReader FindField(Endpoint endpoint, const std::string& name) {
  static const Readers chat = MakeReaders(Endpoint::kChat), completion = MakeReaders(Endpoint::kCompletion);
  const Readers& readers = endpoint == Endpoint::kChat ? chat : completion;
  const auto found = readers.find(name);
  return found == readers.end() ? nullptr : found->second;
}

}  // namespace loupe
