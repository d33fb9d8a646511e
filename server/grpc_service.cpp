#include "server/grpc_service.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <mutex>
#include <random>
#include <span>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "loupe/v1/admin.grpc.pb.h"
#include "loupe/v1/inference.grpc.pb.h"
#include "server/convert_proto.h"
#include "server/grpc_caller.h"
#include "server/grpc_log.h"
#include "server/grpc_parse_errors.h"
#include "server/grpc_stream.h"
#include "server/grpc_unary_log.h"
#include "server/retry_after.h"
#include "server/tools_json.h"

namespace loupe {
namespace {

constexpr size_t kLongestRequestId = 256;           // bytes: ids go into every log line
constexpr int kKeepaliveMs = 60'000, kKeepaliveTimeoutMs = 20'000;  // a peer that vanished is noticed
constexpr std::chrono::milliseconds kDeadlineMargin{100};  // so that partial text still reaches the caller
constexpr std::chrono::milliseconds kLastBytes{100};
constexpr int kSpareStreams = 64;                          // of a connection: cancels, probes, and calls that are refused
constexpr int64_t kLeastCallBytes = int64_t{256} << 20;    // buffers of all connections

std::string NewRequestId() {
  static std::atomic<uint64_t> counter{std::random_device{}()};
  return absl::StrFormat("req-%08x%08x", std::random_device{}(), static_cast<uint32_t>(counter.fetch_add(1)));
}

// For calls that everybody with a key may make.
absl::StatusOr<Engine*> FindEngine(const ServerContext& context, const grpc::CallbackServerContext& call) {
  const auto caller = FindCaller(context, call);
  if (!caller.ok()) return caller.status();
  return ServingEngine(context);
}

void SetDeadline(const grpc::CallbackServerContext& call, int timeout_ms, Request* request) {
  const auto steady = std::chrono::steady_clock::now();
  const auto call_deadline = call.deadline();
  // gRPC says "none" by the end of time.
  if (call_deadline < std::chrono::system_clock::now() + std::chrono::hours(24 * 365)) {
    request->deadline = steady + std::chrono::duration_cast<SteadyTime::duration>(call_deadline - std::chrono::system_clock::now()) -
                        kDeadlineMargin;
  }
  if (timeout_ms > 0) {
    const SteadyTime own = steady + std::chrono::milliseconds(timeout_ms);
    if (!request->deadline || own < *request->deadline) request->deadline = own;
  }
}

bool WantsEcho(const v1::GenerateRequest& message) { return message.echo(); }
bool WantsEcho(const v1::ChatRequest&) { return false; }

// The prompt's text, if the request wants it back.
template <class Message>
absl::StatusOr<std::string> EchoOf(const Message& message, const Engine& engine) {
  if constexpr (std::is_same_v<Message, v1::GenerateRequest>) {
    if (!message.echo()) return std::string();
    if (message.input_case() == v1::GenerateRequest::kPrompt) return message.prompt();
    return TextOf(message.prompt_token_ids().ids(), "prompt_token_ids", engine.tokenizer());
  }
  return std::string();
}

absl::StatusOr<Request> ReadRequest(const v1::GenerateRequest& message, const TextParts& parts, ToolOptions*) {
  return RequestFromProto(message, parts);
}
absl::StatusOr<Request> ReadRequest(const v1::ChatRequest& message, const TextParts& parts, ToolOptions* tools) {
  return RequestFromProto(message, parts, tools);
}

// Null: the answer may be any text.
absl::StatusOr<std::shared_ptr<Grammar>> CompileGrammar(const grpc::CallbackServerContext& call, const v1::Structure& structure,
                                                        const ToolOptions& tools, ToolFormat format, Engine& engine) {
  auto spec = GrammarFromProto(structure);
  if (!spec.ok()) return spec.status();
  auto calls = ToolGrammar(tools, format);
  if (!calls.ok()) return calls.status();
  if (*calls) spec = *std::move(calls);
  if (!*spec) return nullptr;
  auto compiled = engine.CompileGrammar(**spec, [&call] { return call.IsCancelled(); });
  if (compiled.ok()) return compiled;
  return absl::Status(compiled.status().code(),
                      absl::StrCat(tools.active() ? "tools: " : "structure: ", std::string(compiled.status().message())));
}

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* call, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

// Counts what is at work in this server, so that it can be stopped as soon as that has ended; streams that have no end
// (a watcher of the health service) are not among it.
class WorkGauge {
 public:
  // At work until the returned handle goes.
  std::shared_ptr<void> Enter() { return EnterBelow(INT_MAX); }
  // The same if fewer than `limit` are; null otherwise.
  std::shared_ptr<void> EnterBelow(int limit) {
    const std::lock_guard lock(mutex_);
    if (count_ >= limit) return nullptr;
    ++count_;
    return {this, [](void* self) { static_cast<WorkGauge*>(self)->Leave(); }};
  }
  void WaitForNone(SteadyTime until) {
    std::unique_lock lock(mutex_);
    none_.wait_until(lock, until, [this] { return count_ == 0; });
  }

