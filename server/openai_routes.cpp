#include "server/openai_routes.h"

#include <atomic>
#include <mutex>
#include <optional>
#include <span>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/validate.h"
#include "server/http_json.h"
#include "server/http_status.h"
#include "server/kv_json.h"
#include "server/kv_protect.h"
#include "server/management.h"
#include "server/openai_answer.h"
#include "server/openai_prompt.h"
#include "server/openai_request.h"
#include "server/openai_text.h"
#include "server/openapi.h"
#include "server/retry_after.h"
#include "server/tools_json.h"
#include "server/version.h"

namespace loupe {
namespace {

namespace asio = boost::asio;
using Json = nlohmann::ordered_json;

HttpResponse JsonResponse(const Json& json) {
  HttpResponse response;
  response.body = DumpJson(json);
  return response;
}

// Nothing that this server could read: set for a body that is no JSON by its own account.
bool IsJsonBody(const HttpRequest& http, HttpResponse* refusal) {
  const std::string type = http.content_type.substr(0, http.content_type.find(';'));
  if (!http.content_encoding.empty() && !absl::EqualsIgnoreCase(http.content_encoding, "identity")) {
    *refusal = ErrorResponse(415, absl::StrCat("Content-Encoding ", http.content_encoding.substr(0, 60),
                                               " is not offered; send the body as it is"));
    return false;
  }
  if (type.empty() || absl::StartsWithIgnoreCase(type, "application/json")) return true;
  *refusal = ErrorResponse(415, absl::StrCat("Content-Type is ", type.substr(0, 60), ", must be application/json"));
  return false;
}

// The engine's name for a request: unique whatever clients choose, and still one that its log lines can be found by.
// (gRPC's names hold a space, these do not.)
std::string EngineId(const std::string& id) {
  static std::atomic<uint64_t> counter{0};
  return absl::StrCat(id, "/", ++counter);
}

// A request that was taken: everything RunAnswer needs, at stable addresses.
struct Taken {
  ApiRequest request;
  std::unique_ptr<Answer> answer;
  std::optional<StreamSet> streams;
  std::shared_ptr<void> in_flight;
};

class OpenAiApi {
 public:
  explicit OpenAiApi(ServerContext& context) : context_(context) {}

  asio::awaitable<void> Complete(Endpoint endpoint, const HttpRequest& http, HttpExchange& exchange);
  HttpResponse Models() const;
  HttpResponse Model(const HttpRequest& http) const;
  HttpResponse Cancel(const HttpRequest& http) const;
  HttpResponse Text(const HttpRequest& http, absl::StatusOr<Json> (*answer)(const Engine&, std::string_view)) const;

 private:
  absl::StatusOr<std::unique_ptr<Taken>> Read(Endpoint endpoint, const HttpRequest& http) const;
  absl::Status Take(const HttpRequest& http, const HttpExchange& exchange, Taken* taken);
  absl::Status CompileGrammar(Engine& engine, const HttpExchange& exchange, ApiRequest* request) const;
  absl::Status Submit(Engine& engine, const HttpRequest& http, const std::vector<std::vector<int32_t>>& prompts,
                      Taken* taken);
  Json ModelEntry(const Engine& engine) const;

