#include "server/openapi.h"

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/openai_fields.h"
#include "server/version.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kSchemas = R"({
  "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "object",
    "required": ["message", "type", "param", "code"], "properties": {"message": {"type": "string", "minLength": 1},
      "type": {"enum": ["invalid_request_error", "authentication_error", "rate_limit_error", "service_unavailable_error", "server_error"]},
      "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}}}},
  "Usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "kv"],
    "properties": {"prompt_tokens": {"type": "integer", "minimum": 1}, "completion_tokens": {"type": "integer", "minimum": 0},
      "total_tokens": {"type": "integer", "minimum": 1},
      "prompt_tokens_details": {"type": "object", "required": ["cached_tokens"]},
      "kv": {"type": "object", "required": ["policy", "reason", "bytes", "bytes_ratio", "lists", "entries", "bits", "entries_by_format"]}}},
  "ChatCompletion": {"type": "object", "required": ["id", "object", "created", "model", "choices", "usage"], "properties": {
    "id": {"type": "string"}, "object": {"const": "chat.completion"}, "created": {"type": "integer"}, "model": {"type": "string"},
    "usage": {"$ref": "#/components/schemas/Usage"}, "prompt_token_ids": {"type": "array", "items": {"type": "integer"}},
    "choices": {"type": "array", "minItems": 1, "items": {"type": "object",
      "required": ["index", "message", "logprobs", "finish_reason", "stop_reason"], "properties": {"index": {"type": "integer"},
        "message": {"type": "object", "required": ["role", "content"],
          "properties": {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}, "reasoning_content": {"type": "string"},
            "tool_calls": {"type": "array", "items": {"type": "object", "required": ["id", "type", "function"]}}}},
        "logprobs": {"type": ["object", "null"]}, "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "stop_reason": {"type": ["string", "integer", "null"]}, "token_ids": {"type": "array", "items": {"type": "integer"}}}}}}},
  "Completion": {"type": "object", "required": ["id", "object", "created", "model", "choices", "usage"], "properties": {
    "id": {"type": "string"}, "object": {"const": "text_completion"}, "created": {"type": "integer"}, "model": {"type": "string"},
    "usage": {"$ref": "#/components/schemas/Usage"},
    "choices": {"type": "array", "minItems": 1, "items": {"type": "object",
      "required": ["index", "text", "logprobs", "finish_reason", "stop_reason"], "properties": {"index": {"type": "integer"},
        "text": {"type": "string"}, "logprobs": {"type": ["object", "null"]}, "finish_reason": {"enum": ["stop", "length"]},
        "stop_reason": {"type": ["string", "integer", "null"]}, "token_ids": {"type": "array", "items": {"type": "integer"}},
        "prompt_token_ids": {"type": "array", "items": {"type": "integer"}}}}}}},
  "Model": {"type": "object", "required": ["id", "object", "created", "owned_by", "max_model_len"], "properties": {
    "id": {"type": "string"}, "object": {"const": "model"}, "created": {"type": "integer"}, "owned_by": {"type": "string"},
    "max_model_len": {"type": "integer", "minimum": 1}}},
  "Models": {"type": "object", "required": ["object", "data"], "properties": {"object": {"const": "list"},
    "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}},
  "TokenizeRequest": {"type": "object", "properties": {"text": {"type": ["string", "null"]}, 
    "messages": {"anyOf": [{"$ref": "#/components/schemas/Messages"}, {"type": "null"}]},
    "add_special": {"type": ["boolean", "null"]}, "parse_special": {"type": ["boolean", "null"]}}},
  "Tokens": {"type": "object", "required": ["tokens", "pieces", "count"], "properties": {
    "tokens": {"type": "array", "items": {"type": "integer"}}, "pieces": {"type": "array", "items": {"type": "string"}},
    "count": {"type": "integer"}}},
  "DetokenizeRequest": {"type": "object", "required": ["tokens"], "properties": {
    "tokens": {"type": "array", "items": {"type": "integer"}}}},
  "Text": {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
  "ApplyTemplateRequest": {"type": "object", "required": ["messages"], "properties": {
    "messages": {"$ref": "#/components/schemas/Messages"},
    "chat_template_kwargs": {"type": ["object", "null"]}, "add_generation_prompt": {"type": ["boolean", "null"]},
    "continue_final_message": {"type": ["boolean", "null"]}}},
  "Prompt": {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
  "Policies": {"type": "object", "required": ["policies"], "properties": {"policies": {"type": "array", "items": {"type": "object",
    "required": ["name", "summary", "needs", "formats", "parameters"]}}}},
  "Cancelled": {"type": "object", "required": ["id", "cancelled"], "properties": {"cancelled": {"const": true}}},
  "Health": {"type": "object", "required": ["phase", "progress", "reason"]},
  "Version": {"type": "object", "required": ["version", "commit"]}
})";

struct Operation {
  const char *method, *path, *summary, *request, *answer;  // schemas by name; request empty: no body
  const char* errors;                                      // statuses, separated by spaces
};

constexpr const char* kGeneration = "400 401 404 408 413 415 429 431 500 503";
constexpr const char* kText = "400 401 413 415 431 500 503";

const Operation kOperations[] = {
    {"post", "/v1/chat/completions", "Answers a conversation, whole or as a stream.", "ChatRequest", "ChatCompletion", kGeneration},
    {"post", "/v1/completions", "Continues prompts, whole or as a stream.", "CompletionRequest", "Completion", kGeneration},
    {"get", "/v1/models", "The model that is served, with max_model_len.", "", "Models", "400 401 431 503"},
    {"get", "/v1/models/{id}", "The same by its name.", "", "Model", "400 401 404 431 503"},
    {"get", "/v1/kv/policies", "KV policies with their parameters, defaults and ranges.", "", "Policies", "400 401 431"},
    {"post", "/v1/requests/{id}/cancel", "Ends the requests that carry this id: an X-Request-Id, or the id of an answer.", "", "Cancelled",
     "400 401 404 413 431 503"},
    {"post", "/tokenize", "Token ids and pieces of a text or of a conversation.", "TokenizeRequest", "Tokens", kText},
    {"post", "/detokenize", "The text of token ids.", "DetokenizeRequest", "Text", kText},
    {"post", "/apply-template", "The prompt that a conversation becomes.", "ApplyTemplateRequest", "Prompt", kText},
    {"get", "/health", "Whether requests are welcome; needs no key.", "", "Health", "400 431 503"},
    {"get", "/version", "Version and commit of the server.", "", "Version", "400 401 431"},
    {"get", "/openapi.json", "This document.", "", "", "400 401 431"},
};

Json SchemaRef(const std::string& name) { return {{"$ref", absl::StrCat("#/components/schemas/", name)}}; }

Json RequestSchema(Endpoint endpoint) {
  Json properties = Json::object();
  for (const FieldSpec& field : ApiFields()) {
    if (!IsFieldOf(field, endpoint)) continue;
    const Json only_null = {{"type", "null"}};
    const bool nothing = std::string_view(field.schema) == "null";
    Json property = nothing ? only_null : Json{{"anyOf", Json::array({Json::parse(field.schema), only_null})}};
    property["description"] = field.note;
    property["x-loupe-support"] = FieldSupportName(field.support);
    properties[field.name] = std::move(property);
  }
  return {{"type", "object"}, {"properties", std::move(properties)}};
}

Json Answers(const Operation& operation) {
  static const std::map<std::string, const char*> kMeanings = {
      {"400", "The request is wrong; `param` names the field."},
      {"401", "No API key, or one that is not known."},
      {"404", "No such model, request or route."},
      {"408", "timeout_ms passed before the first token."},
      {"413", "The body is larger than --max-body-bytes."},
      {"415", "The body is no JSON by its own account."},
      {"429", "The queue is full, or the key is at its limit; Retry-After says when to come back."},
      {"431", "The header is larger than 64 KiB."},
      {"500", "A fault of the server."},
      {"503", "Loading, shutting down or out of connections; Retry-After says when to come back."}};
  Json answers = Json::object();
  const Json schema = *operation.answer == '\0' ? Json{{"type", "object"}} : SchemaRef(operation.answer);
  answers["200"] = {{"description", "The answer."}, {"content", {{"application/json", {{"schema", schema}}}}}};
  // Without a schema: readers of 3.1 apply it to the text or to each event, as they see fit.
  if (operation.errors == kGeneration) answers["200"]["content"]["text/event-stream"] = Json::object();
  for (const auto& [status, meaning] : kMeanings) {
    if (std::string_view(operation.errors).find(status) == std::string_view::npos) continue;
    const bool health = status == "503" && std::string_view(operation.path) == "/health";
    answers[status] = {{"description", meaning},
                       {"content", {{"application/json", {{"schema", SchemaRef(health ? "Health" : "Error")}}}}}};
  }
  return answers;
}

}  // namespace

Json OpenApiDocument(bool with_keys) {
  Json paths = Json::object();
  for (const Operation& operation : kOperations) {
    Json& entry = paths[operation.path][operation.method];
    entry["summary"] = operation.summary;
    if (std::string_view(operation.path).find("{id}") != std::string_view::npos) {
      entry["parameters"] = Json::array(
          {{{"name", "id"}, {"in", "path"}, {"required", true}, {"schema", {{"type", "string"}, {"minLength", 1}}}}});
    }
    if (*operation.request != '\0') {
      entry["requestBody"] = {{"required", true}, {"content", {{"application/json", {{"schema", SchemaRef(operation.request)}}}}}};
    }
    entry["responses"] = Answers(operation);
    if (with_keys && std::string_view(operation.path) == "/health") entry["security"] = Json::array();
  }
  Json schemas = {{"ChatRequest", RequestSchema(Endpoint::kChat)}, {"CompletionRequest", RequestSchema(Endpoint::kCompletion)}};
  schemas["ChatRequest"]["anyOf"] = Json::array({{{"required", {"messages"}}}, {{"required", {"prompt_token_ids"}}}});
  schemas["CompletionRequest"]["anyOf"] = Json::array({{{"required", {"prompt"}}}, {{"required", {"prompt_token_ids"}}}});
  for (const FieldSpec& field : ApiFields()) {
    if (std::string_view(field.name) == "messages") schemas["Messages"] = Json::parse(field.schema);
  }
  schemas.update(Json::parse(kSchemas));
  Json document = {{"openapi", "3.1.0"},
                   {"info", {{"title", "Loupe"}, {"version", kVersion}}},
                   {"paths", std::move(paths)},
                   {"components", {{"schemas", std::move(schemas)}}}};
  if (with_keys) {
    document["components"]["securitySchemes"]["key"] = {{"type", "http"}, {"scheme", "bearer"}};
    document["security"] = Json::array({{{"key", Json::array()}}});
  }
  return document;
}

}  // namespace loupe