 private:
  void Leave() {
    const std::lock_guard lock(mutex_);
    if (--count_ == 0) none_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable none_;
  int count_ = 0;  // guarded by mutex_
};

class InferenceService : public v1::Inference::CallbackService {
 public:
  InferenceService(ServerContext& context, boost::asio::thread_pool& pool, WorkGauge& work)
      : context_(context), pool_(pool), work_(work) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(grpc::CallbackServerContext* call,
                                                           const v1::GenerateRequest* request) override {
    return Open<v1::GenerateResponse>(call, *request, Api::kGrpcGenerate);
  }
  grpc::ServerWriteReactor<v1::ChatResponse>* Chat(grpc::CallbackServerContext* call, const v1::ChatRequest* request) override {
    return Open<v1::ChatResponse>(call, *request, Api::kGrpcChat);
  }

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* call, const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override {
    const auto at_work = work_.Enter();
    const auto engine = FindEngine(context_, *call);
    if (!engine.ok()) return Answer(call, engine.status());
    if (absl::Status model = CheckModel(context_, request->model()); !model.ok()) return Answer(call, model);
    const absl::Status size = CheckTextBytes("text", static_cast<int64_t>(request->text().size()));
    if (!size.ok()) return Answer(call, size);
    const Tokenizer& tokenizer = (*engine)->tokenizer();
    for (const int32_t id : tokenizer.Encode(request->text(), request->add_special(), request->parse_special())) {
      response->add_tokens(id);
      response->add_pieces(std::string(tokenizer.Piece(id)));
    }
    return Answer(call, absl::OkStatus());
  }

  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* call, const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override {
    const auto at_work = work_.Enter();
    const auto engine = FindEngine(context_, *call);
    if (!engine.ok()) return Answer(call, engine.status());
    if (absl::Status model = CheckModel(context_, request->model()); !model.ok()) return Answer(call, model);
    auto text = TextOf(request->tokens(), "tokens", (*engine)->tokenizer());
    if (text.ok()) response->set_text(*std::move(text));
    return Answer(call, text.status());
  }

  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* call, const v1::ListModelsRequest*,
                                       v1::ListModelsResponse* response) override {
    const auto engine = FindEngine(context_, *call);
    if (!engine.ok()) return Answer(call, engine.status());
    v1::Model* model = response->add_models();
    model->set_id(context_.model_name);
    model->set_max_model_len((*engine)->max_context());
    model->set_created(context_.created_unix_s);
    return Answer(call, absl::OkStatus());
  }

  grpc::ServerUnaryReactor* ListKvPolicies(grpc::CallbackServerContext* call, const v1::ListKvPoliciesRequest*,
                                           v1::ListKvPoliciesResponse* response) override {
    const auto caller = FindCaller(context_, *call);
    if (caller.ok()) *response = PoliciesToProto(context_.allow_baselines);
    return Answer(call, caller.status());
  }

  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* call, const v1::CancelRequest* request,
                                   v1::CancelResponse* response) override {
    const auto engine = FindEngine(context_, *call);
    if (!engine.ok()) return Answer(call, engine.status());
    response->set_found(context_.in_flight.Cancel(request->request_id()));
    return Answer(call, absl::OkStatus());
  }

 private:
  template <class Response, class Message>
  grpc::ServerWriteReactor<Response>* Open(grpc::CallbackServerContext* call, const Message& message, Api api) {
    const std::string id = message.request_id().empty() ? NewRequestId() : message.request_id();
    auto stream = std::make_shared<GrpcStream<Response>>(pool_, GrpcCallLog(context_.metrics, api, id), call);
    std::string echo;
    std::optional<AnswerParserOptions> parser;
    const absl::Status admitted = Admit(*call, stream.get());
    const auto submitted =
        admitted.ok() ? Submit(*call, message, id, &echo, &parser) : absl::StatusOr<std::shared_ptr<ResponseStream>>(admitted);
    if (submitted.ok()) {
      stream->KeepUntilDone(context_.in_flight.Add({id}, {*submitted}));
      if (parser) stream->SetParsers(*parser, message.sampling().has_n() ? message.sampling().n() : 1, id);
      const bool scored = WantsEcho(message) && message.sampling().has_logprobs() && message.sampling().logprobs() >= 0;
      stream->Begin(*submitted, std::move(echo), scored, message.sampling().has_n() ? message.sampling().n() : 1);
    } else {
      if (admitted.ok()) context_.metrics->CountRejected(RejectReasonOf(submitted.status()));
      if (submitted.status().code() == absl::StatusCode::kResourceExhausted) {
        const int wait_ms = 1000 * RetryAfterOf(submitted.status()).value_or(1);
        call->AddTrailingMetadata("grpc-retry-pushback-ms", std::to_string(wait_ms));
      }
      stream->Refuse(submitted.status());
    }
    return stream.get();
  }

