// loupe serve: opens the listeners, loads the model behind them, serves until SIGTERM or SIGINT, drains.
#include <algorithm>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/load/load_model.h"
#include "server/api_keys.h"
#include "server/commands/command.h"
#include "server/cors.h"
#include "server/descriptors.h"
#include "server/grpc_service.h"
#include "server/http_server.h"
#include "server/kv_json.h"
#include "server/logging.h"
#include "server/management.h"
#include "server/openai_routes.h"
#include "server/read_input.h"
#include "server/server_context.h"
#include "server/stop_source.h"
#include "server/tls.h"
#include "spdlog/spdlog.h"

namespace loupe {
namespace {

using Clock = std::chrono::steady_clock;

struct ServeOptions {
  std::string model, model_name, kv, chat_template_file;
  std::string http = "127.0.0.1:8000", grpc = "127.0.0.1:8001", management = "127.0.0.1:8002", admin;
  EngineConfig engine;
  int64_t max_body_bytes = int64_t{16} << 20;
  int max_connections = 1024;
  int drain_propagation_s = 0, drain_max_s = 120;
  std::string api_keys_file, cors_origins, tool_format = "auto";
  TlsFiles tls;
  bool strict_fields = false, log_prompts = false, help_kv = false;
};

// Everything that listens. Members go in reverse order: listeners first, then what they point to.
struct Process {
  StopSource stop;
  Lifecycle lifecycle;
  std::unique_ptr<Metrics> metrics;
  std::unique_ptr<ApiKeys> keys;
  std::unique_ptr<TlsContext> tls;
  CorsPolicy cors;
  ServerContext context;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<HttpServer> management, http;
  std::unique_ptr<GrpcServer> grpc, admin;
};

absl::Status CheckOptions(ServeOptions* options) {
  if (options->model.empty()) return absl::InvalidArgumentError("serve needs --model PATH; deploy/quickstart.sh brings a first one");
  if (!std::filesystem::exists(options->model)) {
    return absl::NotFoundError(
        absl::StrCat("no such model file: ", options->model, "; deploy/quickstart.sh brings a first one into models/"));
  }
  if (options->model_name.empty()) options->model_name = std::filesystem::path(options->model).stem().string();
  if (!options->kv.empty()) {
    auto kv = ParseKvOptions(options->kv);
    if (!kv.ok()) return kv.status();
    options->engine.kv = *std::move(kv);
  }
  if (!options->chat_template_file.empty()) {
    auto text = ReadFile("chat template", options->chat_template_file);
    if (!text.ok()) return text.status();
    if (text->empty()) {
      return absl::InvalidArgumentError(absl::StrCat("chat template '", options->chat_template_file, "' has 0 bytes"));
    }
    options->engine.chat_template = *std::move(text);
  }
  return absl::OkStatus();
}

// Who may call, and how: keys, certificates, web pages.
absl::Status OpenAccess(const ServeOptions& options, Process* process) {
  if (!options.api_keys_file.empty()) {
    auto keys = ApiKeys::Load(options.api_keys_file);
    if (!keys.ok()) return keys.status();
    process->keys = *std::move(keys);
    process->context.keys = process->keys.get();
  }
  if (!options.tls.empty()) {
    auto tls = TlsContext::Load(options.tls);
    if (!tls.ok()) return tls.status();
    process->tls = *std::move(tls);
    process->context.tls = process->tls.get();
  }
  if (options.cors_origins.empty()) return absl::OkStatus();
  auto cors = CorsPolicy::Parse(options.cors_origins);
  if (!cors.ok()) return cors.status();
  process->cors = *std::move(cors);
  process->context.cors = &process->cors;
  return absl::OkStatus();
}

absl::Status OpenListeners(const ServeOptions& options, Process* process) {
  auto management = StartManagement(process->context, options.management);
  if (!management.ok()) return management.status();
  process->management = *std::move(management);
  auto http = StartOpenAi(process->context, options.http);
  if (!http.ok()) return http.status();
  process->http = *std::move(http);
  auto grpc = GrpcServer::Start(process->context, options.grpc);
  if (!grpc.ok()) return grpc.status();
  process->grpc = *std::move(grpc);
  if (!options.admin.empty()) {
    auto admin = GrpcServer::StartAdmin(process->context, options.admin, [process] { process->stop.Request(); });
    if (!admin.ok()) return admin.status();
    process->admin = *std::move(admin);
  }
  spdlog::info("listening: http {}, grpc {}, management {}{}{}", options.http, options.grpc, options.management,
               options.admin.empty() ? "" : ", admin ", options.admin);
  return absl::OkStatus();
}

// One generated token through the whole engine, so that the first request finds warm caches.
absl::Status WarmUp(Engine& engine) {
  Request request;
  request.id = "warm-up";
  request.prompt = {engine.tokenizer().eos() >= 0 ? engine.tokenizer().eos() : 0};
  request.sampling.temperature = 0;
  request.sampling.max_tokens = std::min(2, engine.max_context() - 1);
  request.sampling.ignore_eos = true;
  request.arrival = Clock::now();
  auto stream = engine.Submit(std::move(request));
  if (!stream.ok()) return stream.status();
  while (!(*stream)->done()) {
    const auto event = (*stream)->WaitNext(Clock::now() + std::chrono::seconds(1));
    if (const auto* finished = event ? std::get_if<Finished>(&*event) : nullptr) {
      if (!finished->error.ok()) return finished->error;
    }
  }
  return absl::OkStatus();
}

absl::Status LoadAndStart(const ServeOptions& options, Process* process) {
  const auto start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  process->lifecycle.Set(Phase::kLoading, "reading the model");
  auto model = LoadModel(options.model, options.engine, [&](double share) { process->lifecycle.SetProgress(share); });
  if (!model.ok()) return model.status();
  const double load_s = seconds();
  process->metrics->SetModel(*model, load_s);
  if (!model->chat_template_error.empty()) spdlog::warn("chat requests will be refused: {}", model->chat_template_error);
  process->lifecycle.Set(Phase::kWarming, "taking the cache and warming up");
  auto engine = Engine::Create(options.engine, *std::move(model), process->metrics.get());
  const bool exhausted = engine.status().code() == absl::StatusCode::kResourceExhausted;
  if (exhausted || absl::StrContains(engine.status().message(), "KV arena")) {
    return absl::Status(engine.status().code(), absl::StrCat(std::string(engine.status().message()),
                                                             "; the size of the cache is --kv-device-bytes"));
  }
  if (!engine.ok()) return engine.status();
  process->engine = *std::move(engine);
  const absl::Status warm = WarmUp(*process->engine);
  if (!warm.ok()) return warm;
  process->metrics->SetStartupPhase("warm", seconds() - load_s);
  process->context.engine = process->engine.get();
  process->lifecycle.Set(Phase::kReady);
  process->grpc->SetServing(true);
  spdlog::info("ready after {:.2f} s: {} on {}", seconds(), options.model_name, options.http);
  return absl::OkStatus();
}

// Sleeps until `until` or a second signal; true if that came.
bool AbortedBefore(Clock::time_point until, StopSource* stop) {
  while (stop->num_signals() < 2 && stop->Wait(until)) {
  }
  return stop->num_signals() >= 2;
}

void Drain(const ServeOptions& options, Process* process) {
  spdlog::info("draining: {} s for routers to notice, then at most {} s; a second signal ends at once",
               options.drain_propagation_s, options.drain_max_s);
  process->lifecycle.Set(Phase::kDraining, "shutting down");
  process->grpc->SetServing(false);
  bool abort = AbortedBefore(Clock::now() + std::chrono::seconds(options.drain_propagation_s), &process->stop);
  process->engine->BeginDrain();
  const auto end = Clock::now() + std::chrono::seconds(options.drain_max_s);
  while (!abort && Clock::now() < end && !process->engine->WaitIdle(std::min(end, Clock::now() + std::chrono::milliseconds(50)))) {
    abort = AbortedBefore(Clock::now(), &process->stop);
  }
  process->engine->AbortAll();
  process->engine->WaitIdle(Clock::now() + std::chrono::seconds(5));
  // Answers that are complete in the engine still have to reach their sockets.
  const auto flush = Clock::now() + std::chrono::seconds(5);
  process->http->Stop(flush);
  process->grpc->Shutdown(flush);
  if (process->admin) process->admin->Shutdown(flush);
  process->management->Stop(flush);
}

int Run(ServeOptions options, const Command& command) {
  if (options.help_kv) {
    std::printf("%s", KvPoliciesAsText().c_str());
    return kExitOk;
  }
  InitLogging(command.common->log_level);
  const absl::Status checked = CheckOptions(&options);
  if (!checked.ok()) return Fail(checked);
  std::signal(SIGPIPE, SIG_IGN);

  Process process;
  process.metrics = std::make_unique<Metrics>(options.model_name);
  ServerContext& context = process.context;
  context.model_name = options.model_name;
  context.created_unix_s = std::time(nullptr);
  context.strict_fields = options.strict_fields;
  context.log_prompts = options.log_prompts;
  context.tool_format = ParseToolFormat(options.tool_format);  // auto: none
  context.allow_baselines = options.engine.allow_baselines;
  context.max_body_bytes = options.max_body_bytes;
  const auto connections = FitConnections(options.max_connections, RaiseDescriptorLimit());
  if (!connections.ok()) return Fail(connections.status());
  context.max_connections = *connections;
  context.lifecycle = &process.lifecycle;
  context.metrics = process.metrics.get();
  context.config_json = command.options->ToJson(2);
  absl::Status opened = OpenAccess(options, &process);
  if (opened.ok()) opened = OpenListeners(options, &process);
  if (!opened.ok()) return Fail(opened);

  absl::Status loaded;
  std::atomic<bool> load_done{false};
  std::thread loader([&] {
    loaded = LoadAndStart(options, &process);
    load_done = true;
    if (!loaded.ok()) process.stop.Request();
  });
  // The engine has no way to stop the process by itself, so its failure is looked for.
  const auto failure = [&] { return load_done && loaded.ok() ? process.engine->Stats().failure : std::string(); };
  while (!process.stop.Wait(Clock::now() + std::chrono::milliseconds(500)) && failure().empty()) {
  }
  if (!load_done) {
    // Nothing is in flight yet, and reading a large model cannot be interrupted.
    spdlog::info("stopped while loading");
    std::_Exit(kExitOk);
  }
  loader.join();
  if (!loaded.ok()) {
    process.lifecycle.Set(Phase::kFailed, std::string(loaded.message()));
    return Fail(loaded);
  }
  const std::string failed = failure();
  Drain(options, &process);
  spdlog::info("stopped");
  return failed.empty() ? kExitOk : Fail(absl::UnavailableError(failed));
}

void AddAccessOptions(CLI::App* app, ServeOptions* o) {
  app->add_option("--api-keys", o->api_keys_file, "file of 'name: key' lines; then every route but /health needs a key")
      ->type_name("FILE");
  app->add_option("--tls-cert", o->tls.cert, "PEM certificate chain: HTTP and gRPC speak TLS; read again when it changes")
      ->type_name("FILE");
  app->add_option("--tls-key", o->tls.key, "PEM key of --tls-cert")->type_name("FILE");
  app->add_option("--tls-client-ca", o->tls.client_ca, "PEM authorities: clients must show a certificate of theirs")
      ->type_name("FILE");
  app->add_option("--cors-origins", o->cors_origins, "web origins that may call, separated by commas; * for all")
      ->type_name("LIST");
}

void AddServeOptions(CLI::App* app, ServeOptions* o) {
  AddModelOptions(app, &o->model, &o->engine);
  AddStrategyOptions(app, &o->engine);
  app->add_option("--model-name", o->model_name, "name that clients use; the file's name if empty");
  app->add_option("--http", o->http, "OpenAI-style HTTP")->type_name("HOST:PORT");
  app->add_option("--grpc", o->grpc, "loupe.v1.Inference")->type_name("HOST:PORT");
  app->add_option("--management", o->management, "probes and metrics; open before the model is loaded")->type_name("HOST:PORT");
  app->add_option("--admin", o->admin, "loupe.v1.Admin on a listener of its own; off if empty")->type_name("HOST:PORT");
  app->add_option("--max-sequences", o->engine.max_sequences, "sequences computed at a time")->check(CLI::Range(1, 4096));
  app->add_option("--max-step-tokens", o->engine.max_step_tokens, "rows of a step: prompt chunks and one row a running sequence")
      ->check(CLI::Range(1, 65536));
  app->add_option("--max-queue", o->engine.max_queue, "requests that may wait; more are answered 429")->check(CLI::Range(1, 1 << 20));
  app->add_option("--kv", o->kv, "KV policy object for requests that bring none; --help-kv explains it")->type_name("JSON");
  app->add_flag("--help-kv", o->help_kv, "print every KV policy with its parameters, then stop");
  app->add_flag("--allow-baselines", o->engine.allow_baselines, "offer KV policies that only serve as comparison");
  app->add_option("--chat-template", o->chat_template_file, "Jinja file in place of the model's own template")->type_name("FILE");
  app->add_option("--tool-format", o->tool_format, "how the model writes tool calls; auto: as its chat template says")
      ->check(CLI::IsMember({"auto", "hermes", "llama", "harmony"}));
  AddAccessOptions(app, o);
  AddSizeOption(app, "--max-body-bytes", &o->max_body_bytes, false, "largest HTTP body");
  app->add_option("--max-connections", o->max_connections, "open HTTP connections, and open gRPC calls")->check(CLI::Range(1, 1 << 20));
  app->add_option("--drain-propagation-s", o->drain_propagation_s, "on SIGTERM: seconds to go on accepting while unready")
      ->check(CLI::Range(0, 3600));
  app->add_option("--drain-max-s", o->drain_max_s, "and then seconds until what still runs is cut")->check(CLI::Range(0, 86400));
  app->add_flag("--strict-fields", o->strict_fields, "refuse unknown JSON fields");
  app->add_flag("--log-prompts", o->log_prompts, "let log lines carry prompt text");
}

}  // namespace

Command AddServeCommand(CLI::App* root) {
  Command command = MakeCommand(root, "serve", "serve a model over HTTP and gRPC",
                                "loupe serve --model models/SmolLM2-135M-Instruct.Q4_1.gguf --http 0.0.0.0:8000");
  auto options = std::make_shared<ServeOptions>();
  AddServeOptions(command.app, options.get());
  Command copy = command;
  command.run = [options, copy] { return Run(*options, copy); };
  return command;
}

}  // namespace loupe
