// loupe bench decode | prefill | serve: speed of this machine on a model, beside the memory limit of the same machine.
#include <cstdio>

#include "engine/bench/bench.h"
#include "nlohmann/json.hpp"
#include "server/commands/command.h"
#include "server/logging.h"

namespace loupe {
namespace {

struct State {
  std::string model;
  EngineConfig config;
  BenchOptions options;
};

void Print(const BenchResult& r, bool json, const State& state) {
  if (json) {
    nlohmann::ordered_json out = {{"case", r.name},
                                  {"context", state.options.context},
                                  {"batch", state.options.batch},
                                  {"time_us", r.time_us},
                                  {"tokens_per_s", r.tokens_per_s}};
    if (r.name == "serve") {
      out["first_token_ms"] = {{"p50", r.first_token_ms_p50}, {"p95", r.first_token_ms_p95}};
    } else {
      out.update({{"bytes", r.bytes},
                  {"flops", r.flops},
                  {"gbps", r.gbps},
                  {"limit_gbps", r.limit_gbps},
                  {"share_of_limit", r.share_of_limit}});
    }
    std::printf("%s\n", out.dump().c_str());
    return;
  }
  std::printf("%s: %.1f tokens/s (context %d, batch %d)\n", r.name.c_str(), r.tokens_per_s, state.options.context,
              state.options.batch);
  if (r.name == "serve") {
    std::printf("  first token: median %.0f ms, 95 %% within %.0f ms\n", r.first_token_ms_p50, r.first_token_ms_p95);
    return;
  }
  std::printf("  %.1f us %s, %.1f MB read, %.2f GFLOP (%.0f GFLOP/s)\n", r.time_us, r.name == "decode" ? "a step" : "a prompt",
              r.bytes / 1e6, r.flops / 1e9, r.flops / r.time_us / 1e3);
  std::printf("  memory: %.1f of %.1f GB/s measured on this machine (%.0f %%)\n", r.gbps, r.limit_gbps, 100 * r.share_of_limit);
}

int Run(const std::string& name, const State& state, bool json) {
  InitLogging("warning");
  if (state.model.empty()) return Fail(absl::InvalidArgumentError("bench needs --model PATH"));
  EngineConfig config = state.config;
  config.max_step_tokens = state.options.max_step_tokens;
  config.max_sequences = std::max(config.max_sequences, state.options.batch);
  config.max_queue = std::max(config.max_queue, state.options.batch);
  auto model = LoadModel(state.model, config);
  if (!model.ok()) return Fail(model.status());
  auto result = name == "decode"    ? BenchDecode(*model, state.options)
                : name == "prefill" ? BenchPrefill(*model, state.options)
                                    : BenchServe(*std::move(model), config, state.options);
  if (!result.ok()) return Fail(result.status());
  Print(*result, json, state);
  return kExitOk;
}

Command AddOne(CLI::App* bench, const std::string& name, const std::string& summary, const std::string& example) {
  Command command = MakeCommand(bench, name, summary, example);
  auto state = std::make_shared<State>();
  if (name != "decode") state->options.context = 512;
  AddModelOptions(command.app, &state->model, &state->config);
  command.app->add_option("--context", state->options.context, "tokens before the measured part, or of the prompt")
      ->check(CLI::Range(0, 1 << 20));
  command.app->add_option("--tokens", state->options.tokens, "tokens decoded a sequence")->check(CLI::Range(1, 1 << 20));
  command.app->add_option("--batch", state->options.batch, "sequences side by side")->check(CLI::Range(1, 4096));
  command.app->add_option("--repeat", state->options.repeat, "runs; the median counts")->check(CLI::Range(1, 1000));
  command.app->add_option("--max-step-tokens", state->options.max_step_tokens, "rows of a step")->check(CLI::Range(1, 65536));
  const auto common = command.common;
  command.run = [name, state, common] { return Run(name, *state, common->json); };
  return command;
}

}  // namespace

std::vector<Command> AddBenchCommands(CLI::App* root) {
  CLI::App* bench = root->add_subcommand("bench", "measure speed: decode, prefill, serve");
  bench->require_subcommand(1);
  const std::string model = " --model models/SmolLM2-135M-Instruct.Q4_1.gguf";
  return {AddOne(bench, "decode", "tokens per second while generating, at a depth of --context",
                 "loupe bench decode" + model + " --context 2048 --batch 8"),
          AddOne(bench, "prefill", "tokens per second of a prompt of --context tokens", "loupe bench prefill" + model + " --context 2048"),
          AddOne(bench, "serve", "the whole engine: --batch streams at a time, prompts of --context tokens",
                 "loupe bench serve" + model + " --context 128 --batch 8 --tokens 128")};
}

}  // namespace loupe