  // By the number of calls and the caller's key, and counts if not.
  template <class Stream>
  absl::Status Admit(const grpc::CallbackServerContext& call, Stream* stream) {
    auto at_work = work_.EnterBelow(context_.max_connections);
    if (at_work == nullptr) {
      context_.metrics->CountRejected(RejectReason::kQueueFull);
      return absl::ResourceExhaustedError(absl::StrCat("calls: ", context_.max_connections,
                                                       " are open, the most allowed (--max-connections); try again soon"));
    }
    stream->KeepUntilDone(std::move(at_work));
    const auto caller = FindCaller(context_, call);
    if (!caller.ok() || *caller == nullptr) return caller.status();
    stream->SetAccount(*caller);
    auto place = (*caller)->Enter();
    if (place.ok()) {
      stream->KeepUntilDone(*std::move(place));
    } else {
      context_.metrics->CountRejected(RejectReason::kKeyLimit);
    }
    return place.status();
  }

  template <class Message>
  absl::StatusOr<std::shared_ptr<ResponseStream>> Submit(const grpc::CallbackServerContext& call, const Message& message,
                                                         const std::string& id, std::string* echo,
                                                         std::optional<AnswerParserOptions>* parser) {
    const auto engine = ServingEngine(context_);
    if (!engine.ok()) return engine.status();
    if (absl::Status model = CheckModel(context_, message.model()); !model.ok()) return model;
    if (id.size() > kLongestRequestId) {
      return absl::InvalidArgumentError(absl::StrCat("request_id: has ", id.size(), " bytes, at most ", kLongestRequestId));
    }
    const SteadyTime arrival = std::chrono::steady_clock::now();
    ToolOptions tools;
    auto request = ReadRequest(message, Texts(**engine), &tools);
    if (!request.ok()) return request.status();
    const ToolFormat format = context_.tool_format.value_or(ToolFormatOf((*engine)->chat_template().source()));
    auto grammar = CompileGrammar(call, message.structure(), tools, format, **engine);
    if (!grammar.ok()) return grammar.status();
    request->grammar = *std::move(grammar);
    if (std::is_same_v<Message, v1::ChatRequest>) {
      const std::span<const int32_t> prompt = request->prompt;
      const std::string end = (*engine)->tokenizer().Decode(prompt.last(std::min<size_t>(prompt.size(), 8)), /*skip_control=*/false);
      *parser = MakeParserOptions(tools, format, (*engine)->chat_template(), request->grammar != nullptr && !tools.active(), end);
    }
    auto text = EchoOf(message, **engine);
    if (!text.ok()) return text.status();
    *echo = *std::move(text);
    context_.metrics->ObserveTokenize(std::chrono::duration<double>(std::chrono::steady_clock::now() - arrival).count());
    request->id = absl::StrCat("grpc ", id);  // apart from the names that HTTP gives
    request->arrival = arrival;
    SetDeadline(call, message.timeout_ms(), &*request);
    auto stream = (*engine)->Submit(*std::move(request));
    if (stream.status().code() == absl::StatusCode::kResourceExhausted) return WithQueueWait(stream.status(), **engine, *context_.metrics);
    if (stream.status().code() != absl::StatusCode::kAlreadyExists) return stream;
    return absl::AlreadyExistsError(absl::StrCat("request_id: '", id, "' is in flight; use another id"));
  }

  TextParts Texts(const Engine& engine) {
    std::call_once(measured_, [&] { longest_token_bytes_ = LongestTokenBytes(engine.tokenizer()); });
    return {engine.tokenizer(), engine.chat_template(), engine.vocab_size(), {engine.max_context(), longest_token_bytes_}};
  }

  ServerContext& context_;
  boost::asio::thread_pool& pool_;
  WorkGauge& work_;
  std::once_flag measured_;
  int longest_token_bytes_ = 0;
};

class AdminService : public v1::Admin::CallbackService {
 public:
  AdminService(ServerContext& context, std::function<void()> drain) : context_(context), drain_(std::move(drain)) {}

  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* call, const v1::GetStatsRequest*,
                                     v1::GetStatsResponse* response) override {
    const auto engine = FindEngine(context_, *call);
    if (engine.ok()) *response = StatsToProto((*engine)->Stats());
    return Answer(call, engine.status());
  }
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* call, const v1::DrainRequest*, v1::DrainResponse*) override {
    const auto caller = FindCaller(context_, *call);
    if (caller.ok()) drain_();
    return Answer(call, caller.status());
  }
  grpc::ServerUnaryReactor* ResetPrefixCache(grpc::CallbackServerContext* call, const v1::ResetPrefixCacheRequest*,
                                             v1::ResetPrefixCacheResponse*) override {
    const auto caller = FindCaller(context_, *call);
    if (!caller.ok()) return Answer(call, caller.status());
    return Answer(call, absl::UnimplementedError("ResetPrefixCache comes with the prefix cache; this build has none"));
  }

 private:
  ServerContext& context_;
  std::function<void()> drain_;
};

}  // namespace

