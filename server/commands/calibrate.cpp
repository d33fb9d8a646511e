// loupe calibrate polykv: makes a strategy from a model and text. calibrate_spherical.cpp: the other calibration.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/calibrate/polykv.h"
#include "engine/load/artifacts.h"
#include "engine/load/strategy_file.h"
#include "server/commands/calibrate.h"
#include "server/commands/policies.h"
#include "server/commands/progress.h"
#include "server/logging.h"

namespace loupe {
namespace {

struct State {
  std::string model, out, items, results;
  std::string mode = "joint", unit = "head", vary = "both", preference = "cosine", sensitivity = "entropy";
  int limit = 8;
  EngineConfig config;
  PolyKvOptions polykv;
};

std::string CommandOf(const State& s) {
  const PolyKvOptions& o = s.polykv;
  std::string command = absl::StrCat("loupe calibrate polykv --model ", s.model, " --text ", o.text);
  if (!s.items.empty()) absl::StrAppend(&command, " --items ", s.items, " --limit ", s.limit);
  absl::StrAppend(&command, " --prompts ", o.prompts, " --context ", o.context, " --continuation ", o.continuation,
                  " --seed ", o.seed, " --chunk ", o.chunk, " --mode ", s.mode, " --per ", s.unit, " --vary ", s.vary,
                  " --needle-weight ", o.fit.needle_weight, " --pin-share ", o.fit.pin_share, " --budget ",
                  absl::StrJoin(o.means, " "));
  if (s.mode == "paper") absl::StrAppend(&command, " --preference ", s.preference, " --sensitivity ", s.sensitivity);
  return absl::StrCat(command, " --out ", s.out);
}

absl::Status Calibrate(State& s, bool json) {
  if (s.model.empty()) return absl::InvalidArgumentError("calibrate polykv needs --model PATH");
  if (absl::Status status = CheckOut(s.out); !status.ok()) return status;
  if (!s.items.empty()) {
    auto items = ReadItems(s.items, s.limit);
    if (!items.ok()) return items.status();
    s.polykv.items = *std::move(items);
  }
  auto results = ResultFile::Open(s.results);
  if (!results.ok()) return results.status();
  s.config.max_step_tokens = s.polykv.max_rows = std::max({s.polykv.chunk, s.polykv.continuation, 512});
  auto model = LoadModel(s.model, s.config);
  if (!model.ok()) return model.status();
  auto hash = HashWeights(s.model);
  if (!hash.ok()) return hash.status();
  s.polykv.weights_hash = *hash;
  const auto id = MeasuredModel(s.model, *model, s.config);
  if (!id.ok()) return id.status();
  s.polykv.model_id = *id;
  std::sort(s.polykv.means.begin(), s.polykv.means.end());
  s.polykv.means.erase(std::unique(s.polykv.means.begin(), s.polykv.means.end()), s.polykv.means.end());
  FitOptions& fit = s.polykv.fit;
  fit.mode = s.mode == "paper" ? FitMode::kPaper : FitMode::kJoint;
  fit.per_head = s.unit == "head";
  fit.vary = s.vary == "pattern" ? FitVary::kPattern : s.vary == "budget" ? FitVary::kBudget : FitVary::kBoth;
  fit.prefer_by_nll = s.preference == "nll";
  fit.sensitivity_by_nll = s.sensitivity == "nll";

  auto summary = CalibratePolyKv(*model, s.polykv, *results, ProgressOnStderr());
  if (!summary.ok()) return summary.status();
  nlohmann::ordered_json calibration = {{"command", CommandOf(s)}};
  calibration.update(summary->calibration);
  if (absl::Status status = WriteArtifact(s.out, StrategyToText(summary->strategy, calibration)); !status.ok()) return status;
  if (json) {
    nlohmann::ordered_json line = {{"out", s.out}, {"weights_hash", *hash}, {"seconds", summary->seconds}};
    line.update(calibration);
    std::printf("%s\n", line.dump().c_str());
    return absl::OkStatus();
  }
  std::printf("%s: %zu text prompts, %d items, %.0f s of measurement\n%8s %14s %14s  %s\n", s.out.c_str(),
              static_cast<size_t>(s.polykv.prompts), static_cast<int>(s.polykv.items.size()), summary->seconds,
              "entries", "expected KL", "uniform KL", "uniform policy");
  for (const auto& [mean, e] : summary->calibration["expected"].items()) {
    std::printf("%8s %14.5f %14.5f  %s\n", mean.c_str(), e["kl"].get<double>(), e["uniform_kl"].get<double>(),
                e["uniform"].get<std::string>().c_str());
  }
  return absl::OkStatus();
}

void AddFit(CLI::App* app, State* s) {
  app->add_option("--mode", s->mode, "joint: one price over patterns and budgets; paper: PolyKV's own rule")
      ->check(CLI::IsMember({"joint", "paper"}));
  app->add_option("--per", s->unit, "what has a pattern and a budget of its own: each kv head, or each layer")
      ->check(CLI::IsMember({"head", "layer"}));
  app->add_option("--vary", s->vary,
                  "both, or only the pattern (equal budgets), or only the budget (best uniform pattern)")
      ->check(CLI::IsMember({"both", "pattern", "budget"}));
  app->add_option("--preference", s->preference, "paper: the pattern of best cosine, or of least change of NLL")
      ->check(CLI::IsMember({"cosine", "nll"}));
  app->add_option("--sensitivity", s->sensitivity, "paper: budgets by attention entropy, or by the worst change of NLL")
      ->check(CLI::IsMember({"entropy", "nll"}));
  app->add_option("--needle-weight", s->polykv.fit.needle_weight, "of items beside text, in the joint cost")
      ->check(CLI::Range(0.0, 1e3) & IsANumber());
  app->add_option("--pin-share", s->polykv.fit.pin_share,
                  "of what items lose: the lists that carry it keep the mean budget at least")
      ->check(CLI::Range(0.0, 1.0) & IsANumber());
  app->add_option("--budget", s->polykv.means,
                  "mean entries a list; a request's budget lies between two of them (several)")
      ->check(CLI::Range(16, 1 << 20));
}

}  // namespace

absl::Status CheckOut(const std::string& path) {
  std::error_code ignored;
  const bool there = std::filesystem::exists(path, ignored);
  if (std::ofstream probe(path, std::ios::app); !probe) {
    return absl::InvalidArgumentError(absl::StrCat("--out ", path, " cannot be written; give a file in a folder that exists"));
  }
  if (!there) std::filesystem::remove(path, ignored);
  return absl::OkStatus();
}

absl::Status WriteArtifact(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::trunc | std::ios::binary);
  out << text;
  return out.flush() ? absl::OkStatus() : absl::InternalError(absl::StrCat("--out ", path, " cannot be written"));
}

