// loupe calibrate spherical: makes a profile for policy spherical from a model, text and items.
#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "engine/calibrate/spherical.h"
#include "engine/load/artifacts.h"
#include "engine/load/profile_file.h"
#include "server/commands/calibrate.h"
#include "server/commands/policies.h"
#include "server/commands/progress.h"
#include "server/logging.h"

namespace loupe {
namespace {

struct State {
  std::string model, out, items, results;
  int limit = 32;
  EngineConfig config;
  SphericalOptions spherical;
};

std::string CommandOf(const State& s) {
  const SphericalOptions& o = s.spherical;
  std::string command = absl::StrCat("loupe calibrate spherical --model ", s.model, " --text ", o.text);
  if (!s.items.empty()) absl::StrAppend(&command, " --items ", s.items, " --limit ", s.limit);
  return absl::StrCat(command, " --prompts ", o.prompts, " --context ", o.context, " --continuation ", o.continuation, " --seed ", o.seed,
                      " --chunk ", o.chunk, " --needle-weight ", o.needle_weight, " --out ", s.out);
}

absl::Status Load(State& s, absl::StatusOr<LoadedModel>* model) {
  if (s.model.empty()) return absl::InvalidArgumentError("calibrate spherical needs --model PATH");
  if (absl::Status status = CheckOut(s.out); !status.ok()) return status;
  SphericalOptions& o = s.spherical;
  if (!s.items.empty()) {
    auto items = ReadItems(s.items, s.limit);
    if (!items.ok()) return items.status();
    o.items = *std::move(items);
  }
  s.config.max_step_tokens = o.max_rows = std::max({o.chunk, o.continuation, 512});
  *model = LoadModel(s.model, s.config);
  if (!model->ok()) return model->status();
  auto hash = HashWeights(s.model);
  if (!hash.ok()) return hash.status();
  o.weights_hash = *hash;
  const auto id = MeasuredModel(s.model, **model, s.config);
  if (id.ok()) o.model_id = *id;
  return id.status();
}

absl::Status Calibrate(State& s, bool json) {
  auto results = ResultFile::Open(s.results);
  if (!results.ok()) return results.status();
  absl::StatusOr<LoadedModel> model;
  if (absl::Status status = Load(s, &model); !status.ok()) return status;
  auto summary = CalibrateSpherical(*model, s.spherical, *results, ProgressOnStderr());
  if (!summary.ok()) return summary.status();
  nlohmann::ordered_json line = {{"out", s.out}, {"weights_hash", s.spherical.weights_hash}, {"seconds", summary->seconds}};
  if (summary->missing_cells > 0) {
    line["out"] = nullptr, line["missing_cells"] = summary->missing_cells;
    const std::string text = absl::StrCat("part ", s.spherical.part, " of ", s.spherical.parts, " is measured; ", summary->missing_cells,
                                          " cells of other parts are not in --results yet: join the parts' files and run it again");
    std::printf("%s\n", json ? line.dump().c_str() : text.c_str());
    return absl::OkStatus();
  }
  nlohmann::ordered_json calibration = {{"command", CommandOf(s)}};
  calibration.update(summary->calibration);
  if (absl::Status status = WriteArtifact(s.out, ProfileToText(summary->profile, calibration)); !status.ok()) return status;
  line.update(calibration);
  if (json) {
    std::printf("%s\n", line.dump().c_str());
  } else {
    std::printf("%s: %d text prompts, %zu items, %.0f s of measurement\n", s.out.c_str(), s.spherical.prompts, s.spherical.items.size(),
                summary->seconds);
  }
  return absl::OkStatus();
}

}  // namespace

Command AddCalibrateSpherical(CLI::App* calibrate) {
  Command command = MakeCommand(
      calibrate, "spherical", "find what each kv head loses at fewer bits or entries: the profile of policy spherical",
      "python3 tests/quality/fetch_texts.py\n"
      "  python3 tests/quality/make_items.py --text build/quality/train --items 32 --out build/quality/train-items.jsonl\n"
      "  loupe calibrate spherical --model models/SmolLM2-135M-Instruct.Q4_1.gguf --text build/quality/train \\\n"
      "    --items build/quality/train-items.jsonl --results build/quality/spherical.jsonl --out profile.json\n"
      "  loupe serve --model models/SmolLM2-135M-Instruct.Q4_1.gguf --strategy profile.json\n"
      "Calibrate on text that you will not evaluate on. Measurements are kept in --results: a second call goes on where the first\n"
      "stopped. On a large machine run several calls with --parts and a --results file each, join the files, and run it once more.");
  auto state = std::make_shared<State>();
  AddModelOptions(command.app, &state->model, &state->config);
  CLI::App* app = command.app;
  SphericalOptions& o = state->spherical;
  app->add_option("--text", o.text, "folder of .txt files")->type_name("DIR")->required();
  app->add_option("--items", state->items, "JSONL file of questions with a hidden fact, as eval items takes them; none: text alone")
      ->type_name("FILE");
  app->add_option("--limit", state->limit, "only the first so many items; 0 takes all")->check(CLI::Range(0, 1 << 20));
  app->add_option("--out", state->out, "the profile's file")->type_name("FILE")->required();
  app->add_option("--results", state->results, "JSONL file of finished measurements")->type_name("FILE");
  app->add_option("--prompts", o.prompts, "pieces of text")->check(CLI::Range(1, 4096));
  app->add_option("--context", o.context, "tokens of each before lists are changed")->check(CLI::Range(256, 1 << 20));
  app->add_option("--continuation", o.continuation, "predictions compared after each")->check(CLI::Range(1, 4096));
  app->add_option("--seed", o.seed, "which pieces are taken");
  app->add_option("--chunk", o.chunk, "prompt rows of a step")->check(CLI::Range(1, 65536));
  app->add_option("--needle-weight", o.needle_weight, "of items beside text in what a list costs")
      ->check(CLI::Range(0.0, 1e3) & IsANumber());
  app->add_option("--parts", o.parts, "calls that share the prompts")->check(CLI::Range(1, 4096));
  app->add_option("--part", o.part, "which of them this one is, from 0")->check(CLI::Range(0, 4095));
  const auto common = command.common;
  command.run = [state, common] {
    InitLogging("warning");
    const absl::Status status = Calibrate(*state, common->json);
    return status.ok() ? kExitOk : Fail(status);
  };
  return command;
}

}  // namespace loupe
