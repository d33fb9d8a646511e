// loupe generate: one answer on the terminal, through the same engine that serves.
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "engine/engine.h"
#include "engine/load/load_model.h"
#include "engine/validate.h"
#include "nlohmann/json.hpp"
#include "server/commands/command.h"
#include "server/kv_json.h"
#include "server/logging.h"
#include "server/metrics.h"
#include "server/read_input.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

struct State {
  std::string model;
  EngineConfig config;
  std::string prompt, prompt_file, system, kv;
  bool chat = false;
  SamplingParams sampling;
  uint64_t seed = 0;
  CLI::Option* seed_option = nullptr;
};

absl::StatusOr<std::string> ReadPrompt(const State& state) {
  if (!state.prompt.empty() && !state.prompt_file.empty()) {
    return absl::InvalidArgumentError("--prompt and --prompt-file are both given; use one");
  }
  if (!state.prompt.empty()) return state.prompt;
  if (!state.prompt_file.empty()) return ReadFile("prompt file", state.prompt_file);
  if (isatty(STDIN_FILENO)) std::fprintf(stderr, "reading the prompt from the terminal; end it with Ctrl-D\n");
  return ReadStandardInput();
}

absl::StatusOr<std::vector<int32_t>> EncodePrompt(const Engine& engine, bool has_template, const State& state,
                                                  const std::string& prompt) {
  if (!state.chat && state.system.empty()) return engine.tokenizer().Encode(prompt, true, true);
  if (!has_template) return absl::FailedPreconditionError("this model has no chat template; leave --chat out or give --chat-template");
  Json messages = Json::array();
  if (!state.system.empty()) messages.push_back({{"role", "system"}, {"content", state.system}});
  messages.push_back({{"role", "user"}, {"content", prompt}});
  const auto text = engine.chat_template().Render({{"messages", messages}, {"add_generation_prompt", true}});
  if (!text.ok()) return text.status();
  return engine.tokenizer().Encode(*text, false, true);
}

struct Outcome {
  std::string text;
  std::vector<int32_t> ids;
  Finished finished;
};

// Until the answer is complete, or nobody can read what is printed.
Outcome Follow(ResponseStream& stream, bool print) {
  Outcome outcome;
  while (!stream.done() && std::ferror(stdout) == 0) {
    const auto event = stream.WaitNext(std::chrono::steady_clock::now() + std::chrono::seconds(1));
    if (!event) continue;
    if (const auto* delta = std::get_if<Delta>(&*event)) {
      outcome.text += delta->text;
      outcome.ids.insert(outcome.ids.end(), delta->token_ids.begin(), delta->token_ids.end());
      if (print) {
        std::fwrite(delta->text.data(), 1, delta->text.size(), stdout);
        std::fflush(stdout);
      }
    } else if (const auto* finished = std::get_if<Finished>(&*event)) {
      outcome.finished = *finished;
    }
  }
  return outcome;
}