struct GrpcServer::Impl {
  // Pumps of streams run here; destroyed after the server, whose calls use it.
  boost::asio::thread_pool pool{1};
  WorkGauge work;
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<grpc::Server> server;
  int port = 0;
};

GrpcServer::GrpcServer() : impl_(std::make_unique<Impl>()) {}
GrpcServer::~GrpcServer() {
  if (impl_->server) Shutdown(std::chrono::steady_clock::now());
  impl_->pool.join();
}
int GrpcServer::port() const { return impl_->port; }

namespace {

// The reflection service cannot be asked for a key, so it is offered only where none is needed.
class WithReflection : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->push_back(std::make_unique<grpc::reflection::ProtoServerReflectionPlugin>());
  }
};

absl::StatusOr<std::unique_ptr<grpc::Server>> Listen(const ServerContext& context, const std::string& address, const char* flag,
                                                     grpc::Service* service, int* port) {
  const size_t colon = address.rfind(':');
  RouteGrpcLog();
  // gRPC would resolve service names and cut numbers; a port is a number here.
  int wanted = -1;
  const bool number = colon != std::string::npos && absl::SimpleAtoi(address.substr(colon + 1), &wanted);
  if (!number || colon == 0 || wanted < 0 || wanted > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("'", address, "' is not HOST:PORT with a port from 0 to 65535"));
  }
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, CredentialsOf(context), port);
  builder.RegisterService(service);
  if (context.keys == nullptr) builder.SetOption(std::make_unique<WithReflection>());
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(LogUnaryCalls(context));
  interceptors.push_back(NameParseErrors());
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  builder.SetMaxReceiveMessageSize(static_cast<int>(std::min<int64_t>(context.max_body_bytes, INT_MAX)));
  // A call beyond the limit is told so; those that a connection may not even open would wait at the client without a word.
  const int64_t streams = int64_t{context.max_connections} + kSpareStreams;
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(std::min<int64_t>(streams, INT_MAX)));
  const int64_t bytes = std::max(kLeastCallBytes, 16 * context.max_body_bytes);
  builder.SetResourceQuota(grpc::ResourceQuota("calls").Resize(static_cast<size_t>(bytes)));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  // Two servers on one port would split the calls between them at random.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients that ping, also between calls, are welcome; by default gRPC answers them with GOAWAY.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  std::unique_ptr<grpc::Server> server;
  {
    const QuietGrpcLog quiet;
    server = builder.BuildAndStart();
  }
  if (server == nullptr || *port == 0) {
    return absl::AlreadyExistsError(absl::StrCat("cannot listen on ", address, " for gRPC: the port is in use or the address is not "
                                                 "this machine's; choose another with ", flag, " HOST:PORT"));
  }
  return server;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(ServerContext& context, const std::string& address) {
  auto out = std::unique_ptr<GrpcServer>(new GrpcServer());
  grpc::EnableDefaultHealthCheckService(true);
  out->impl_->service = std::make_unique<InferenceService>(context, out->impl_->pool, out->impl_->work);
  auto server = Listen(context, address, "--grpc", out->impl_->service.get(), &out->impl_->port);
  if (!server.ok()) return server.status();
  out->impl_->server = *std::move(server);
  out->SetServing(false);
  return out;
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::StartAdmin(ServerContext& context, const std::string& address,
                                                                   std::function<void()> drain) {
  auto out = std::unique_ptr<GrpcServer>(new GrpcServer());
  out->impl_->service = std::make_unique<AdminService>(context, std::move(drain));
  auto server = Listen(context, address, "--admin", out->impl_->service.get(), &out->impl_->port);
  if (!server.ok()) return server.status();
  out->impl_->server = *std::move(server);
  return out;
}

void GrpcServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = impl_->server->GetHealthCheckService();
  if (health == nullptr) return;
  health->SetServingStatus(serving);
  health->SetServingStatus("loupe.v1.Inference", serving);
}

void GrpcServer::Shutdown(SteadyTime until) {
  impl_->work.WaitForNone(until);
  // gRPC would wait for a health watcher until the end of its time; what is at work has ended, so this much is enough to
  // get the last bytes out.
  impl_->server->Shutdown(std::chrono::system_clock::now() + kLastBytes);
  impl_->server->Wait();
}

}  // namespace loupe
