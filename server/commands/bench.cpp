// loupe bench attention | decode | prefill | serve | policies: speed of this machine on a model, or on random weights of a known
// shape, beside the memory limit of the same machine.
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "engine/bench/attention.h"
#include "engine/bench/bench.h"
#include "engine/bench/policies.h"
#include "engine/bench/random_model.h"
#include "nlohmann/json.hpp"
#include "server/commands/command.h"
#include "server/commands/policies.h"
#include "server/logging.h"

namespace loupe {
namespace {

struct State {
  std::string model, random_weights;
  EngineConfig config;
  BenchOptions options;
  int prompt_rows = 0;  // attention
  std::vector<std::string> kv;  // policies
};

void Print(const BenchResult& r, bool json, const State& state) {
  if (json) {
    nlohmann::ordered_json out = {{"case", r.name},
                                  {"context", state.options.context},
                                  {"batch", state.options.batch},
                                  {"time_us", r.time_us},
                                  {"tokens_per_s", r.tokens_per_s},
                                  {"bytes", r.bytes},
                                  {"flops", r.flops},
                                  {"gbps", r.gbps},
                                  {"limit_gbps", r.limit_gbps},
                                  {"share_of_limit", r.share_of_limit}};
    if (r.name == "serve") out["first_token_ms"] = {{"p50", r.first_token_ms_p50}, {"p95", r.first_token_ms_p95}};
    if (r.name == "decode") out["host_us"] = r.host_us;
    std::printf("%s\n", out.dump().c_str());
    return;
  }
  std::printf("%s: %.1f tokens/s (context %d, batch %d)\n", r.name.c_str(), r.tokens_per_s, state.options.context,
              state.options.batch);
  if (r.name == "serve") {
    std::printf("  first token: median %.0f ms, 95 %% within %.0f ms\n", r.first_token_ms_p50, r.first_token_ms_p95);
  }
  const char* unit = r.name == "decode"      ? "a step"
                     : r.name == "attention" ? "a layer"
                     : r.name == "serve"     ? "all streams"
                                             : "a prompt";
  std::printf("  %.1f us %s, %.1f MB read, %.2f GFLOP (%.0f GFLOP/s)\n", r.time_us, unit,
              r.bytes / 1e6, r.flops / 1e9, r.flops / r.time_us / 1e3);
  std::printf("  memory: %.1f of %.1f GB/s measured on this machine (%.0f %%)\n", r.gbps, r.limit_gbps, 100 * r.share_of_limit);
}

absl::StatusOr<BenchResult> Attention(const ModelConfig& shape, Backend& backend, const State& state) {
  AttentionCase c;
  c.num_heads = shape.num_heads, c.num_kv_heads = shape.num_kv_heads, c.head_dim = shape.head_dim;
  c.batch = state.options.batch, c.context = state.options.context, c.prompt_rows = state.prompt_rows;
  c.repeat = state.options.repeat;
  auto formats = FormatSharesByName(state.options.format);
  if (!formats.ok()) return formats.status();
  c.formats = *std::move(formats);
  return BenchAttention(backend, c);
}

int ComparePolicies(LoadedModel& model, const State& state, bool json) {
  const auto policies = ParsePolicies(state.kv);
  if (!policies.ok()) return Fail(policies.status());
  const auto costs = BenchPolicies(model, state.options, *policies);
  if (!costs.ok()) return Fail(costs.status());
  if (!json) std::printf("%10s %8s %10s %8s %8s  %s\n", "prefill ms", "x first", "decode us", "x first", "bytes", "policy");
  for (const PolicyCost& c : *costs) {
    if (json) {
      const nlohmann::ordered_json out = {{"case", "policies"},
                                          {"kv", nlohmann::ordered_json::parse(c.label)},
                                          {"context", state.options.context},
                                          {"prefill_ms", c.prefill_ms},
                                          {"prefill_time_ratio", c.prefill_ratio},
                                          {"decode_us", c.decode_us},
                                          {"decode_speed_ratio", c.decode_ratio},
                                          {"bytes_ratio", c.bytes_ratio}};
      std::printf("%s\n", out.dump().c_str());
    } else {
      std::printf("%10.1f %8.3f %10.1f %8.3f %6.1f %%  %s\n", c.prefill_ms, c.prefill_ratio, c.decode_us, c.decode_ratio,
                  100 * c.bytes_ratio, c.label.c_str());
    }
  }
  return kExitOk;
}

int Report(const absl::StatusOr<BenchResult>& result, bool json, const State& state) {
  if (!result.ok()) return Fail(result.status());
  Print(*result, json, state);
  return kExitOk;
}

int Run(const std::string& name, const State& state, bool json) {
  InitLogging("warning");
  if (state.model.empty() == state.random_weights.empty()) {
    return Fail(absl::InvalidArgumentError(absl::StrCat("bench ", name, " needs --model PATH",
                                                        name == "serve" ? "" : " or --random-weights SHAPE, one of them")));
  }
  EngineConfig config = state.config;
  // A step holds at least one row of every sequence.
  config.max_step_tokens = std::max(state.options.max_step_tokens, state.options.batch);
  config.max_sequences = std::max(config.max_sequences, state.options.batch);
  config.max_queue = std::max(config.max_queue, state.options.batch);
  if (name == "attention" && !state.random_weights.empty()) {
    const auto shape = ShapeByName(state.random_weights);
    if (!shape.ok()) return Fail(shape.status());
    const auto backend = MakeBackend(config.backend);
    return backend.ok() ? Report(Attention(*shape, **backend, state), json, state) : Fail(backend.status());
  }
  auto model = state.model.empty() ? MakeRandomModel(state.random_weights, config) : LoadModel(state.model, config);
  if (!model.ok()) return Fail(model.status());
  if (name == "attention") return Report(Attention(model->config, *model->backend, state), json, state);
  if (name == "policies") return ComparePolicies(*model, state, json);
  return Report(name == "decode"    ? BenchDecode(*model, state.options)
                : name == "prefill" ? BenchPrefill(*model, state.options)
                                    : BenchServe(*std::move(model), config, state.options),
                json, state);
}

Command AddOne(CLI::App* bench, const std::string& name, const std::string& summary, const std::string& example) {
  Command command = MakeCommand(bench, name, summary, example);
  auto state = std::make_shared<State>();
  if (name != "decode") state->options.context = 512;
  AddModelOptions(command.app, &state->model, &state->config);
  command.app->add_option("--context", state->options.context, "tokens before the measured part, or of the prompt")
      ->check(CLI::Range(0, 1 << 20));
  if (name == "policies") {
    AddStrategyOptions(command.app, &state->config);
    command.app->add_option("--kv", state->kv, "KV policy object; once for each policy, the first is what the others are held against")
        ->type_name("JSON")
        ->allow_extra_args(false);
  }
  if (name != "serve") {
    command.app->add_option("--random-weights", state->random_weights, "in place of --model: llama-3.1-8b, llama-3.2-1b, smollm2-135m")
        ->type_name("SHAPE");
  }
  if (name == "attention") {
    command.app
        ->add_option("--prompt-rows", state->prompt_rows, "of the context, the last that are prompt rows; 0: one decode row a sequence")
        ->check(CLI::Range(0, 1 << 20));
    command.app->add_option("--format", state->options.format,
                            "of the pages: dense, s8, s4, s3, s2, s4v2 and the like, or mixed (25 % s8, 60 % s4, 15 % s2)");
  }
  if (name == "decode") {
    command.app->add_option("--format", state->options.format, "of all cache pages: dense, s8, s4, s3, s2, or s4v2 and the like");
  }
  if (name != "attention") {
    command.app->add_option("--tokens", state->options.tokens, "tokens decoded a sequence")->check(CLI::Range(1, 1 << 20));
  }
  if (name != "policies") command.app->add_option("--batch", state->options.batch, "sequences side by side")->check(CLI::Range(1, 4096));
  command.app->add_option("--repeat", state->options.repeat, "runs; the median counts")->check(CLI::Range(1, 1000));
  command.app->add_option("--max-step-tokens", state->options.max_step_tokens, "rows of a step")->check(CLI::Range(1, 65536));
  const auto common = command.common;
  command.run = [name, state, common] { return Run(name, *state, common->json); };
  return command;
}

}  // namespace

std::vector<Command> AddBenchCommands(CLI::App* root) {
  CLI::App* bench = root->add_subcommand("bench", "measure speed: attention, decode, prefill, serve, policies");
  bench->require_subcommand(1);
  bench->footer("Each has its own help:\n  loupe bench decode --help");
  const std::string model = " --model models/SmolLM2-135M-Instruct.Q4_1.gguf";
  return {AddOne(bench, "attention", "one layer's attention over random pages of --context entries",
                 "loupe bench attention --random-weights llama-3.1-8b --context 8192 --batch 8"),
          AddOne(bench, "decode", "tokens per second while generating, at a depth of --context",
                 "loupe bench decode" + model + " --context 2048 --batch 8"),
          AddOne(bench, "prefill", "tokens per second of a prompt of --context tokens", "loupe bench prefill" + model + " --context 2048"),
          AddOne(bench, "serve", "the whole engine: --batch streams at a time, prompts of --context tokens",
                 "loupe bench serve" + model + " --context 128 --batch 8 --tokens 128"),
          AddOne(bench, "policies", "what KV policies cost in a prompt and in decode steps, in turn in one run",
                 "loupe bench policies" + model + " --context 4096 --kv '{\"policy\":\"full\"}' "
                 "--kv '{\"policy\":\"h2o\",\"budget\":{\"ratio\":0.25}}'")};
}

}  // namespace loupe
