// The engine: one step thread that owns the model pass and the KV cache, and two bounded ways in and out of it
// (Submit, ResponseStream). Public methods may be called from any thread. Created once, after the model is loaded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/clock.h"
#include "engine/engine_config.h"
#include "engine/engine_observer.h"
#include "engine/engine_stats.h"
#include "engine/grammar/grammar.h"
#include "engine/request.h"
#include "engine/response_stream.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"

namespace loupe {

struct LoadedModel;  // engine/load/load_model.h

class Engine {
 public:
  // Takes the KV arena and starts the step thread. RESOURCE_EXHAUSTED (memory) and INVALID_ARGUMENT (limits) with
  // numbers. `observer` may be null; it and `clock` outlive the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineConfig& config, LoadedModel model,
                                                        EngineObserver* observer = nullptr,
                                                        const Clock& clock = Clock::Real());
  // Ends everything in flight with kCancelled and joins the step thread.
  ~Engine();

  // INVALID_ARGUMENT: empty prompt, token ids out of range, or does not fit (message starts with
  // "context_length_exceeded: " and holds both numbers), or a `kv` that cannot be ("kv.<field>: ..."); ALREADY_EXISTS:
  // the id is in flight; RESOURCE_EXHAUSTED: queue full; UNAVAILABLE: draining.
  absl::StatusOr<std::shared_ptr<ResponseStream>> Submit(Request request);
  // All of them or, with the error of the first that cannot be taken, none. INVALID_ARGUMENT also if there are more than
  // may ever wait (max_queue).
  absl::StatusOr<std::vector<std::shared_ptr<ResponseStream>>> SubmitAll(std::vector<Request> requests);
  // For Request::grammar; see GrammarCompiler.
  absl::StatusOr<std::shared_ptr<Grammar>> CompileGrammar(const GrammarSpec& spec, std::function<bool()> cancelled = {});
  // Idempotent; false if no such request is in flight.
  bool Cancel(const std::string& request_id);

  // From now on Submit answers UNAVAILABLE; what is queued or running goes on.
  void BeginDrain();
  // True once nothing is queued or running; false at `until`.
  bool WaitIdle(SteadyTime until);
  // Ends everything in flight: kCancelled with stop_reason "drain".
  void AbortAll();

  EngineStats Stats() const;
  const Tokenizer& tokenizer() const;
  const ChatTemplate& chat_template() const;
  int max_context() const;
  int vocab_size() const;

 private:
  Engine();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace loupe
