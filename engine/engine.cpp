#include "engine/engine.h"

#include <algorithm>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/engine_core.h"
#include "engine/load/load_model.h"
#include "engine/step_model.h"
#include "kernels/check.h"
#include "spdlog/spdlog.h"

namespace loupe {
namespace {

class RealClock : public Clock {
 public:
  SteadyTime Now() const override { return std::chrono::steady_clock::now(); }
};

// Chat with a model that has no template is the client's mistake, to be answered like one: a template that refuses.
absl::StatusOr<std::unique_ptr<ChatTemplate>> RefusingTemplate(const std::string& why) {
  std::string text = why.empty() ? "this model has no chat template; use plain completions or start with --chat-template"
                                 : "the chat template of this model is not supported: " + why;
  for (char& c : text) {
    if (c == '\'' || c == '\\' || static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return ChatTemplate::Parse("{{ raise_exception('" + text + "') }}", {});
}

absl::StatusOr<CoreLimits> ResolveLimits(const EngineConfig& config, const StepModel& model, const Backend& backend) {
  CoreLimits limits;
  limits.max_context = config.max_context == 0 ? model.max_context() : config.max_context;
  limits.max_sequences = config.max_sequences;
  limits.max_step_rows = config.max_step_tokens;
  limits.max_queue = config.max_queue;
  const BackendInfo info = backend.Info();
  int64_t bytes = config.kv_device_bytes;
  if (bytes == 0) {
    bytes = info.host_memory ? std::min(info.memory_bytes / 4, info.memory_available_bytes) : info.memory_available_bytes / 10 * 9;
  }
  limits.kv_device_bytes = bytes / kSlabBytes * kSlabBytes;
  if (limits.kv_device_bytes < kSlabBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the KV cache would have ", bytes, " bytes of ", info.memory_available_bytes,
                                                   " available; it needs at least ", kSlabBytes, " (--kv-device-bytes)"));
  }
  return limits;
}

}  // namespace

const Clock& Clock::Real() {
  static const RealClock clock;
  return clock;
}

struct Engine::Impl {
  ~Impl();

  // Owners first: what comes later points to them.
  std::unique_ptr<Backend> backend;
  std::unique_ptr<StepModel> model;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat_template;
  std::unique_ptr<GrammarCompiler> grammars;
  std::unique_ptr<EngineCore> core;
  std::thread step_thread;

  void Run();
};

Engine::Impl::~Impl() {
  if (!step_thread.joinable()) return;
  core->queue().Stop();
  step_thread.join();
}

void Engine::Impl::Run() {
  for (;;) {
    const EngineCore::Outcome outcome = core->Step();
    if (outcome == EngineCore::Outcome::kStopped) return;
    if (outcome == EngineCore::Outcome::kIdle) core->queue().WaitForWork();
  }
}

Engine::Engine() : impl_(std::make_unique<Impl>()) {}
Engine::~Engine() = default;

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineConfig& config, LoadedModel model, EngineObserver* observer,
                                                       const Clock& clock) {
  LOUPE_CHECK(model.backend && model.decoder && model.tokenizer) << "the model is not loaded";
  std::unique_ptr<Engine> engine(new Engine());
  Impl& impl = *engine->impl_;
  impl.backend = std::move(model.backend);
  impl.model = MakeStepModel(std::move(model.decoder), *impl.backend);
  impl.tokenizer = std::move(model.tokenizer);
  impl.chat_template = std::move(model.chat_template);
  if (!impl.chat_template) {
    auto refusing = RefusingTemplate(model.chat_template_error);
    if (!refusing.ok()) return refusing.status();
    impl.chat_template = *std::move(refusing);
  }
  const auto limits = ResolveLimits(config, *impl.model, *impl.backend);
  if (!limits.ok()) return limits.status();
  std::random_device entropy;
  const uint64_t seed = uint64_t{entropy()} << 32 | entropy();
  auto core = EngineCore::Create(*limits, {impl.backend.get(), impl.model.get(), impl.tokenizer.get(), observer, &clock, seed,
                                           {config.kv, config.allow_baselines, std::move(model.artifacts)}});
  if (!core.ok()) return core.status();
  impl.core = *std::move(core);
  impl.grammars = std::make_unique<GrammarCompiler>(*impl.tokenizer, impl.core->vocab_size());

  const CoreLimits& effective = impl.core->limits();
  if (effective.max_context < limits->max_context) {
    spdlog::warn("the context is {} positions, not {}: the KV cache of {} bytes holds no longer one (--kv-device-bytes)",
                 effective.max_context, limits->max_context, effective.kv_device_bytes);
  }
  const BackendInfo device = impl.backend->Info();
  spdlog::info("device: {}, {}", device.name, device.detail);
  spdlog::info("limits: context {} positions, {} sequences, {} rows a step, {} requests waiting, KV cache {} bytes, weights {} bytes",
               effective.max_context, effective.max_sequences, effective.max_step_rows, effective.max_queue,
               effective.kv_device_bytes, impl.model->weight_bytes());
  impl.step_thread = std::thread([&impl] { impl.Run(); });
  return engine;
}

absl::StatusOr<std::shared_ptr<ResponseStream>> Engine::Submit(Request request) { return impl_->core->Submit(std::move(request)); }
absl::StatusOr<std::vector<std::shared_ptr<ResponseStream>>> Engine::SubmitAll(std::vector<Request> requests) {
  return impl_->core->SubmitAll(std::move(requests));
}
absl::StatusOr<std::shared_ptr<Grammar>> Engine::CompileGrammar(const GrammarSpec& spec, std::function<bool()> cancelled) {
  return impl_->grammars->Compile(spec, std::move(cancelled));
}
bool Engine::Cancel(const std::string& request_id) { return impl_->core->queue().Cancel(request_id); }
void Engine::BeginDrain() { impl_->core->queue().BeginDrain(); }
bool Engine::WaitIdle(SteadyTime until) { return impl_->core->queue().WaitIdle(until); }
void Engine::AbortAll() { impl_->core->queue().AbortAll(); }
EngineStats Engine::Stats() const { return impl_->core->queue().Stats(); }
const Tokenizer& Engine::tokenizer() const { return *impl_->tokenizer; }
const ChatTemplate& Engine::chat_template() const { return *impl_->chat_template; }
int Engine::max_context() const { return impl_->core->max_context(); }
int Engine::vocab_size() const { return impl_->core->vocab_size(); }

}  // namespace loupe
