// loupe eval kl | items: what a KV policy costs in quality, measured beside the full cache of the same model.
#include <cstdio>
#include <map>

#include "engine/eval/items.h"
#include "engine/eval/kl.h"
#include "engine/eval/plot.h"
#include "nlohmann/json.hpp"
#include "server/commands/command.h"
#include "server/commands/policies.h"
#include "server/commands/progress.h"
#include "server/logging.h"

namespace loupe {
namespace {

struct State {
  std::string model, results, plot, items, question = "outside";
  std::vector<std::string> kv;
  EngineConfig config;
  KlOptions kl;
  int limit = 0;
};

// Results depend on the artifact: its name and fingerprint become part of the label.
template <class All>
void NameOne(const All& artifacts, EvalPolicy* policy) {
  for (const auto& artifact : artifacts) {
    if (!policy->options.strategy.empty() && policy->options.strategy != artifact->name) continue;
    auto json = nlohmann::ordered_json::parse(policy->label);
    json["strategy"] = absl::StrCat(artifact->name, "@", artifact->fingerprint);
    policy->label = json.dump();
    return;
  }
}

void NameArtifacts(const LoadedModel& model, std::vector<EvalPolicy>* policies) {
  for (EvalPolicy& policy : *policies) {
    if (policy.options.policy == "polykv") {
      NameOne(model.artifacts.strategies, &policy);
    } else if (policy.options.policy == "spherical" || policy.options.bits.key + policy.options.bits.value > 0) {
      NameOne(model.artifacts.profiles, &policy);  // whose mean keys all codes subtract
    }
  }
}

void AddSeries(const std::string& label, double bytes, double value, Interval range, Plot* plot) {
  const std::string name = nlohmann::json::parse(label).value("policy", "");
  auto it = std::find_if(plot->series.begin(), plot->series.end(), [&](const PlotSeries& s) { return s.name == name; });
  if (it == plot->series.end()) it = plot->series.insert(plot->series.end(), PlotSeries{name, {}});
  it->points.push_back({bytes, value, range.low, range.high});
}

// What tells a row of a table apart: policy, budget and what was given beside them.
std::string ShortName(const std::string& label) {
  const auto json = nlohmann::ordered_json::parse(label);
  std::string name = json.value("policy", "");
  if (json.contains("budget"))
    absl::StrAppend(&name, " ", json["budget"].begin().key(), " ", json["budget"].begin().value().dump());
  if (json.contains("strategy")) absl::StrAppend(&name, " ", json.value("strategy", ""));
  if (json.contains("params")) absl::StrAppend(&name, " ", json["params"].dump());
  return name;
}

void PrintKl(const std::vector<KlResult>& results, const KlOptions& o, bool json) {
  if (!json) {
    std::printf("%-44s %7s %7s %9s %9s  %-21s %6s %8s\n", "policy", "bytes", "peak", "KL mean", "KL p95",
                "95 % interval", "top-1", "NLL gap");
  }
  for (const KlResult& r : results) {
    if (json) {
      const nlohmann::ordered_json out = {
          {"suite", "kl"},
          {"kv", nlohmann::ordered_json::parse(r.label)},
          {"context", o.context},
          {"windows", o.windows},
          {"continuation", o.continuation},
          {"bytes_ratio", r.bytes_ratio},
          {"peak_bytes_ratio", r.peak_bytes_ratio},
          {"kl_mean", r.kl_mean},
          {"kl_p95", r.kl_p95},
          {"kl_ci95", {r.kl_ci95.low, r.kl_ci95.high}},
          {"top1", r.top1},
          {"nll_gap", r.nll_gap},
          {"kl_minus_first", r.kl_minus_first},
          {"kl_minus_first_ci95", {r.kl_minus_first_ci95.low, r.kl_minus_first_ci95.high}},
          {"seconds", r.seconds}};
      std::printf("%s\n", out.dump().c_str());
    } else {
      std::printf("%-44.44s %6.1f%% %6.1f%% %9.5f %9.5f  [%.5f, %.5f] %5.1f%% %8.4f\n", ShortName(r.label).c_str(),
                  100 * r.bytes_ratio, 100 * r.peak_bytes_ratio, r.kl_mean, r.kl_p95, r.kl_ci95.low, r.kl_ci95.high,
                  100 * r.top1, r.nll_gap);
    }
  }
}

nlohmann::ordered_json TasksToJson(const std::map<std::string, TaskScore>& tasks) {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  for (const auto& [name, t] : tasks) {
    out[name] = {{"items", t.items},
                 {"recall", t.recall},
                 {"recall_full", t.recall_full},
                 {"gold_nll", t.gold_nll},
                 {"gold_nll_full", t.gold_nll_full},
                 {"answered_full", t.full},
                 {"answered", t.kept}};
  }
  return out;
}

void PrintItems(const std::vector<ItemsResult>& results, const State& state, bool json) {
  if (!json)
    std::printf("%-44s %7s %9s %9s %7s %7s %9s  %s\n", "policy", "bytes", "gold NLL", "full", "recall", "full",
                "relative", "95 % interval");
  for (const ItemsResult& r : results) {
    if (json) {
      const nlohmann::ordered_json out = {{"suite", "items"},
                                          {"kv", nlohmann::ordered_json::parse(r.label)},
                                          {"question", state.question},
                                          {"items", r.items},
                                          {"bytes_ratio", r.bytes_ratio},
                                          {"gold_nll", r.gold_nll},
                                          {"gold_nll_full", r.gold_nll_full},
                                          {"recall", r.recall},
                                          {"recall_full", r.recall_full},
                                          {"recall_relative", r.recall_relative},
                                          {"recall_ci95", {r.recall_ci95.low, r.recall_ci95.high}},
                                          {"answered_full", r.full},
                                          {"answered", r.kept},
                                          {"by_task", TasksToJson(r.by_task)},
                                          {"seconds", r.seconds}};
      std::printf("%s\n", out.dump().c_str());
    } else {
      std::printf("%-44.44s %6.1f%% %9.4f %9.4f %7.3f %7.3f %4d/%-4d  [%.2f, %.2f]\n", ShortName(r.label).c_str(),
                  100 * r.bytes_ratio, r.gold_nll, r.gold_nll_full, r.recall, r.recall_full, r.kept, r.full,
                  r.recall_ci95.low, r.recall_ci95.high);
    }
  }
}

absl::Status RunSuite(const std::string& name, State& state, bool json) {
  if (state.model.empty()) return absl::InvalidArgumentError("eval needs --model PATH");
  auto policies = ParsePolicies(state.kv);
  if (!policies.ok()) return policies.status();
  ItemsOptions items;
  if (name == "items") {
    auto read = ReadItems(state.items, state.limit);
    if (!read.ok()) return read.status();
    items.items = *std::move(read);
  }
  if (absl::Status s = state.plot.empty() ? absl::OkStatus() : CheckPlotPath(state.plot); !s.ok()) return s;
  auto results = ResultFile::Open(state.results);
  if (!results.ok()) return results.status();
  state.config.max_step_tokens = std::max(state.kl.chunk, 3 * static_cast<int>(policies->size()) + 4);
  auto model = LoadModel(state.model, state.config);
  if (!model.ok()) return model.status();
  NameArtifacts(*model, &*policies);
  const auto id = MeasuredModel(state.model, *model, state.config);
  if (!id.ok()) return id.status();
  Plot plot;
  plot.x_label = "bytes on the device at the end of the prompt, of the full cache";
  if (name == "kl") {
    state.kl.model_id = *id;
    auto result = EvalKl(*model, *policies, state.kl, *results, ProgressOnStderr());
    if (!result.ok()) return result.status();
    PrintKl(*result, state.kl, json);
    plot.title = absl::StrCat("KL to the full cache, context ", state.kl.context), plot.y_label = "KL in nats",
    plot.log_y = true;
    for (const KlResult& r : *result) AddSeries(r.label, r.bytes_ratio, r.kl_mean, r.kl_ci95, &plot);
  } else {
    items.question_inside = state.question == "inside", items.chunk = state.kl.chunk, items.model_id = *id;
    auto result = EvalItems(*model, *policies, items, *results, ProgressOnStderr());
    if (!result.ok()) return result.status();
    PrintItems(*result, state, json);
    plot.title = absl::StrCat("Answers kept, question ", state.question, " the compressed span"),
    plot.y_label = "of those of the full cache";
    for (const ItemsResult& r : *result) AddSeries(r.label, r.bytes_ratio, r.recall_relative, r.recall_ci95, &plot);
  }
  return state.plot.empty() ? absl::OkStatus() : WriteSvg(plot, state.plot);
}

Command AddOne(CLI::App* eval, const std::string& name, const std::string& summary, const std::string& example) {
  Command command = MakeCommand(eval, name, summary, example);
  auto state = std::make_shared<State>();
  AddModelOptions(command.app, &state->model, &state->config);
  AddStrategyOptions(command.app, &state->config);
  CLI::App* app = command.app;
  app->add_option("--kv", state->kv, "KV policy object; once for each policy to compare")
      ->type_name("JSON")
      ->allow_extra_args(false);
  app->add_option("--results", state->results,
                  "JSONL file of finished cells: a second call goes on where the first stopped")
      ->type_name("FILE");
  app->add_option("--plot", state->plot, "writes quality over bytes as an .svg picture")->type_name("FILE");
  app->add_option("--chunk", state->kl.chunk, "prompt rows of a step")->check(CLI::Range(1, 65536));
  if (name == "kl") {
    app->add_option("--text", state->kl.text, "folder of .txt files")->type_name("DIR")->required();
    app->add_option("--context", state->kl.context, "tokens before the policy acts")->check(CLI::Range(1, 1 << 20));
    app->add_option("--windows", state->kl.windows, "pieces of text, which do not overlap")
        ->check(CLI::Range(1, 100000));
    app->add_option("--continuation", state->kl.continuation, "predictions compared in a window")
        ->check(CLI::Range(1, 1 << 20));
    app->add_option("--seed", state->kl.seed, "which windows are taken");
  } else {
    app->add_option("--items", state->items, "JSONL file: id, task, context, question, answer_prefix, answers, scoring")
        ->type_name("FILE")
        ->required();
    app->add_option("--limit", state->limit, "only the first so many items; 0 takes all")
        ->check(CLI::Range(0, 1 << 30));
    app->add_option("--question", state->question, "whether the policy has seen the question when it acts")
        ->check(CLI::IsMember({"outside", "inside"}));
  }
  const auto common = command.common;
  command.run = [name, state, common] {
    InitLogging("warning");
    const absl::Status status = RunSuite(name, *state, common->json);
    return status.ok() ? kExitOk : Fail(status);
  };
  return command;
}

}  // namespace

std::vector<Command> AddEvalCommands(CLI::App* root) {
  CLI::App* eval = root->add_subcommand("eval", "measure what a KV policy costs in quality: kl, items");
  eval->require_subcommand(1);
  eval->footer("Each has its own help:\n  loupe eval kl --help");
  const std::string start =
      " --model models/SmolLM2-135M-Instruct.Q4_1.gguf --kv '{\"policy\":\"snapkv\",\"budget\":{\"ratio\":0.25}}'";
  return {AddOne(eval, "kl", "divergence from the full cache on running text",
                 "loupe eval kl" + start + " --text FOLDER --context 2048"),
          AddOne(eval, "items", "questions about a context: answers kept, likelihood of the right answer",
                 "loupe eval items" + start + " --items items.jsonl")};
}

}  // namespace loupe