std::vector<Command> AddCalibrateCommands(CLI::App* root) {
  CLI::App* calibrate = root->add_subcommand("calibrate", "make an artifact from a model and text: polykv, spherical");
  calibrate->require_subcommand(1);
  Command command = MakeCommand(
      calibrate, "polykv", "find each kv head's eviction pattern and budget: the strategy of policy polykv",
      "python3 tests/quality/fetch_texts.py\n"
      "  python3 tests/quality/make_items.py --text build/quality/train --items 16 --out "
      "build/quality/train-items.jsonl\n"
      "  loupe calibrate polykv --model models/SmolLM2-135M-Instruct.Q4_1.gguf --text build/quality/train \\\n"
      "    --items build/quality/train-items.jsonl --results build/quality/polykv.jsonl --out strategy.json\n"
      "  loupe serve --model models/SmolLM2-135M-Instruct.Q4_1.gguf --strategy strategy.json\n"
      "Calibrate on text that you will not evaluate on. Measurements are kept in --results: a second call goes on "
      "where the\n"
      "first stopped, and another --mode, --per or --budget over the same measurements takes seconds.");
  auto state = std::make_shared<State>();
  AddModelOptions(command.app, &state->model, &state->config);
  CLI::App* app = command.app;
  PolyKvOptions& o = state->polykv;
  app->add_option("--text", o.text, "folder of .txt files")->type_name("DIR")->required();
  app->add_option("--items", state->items,
                  "JSONL file of questions with a hidden fact, as eval items takes them; none: text alone")
      ->type_name("FILE");
  app->add_option("--limit", state->limit, "only the first so many items; 0 takes all")->check(CLI::Range(0, 1 << 20));
  app->add_option("--out", state->out, "the strategy's file")->type_name("FILE")->required();
  app->add_option("--results", state->results, "JSONL file of finished measurements")->type_name("FILE");
  app->add_option("--prompts", o.prompts, "pieces of text")->check(CLI::Range(2, 4096));
  app->add_option("--context", o.context, "tokens of each before the policies act")->check(CLI::Range(256, 1 << 20));
  app->add_option("--continuation", o.continuation, "rows compared after each")->check(CLI::Range(1, 4096));
  app->add_option("--seed", o.seed, "which pieces are taken");
  app->add_option("--chunk", o.chunk, "prompt rows of a step")->check(CLI::Range(1, 65536));
  AddFit(app, state.get());
  const auto common = command.common;
  command.run = [state, common] {
    InitLogging("warning");
    const absl::Status status = Calibrate(*state, common->json);
    return status.ok() ? kExitOk : Fail(status);
  };
  return {command, AddCalibrateSpherical(calibrate)};
}

}  // namespace loupe