  ServerContext& context_;
  std::once_flag measured_;
  int longest_token_bytes_ = 0;
};

absl::Status OpenAiApi::Submit(Engine& engine, const HttpRequest& http,
                               const std::vector<std::vector<int32_t>>& prompts, Taken* taken) {
  std::vector<Request> requests;
  for (const std::vector<int32_t>& prompt : prompts) {
    Request& request = requests.emplace_back(taken->request.engine);
    request.id = EngineId(http.id);
    request.prompt = prompt;
    request.arrival = http.arrival;
    if (taken->request.timeout_ms > 0)
      request.deadline = http.arrival + std::chrono::milliseconds(taken->request.timeout_ms);
  }
  auto streams = engine.SubmitAll(std::move(requests));
  if (!streams.ok()) return WithQueueWait(streams.status(), engine, *context_.metrics);
  taken->in_flight = context_.in_flight.Add({http.id, ShownId(taken->request.endpoint, http.id)}, *streams);
  taken->streams.emplace(*std::move(streams), http.account);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Taken>> OpenAiApi::Read(Endpoint endpoint, const HttpRequest& http) const {
  const auto engine = ServingEngine(context_);
  if (!engine.ok()) return engine.status();
  auto taken = std::make_unique<Taken>();
  auto parsed = ParseApiRequest(endpoint, http.body, context_.strict_fields);
  if (!parsed.ok()) return parsed.status();
  taken->request = *std::move(parsed);
  if (auto status = CheckModel(context_, taken->request.model); !status.ok()) return status;
  if (auto status = ValidateRequest(taken->request.engine, (*engine)->vocab_size()); !status.ok()) return status;
  return taken;
}

absl::Status OpenAiApi::CompileGrammar(Engine& engine, const HttpExchange& exchange, ApiRequest* request) const {
  const ToolFormat format = context_.tool_format.value_or(ToolFormatOf(engine.chat_template().source()));
  auto calls = ToolGrammar(request->tools, format);
  if (!calls.ok()) return calls.status();
  if (*calls) request->grammar = **std::move(calls), request->grammar_field = "tools";
  if (!request->grammar) return absl::OkStatus();
  auto compiled = engine.CompileGrammar(*request->grammar, [&exchange] { return exchange.client_gone(); });
  if (!compiled.ok()) {
    return absl::Status(compiled.status().code(), absl::StrCat(request->grammar_field, ": ", std::string(compiled.status().message())));
  }
  request->engine.grammar = *std::move(compiled);
  return absl::OkStatus();
}

absl::Status OpenAiApi::Take(const HttpRequest& http, const HttpExchange& exchange, Taken* taken) {
  auto engine_now = ServingEngine(context_);
  if (!engine_now.ok()) return engine_now.status();
  Engine& engine = **engine_now;
  ApiRequest& request = taken->request;
  if (auto status = CompileGrammar(engine, exchange, &request); !status.ok()) return status;
  std::call_once(measured_, [&] { longest_token_bytes_ = LongestTokenBytes(engine.tokenizer()); });
  const auto start = std::chrono::steady_clock::now();
  const PromptLimits limits{engine.max_context(), longest_token_bytes_};
  auto prompts = BuildPrompts(request, engine.chat_template(), engine.tokenizer(), limits);
  if (!prompts.ok()) return prompts.status();
  if (request.endpoint == Endpoint::kChat) {
    auto status = ProtectMessages(engine.chat_template(), engine.tokenizer(), prompts->front(), &request);
    if (!status.ok()) return status;
  }
  context_.metrics->ObserveTokenize(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (auto status = Submit(engine, http, *prompts, taken); !status.ok()) return status;
  // Ids are in range: the engine has accepted them.
  for (ApiPrompt& prompt : request.prompts) {
    if (request.echo && !prompt.is_text) prompt.text = engine.tokenizer().Decode(prompt.ids, /*skip_control=*/false);
  }
  std::optional<AnswerParserOptions> parser;
  if (request.endpoint == Endpoint::kChat) {
    const std::span<const int32_t> prompt = prompts->front();
    const std::string end = engine.tokenizer().Decode(prompt.last(std::min<size_t>(prompt.size(), 8)), /*skip_control=*/false);
    const bool structured = request.grammar && !request.tools.active();
    parser = MakeParserOptions(request.tools, context_.tool_format.value_or(ToolFormatOf(engine.chat_template().source())),
                               engine.chat_template(), structured, end);
  }
  taken->answer = std::make_unique<Answer>(request, http.id, context_.model_name, *std::move(prompts), parser);
  return absl::OkStatus();
}

// Null for now, or why the key may not ask more at present.
absl::StatusOr<std::unique_ptr<Taken>> EnterKey(const HttpRequest& http, std::shared_ptr<void>* place) {
  if (http.account == nullptr) return nullptr;
  auto entered = http.account->Enter();
  if (!entered.ok()) return entered.status();
  *place = *std::move(entered);
  return nullptr;
}

// What the access log may say of a refusal. A message about the request may quote what the client sent, so unless
// prompts may be logged only its code and the field stay.
std::string LoggedError(Endpoint endpoint, const absl::Status& status, bool log_prompts) {
  const int http_status = HttpStatusOf(status);
  const std::string message(status.message());
  const bool too_long = RejectReasonOf(status) == RejectReason::kTooLong;  // all numbers
  if (log_prompts || too_long || (http_status != 400 && http_status != 404)) return message.substr(0, 500);
  const std::string field = message.substr(0, message.find_first_of(".[:"));
  const std::string code = absl::StatusCodeToString(status.code());
  return FindField(endpoint, field) == nullptr ? code : absl::StrCat(code, " in ", field);
}

// One line's worth about the answer, for the access log.
void LogAnswer(const Answer& answer, FinishReason reason, Json* log) {
  const Timings& t = answer.choices().front().end.timings;
  (*log)["prompt_tokens"] = answer.prompt_tokens();
  (*log)["completion_tokens"] = answer.completion_tokens();
  (*log)["finish_reason"] = FinishReasonName(reason);
  (*log)["queue_s"] = t.queue;
  (*log)["prefill_s"] = t.prefill;
  (*log)["decode_s"] = t.decode;
  (*log)["first_token_s"] = t.first_token;
  (*log)["policy"] = answer.choices().front().end.usage.kv.policy;
}

asio::awaitable<void> OpenAiApi::Complete(Endpoint endpoint, const HttpRequest& http, HttpExchange& exchange) {
  const Api api = endpoint == Endpoint::kChat ? Api::kOpenAiChat : Api::kOpenAiCompletion;
  HttpResponse refusal;
  if (!IsJsonBody(http, &refusal)) {
    context_.metrics->CountRequest(api, CodeClass::kClientError, FinishReason::kError);
    context_.metrics->CountRejected(RejectReason::kInvalid);
    co_await exchange.Respond(std::move(refusal));
    co_return;
  }
  std::shared_ptr<void> place;  // among the requests that the key may have in flight
  absl::StatusOr<std::unique_ptr<Taken>> taken = EnterKey(http, &place);
  const bool beyond_key = !taken.ok();
  if (!beyond_key) {
    std::function<void()> read = [&] { taken = Read(endpoint, http); };
    co_await exchange.Compute(std::move(read));
  }
  if (taken.ok()) {
    const ApiRequest& request = (*taken)->request;
    const bool slow = request.grammar.has_value() || request.tools.active();
    std::function<void()> take = [&] {
      if (auto status = Take(http, exchange, taken->get()); !status.ok()) taken = std::move(status);
    };
    co_await exchange.Compute(std::move(take), slow);
  }
  if (!taken.ok()) {
    const bool loading = context_.engine == nullptr;
    context_.metrics->CountRequest(api, CodeClassOf(HttpStatusOf(taken.status())), FinishReason::kError);
    context_.metrics->CountRejected(beyond_key ? RejectReason::kKeyLimit
                                    : loading  ? RejectReason::kLoading
                                               : RejectReasonOf(taken.status()));
    exchange.log["error"] = LoggedError(endpoint, taken.status(), context_.log_prompts);
    refusal = ErrorResponse(taken.status());
    co_await exchange.Respond(std::move(refusal));
    co_return;
  }
  if (context_.log_prompts) exchange.log["body"] = http.body.substr(0, 4096);
  Taken& t = **taken;
  const AnswerOutcome outcome = co_await RunAnswer(t.request, *t.answer, *t.streams, exchange);
  context_.metrics->CountRequest(api, CodeClassOf(outcome.status), outcome.reason);
  LogAnswer(*t.answer, outcome.reason, &exchange.log);
}

Json OpenAiApi::ModelEntry(const Engine& engine) const {
  return {{"id", context_.model_name},
          {"object", "model"},
          {"created", context_.created_unix_s},
          {"owned_by", "loupe"},
          {"max_model_len", engine.max_context()}};
}

HttpResponse OpenAiApi::Models() const {
  const auto now = ServingEngine(context_);
  if (!now.ok()) return ErrorResponse(now.status());
  return JsonResponse({{"object", "list"}, {"data", Json::array({ModelEntry(**now)})}});
}

HttpResponse OpenAiApi::Model(const HttpRequest& http) const {
  const auto now = ServingEngine(context_);
  if (!now.ok()) return ErrorResponse(now.status());
  const absl::Status served = CheckModel(context_, http.parameter);
  return served.ok() ? JsonResponse(ModelEntry(**now)) : ErrorResponse(served);
}

HttpResponse OpenAiApi::Cancel(const HttpRequest& http) const {
  const auto now = ServingEngine(context_);
  if (!now.ok()) return ErrorResponse(now.status());
  if (context_.in_flight.Cancel(http.parameter)) return JsonResponse({{"id", http.parameter}, {"cancelled", true}});
  return ErrorResponse(404,
                       absl::StrCat("no request ", http.parameter.substr(0, 200), " is in flight; it may have ended"));
}

HttpResponse OpenAiApi::Text(const HttpRequest& http,
                             absl::StatusOr<Json> (*answer)(const Engine&, std::string_view)) const {
  HttpResponse refusal;
  if (!IsJsonBody(http, &refusal)) return refusal;
  const auto now = ServingEngine(context_);
  if (!now.ok()) return ErrorResponse(now.status());
  const auto json = answer(**now, http.body);
  return json.ok() ? JsonResponse(*json) : ErrorResponse(json.status());
}

}  // namespace

HttpRouter OpenAiRoutes(ServerContext& context) {
  const auto api = std::make_shared<OpenAiApi>(context);
  const auto complete = [api](Endpoint endpoint) -> HttpHandler {
    return [api, endpoint](const HttpRequest& http, HttpExchange& exchange) {
      return api->Complete(endpoint, http, exchange);
    };
  };
  HttpRouter router;
  router.Add("POST", "/v1/chat/completions", complete(Endpoint::kChat));
  router.Add("POST", "/v1/completions", complete(Endpoint::kCompletion));
  router.Add("GET", "/v1/models", Immediate([api](const HttpRequest&) { return api->Models(); }));
  router.Add("GET", "/v1/models/{id}", Immediate([api](const HttpRequest& http) { return api->Model(http); }));
  router.Add("GET", "/v1/kv/policies", Immediate([&context](const HttpRequest&) {
               return JsonResponse(KvPoliciesToJson(context.allow_baselines));
             }));
  router.Add("POST", "/v1/requests/{id}/cancel",
             Immediate([api](const HttpRequest& http) { return api->Cancel(http); }));
  router.Add("POST", "/tokenize", Computed([api](const HttpRequest& http) { return api->Text(http, TokenizeBody); }));
  router.Add("POST", "/detokenize", Computed([api](const HttpRequest& http) { return api->Text(http, DetokenizeBody); }));
  router.Add("POST", "/apply-template", Computed([api](const HttpRequest& http) { return api->Text(http, ApplyTemplateBody); }));
  router.AddOpen("GET", "/health", Immediate([&context](const HttpRequest&) { return Readiness(context); }));
  router.Add("GET", "/version", Immediate([](const HttpRequest&) {
               return JsonResponse({{"version", kVersion}, {"commit", kCommit}});
             }));
  // Made once: it is the same as long as the server runs.
  router.Add("GET", "/openapi.json",
             Immediate([document = DumpJson(OpenApiDocument(context.keys != nullptr))](const HttpRequest&) {
               HttpResponse response;
               response.body = document;
               return response;
             }));
  return router;
}

absl::StatusOr<std::unique_ptr<HttpServer>> StartOpenAi(ServerContext& context, const std::string& address) {
  HttpServerOptions options;
  options.keys = context.keys;
  options.tls = context.tls;
  options.cors = context.cors;
  return HttpServer::Start(context, OpenAiRoutes(context), address, options);
}

}  // namespace loupe