void PrintOutcome(const Outcome& o, double load_s, bool json) {
  const Usage& usage = o.finished.usage;
  const Timings& t = o.finished.timings;
  const double prefill_rate = t.prefill > 0 ? usage.prompt_tokens / t.prefill : 0;
  // The first token comes with the prompt; the others take a step each.
  const double decode_rate = t.decode > 0 ? (usage.completion_tokens - 1) / t.decode : 0;
  if (json) {
    const Json out = {{"text", o.text},
                      {"token_ids", o.ids},
                      {"finish_reason", FinishReasonName(o.finished.reason)},
                      {"usage",
                       {{"prompt_tokens", usage.prompt_tokens},
                        {"completion_tokens", usage.completion_tokens},
                        {"kv", KvReportToJson(usage.kv)}}},
                      {"timings",
                       {{"load_s", load_s},
                        {"prefill_s", t.prefill},
                        {"decode_s", t.decode},
                        {"prefill_tokens_per_s", prefill_rate},
                        {"decode_tokens_per_s", decode_rate}}}};
    std::printf("%s\n", out.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    return;
  }
  std::printf("\n");
  std::fprintf(stderr, "\n%d + %d tokens, %s | load %.2f s | prompt %.0f tokens/s | generation %.0f tokens/s | cache %s\n",
               usage.prompt_tokens, usage.completion_tokens, FinishReasonName(o.finished.reason), load_s, prefill_rate, decode_rate,
               FormatSize(usage.kv.device_bytes).c_str());
}

int Run(State state, const CommonOptions& common) {
  InitLogging(common.log_level == "info" ? "warning" : common.log_level);
  if (state.model.empty()) return Fail(absl::InvalidArgumentError("generate needs --model PATH"));
  auto prompt = ReadPrompt(state);
  if (!prompt.ok()) return Fail(prompt.status());
  const auto start = std::chrono::steady_clock::now();
  state.config.max_sequences = 1;
  state.config.allow_baselines = true;
  auto model = LoadModel(state.model, state.config);
  if (!model.ok()) return Fail(model.status());
  const bool has_template = model->chat_template != nullptr;
  if (!has_template && !model->chat_template_error.empty() && state.chat) {
    return Fail(absl::FailedPreconditionError(model->chat_template_error));
  }
  auto engine = Engine::Create(state.config, *std::move(model));
  if (!engine.ok()) return Fail(engine.status());
  const double load_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  Request request;
  request.id = "generate";
  request.sampling = state.sampling;
  if (state.seed_option->count() > 0) request.sampling.seed = state.seed;
  request.arrival = std::chrono::steady_clock::now();
  if (!state.kv.empty()) {
    auto kv = ParseKvOptions(state.kv);
    if (!kv.ok()) return Fail(kv.status());
    request.kv = *std::move(kv);
  }
  auto ids = EncodePrompt(**engine, has_template, state, *prompt);
  if (!ids.ok()) return Fail(ids.status());
  request.prompt = *std::move(ids);
  const absl::Status valid = ValidateRequest(request);
  if (!valid.ok()) return Fail(valid);
  auto stream = (*engine)->Submit(std::move(request));
  if (!stream.ok()) return Fail(stream.status());
  const Outcome outcome = Follow(**stream, !common.json);
  if (std::ferror(stdout) != 0) return kExitFailed;  // main says so
  if (!outcome.finished.error.ok()) return Fail(outcome.finished.error);
  PrintOutcome(outcome, load_s, common.json);
  return kExitOk;
}

}  // namespace

Command AddGenerateCommand(CLI::App* root) {
  Command command = MakeCommand(root, "generate", "answer one prompt on the terminal",
                                "loupe generate --model models/SmolLM2-135M-Instruct.Q4_1.gguf --chat --prompt 'What is a loupe?'");
  auto state = std::make_shared<State>();
  CLI::App* app = command.app;
  AddModelOptions(app, &state->model, &state->config);
  AddStrategyOptions(app, &state->config);
  app->add_option("--prompt,-p", state->prompt, "the prompt; without it and --prompt-file it is read from stdin");
  app->add_option("--prompt-file", state->prompt_file, "file that holds the prompt");
  app->add_flag("--chat", state->chat, "put the prompt into the model's chat template");
  app->add_option("--system", state->system, "system message (implies --chat)");
  app->add_option("--max-tokens", state->sampling.max_tokens, "tokens to generate; -1: until the context is full");
  app->add_option("--temperature", state->sampling.temperature, "0 is greedy");
  app->add_option("--top-p", state->sampling.top_p, "nucleus sampling");
  app->add_option("--top-k", state->sampling.top_k, "0: off");
  state->seed_option = app->add_option("--seed", state->seed, "the same seed gives the same text");
  app->add_option("--stop", state->sampling.stop, "stop string (repeatable)")->allow_extra_args(false);
  app->add_option("--kv", state->kv,
                  "KV policy object, e.g. '{\"policy\":\"h2o\",\"budget\":{\"ratio\":0.25}}'; loupe serve --help-kv explains it")
      ->type_name("JSON");
  const auto common = command.common;
  command.run = [state, common] { return Run(*state, *common); };
  return command;
}

}  // namespace loupe
