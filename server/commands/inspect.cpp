// loupe inspect: what a model file contains, and whether this build can serve it.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/load/artifacts.h"
#include "engine/load/inspect.h"
#include "engine/load/profile_file.h"
#include "engine/load/read_text.h"
#include "engine/load/strategy_file.h"
#include "kvcache/policies/spherical_plan.h"
#include "nlohmann/json.hpp"
#include "server/commands/command.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

// What the file does not say is left out.
Json ToJson(const ModelSummary& m) {
  Json out = {{"kind", m.kind}, {"format", m.format}};
  const auto text = [&](const char* key, const std::string& value) {
    if (!value.empty()) out[key] = value;
  };
  const auto number = [&](const char* key, int64_t value) {
    if (value > 0) out[key] = value;
  };
  text("architecture", m.architecture);
  text("name", m.name);
  number("parameters", m.parameters);
  number("layers", m.layers);
  number("heads", m.heads);
  number("kv_heads", m.kv_heads);
  number("head_dim", m.head_dim);
  number("width", m.width);
  number("feed_forward", m.feed_forward);
  number("vocab", m.vocab);
  number("context", m.context);
  if (m.vocab > 0) out["tied_embeddings"] = m.tied_embeddings;
  text("tokenizer", m.tokenizer);
  out["chat_template"] = m.chat_template;
  for (const auto& [name, type] : m.tensor_types) out["tensor_types"][name] = {{"count", type.count}, {"bytes", type.bytes}};
  out["file_bytes"] = m.file_bytes;
  number("kv_bytes_per_token", m.kv_bytes_per_token);
  for (const auto& [name, bytes] : m.kv_bytes_per_token_by_format) out["kv_bytes_per_token_by_format"][name] = bytes;
  out["supported"] = m.supported;
  out["reason"] = m.reason;
  return out;
}

// "layers 30, width 576": the numbers that are known, or nothing.
std::string Known(const std::vector<std::pair<const char*, int64_t>>& numbers) {
  std::string line;
  for (const auto& [name, value] : numbers) {
    if (value > 0) absl::StrAppend(&line, line.empty() ? "" : ", ", value, " ", name);
  }
  return line;
}

void PrintRow(const char* name, const std::string& value) {
  if (!value.empty()) std::printf("  %-14s %s\n", name, value.c_str());
}

void PrintText(const ModelSummary& m) {
  std::printf("%s (%s, %s)\n", m.name.empty() ? "unnamed model" : m.name.c_str(),
              m.architecture.empty() ? "unknown architecture" : m.architecture.c_str(), m.format.c_str());
  PrintRow("file", FormatSize(m.file_bytes));
  if (m.parameters > 0) PrintRow("parameters", absl::StrFormat("%.1f M", static_cast<double>(m.parameters) / 1e6));
  for (const auto& [name, type] : m.tensor_types) {
    PrintRow("tensors", absl::StrFormat("%d of %s, %s", type.count, name, FormatSize(type.bytes)));
  }
  PrintRow("shape", Known({{"layers", m.layers}, {"wide", m.width}, {"wide inside", m.feed_forward}}));
  PrintRow("attention", Known({{"query heads", m.heads}, {"key/value heads", m.kv_heads}, {"dimensions each", m.head_dim}}));
  PrintRow("context", Known({{"tokens", m.context}}));
  PrintRow("tokenizer", m.tokenizer);
  PrintRow("vocabulary", Known({{"tokens", m.vocab}}));
  PrintRow("chat template", m.chat_template ? "yes" : "no");
  if (m.kv_bytes_per_token > 0) {
    PrintRow("KV cache", absl::StrCat(FormatSize(m.kv_bytes_per_token), " a token",
                                      m.context > 0 ? ", " + FormatSize(m.kv_bytes_per_token * m.context) + " for a full context" : ""));
  }
  PrintRow("supported", absl::StrCat(m.supported ? "yes" : "no", m.reason.empty() ? "" : ": ", m.reason));
}

template <class Artifact>
Json WhoseArtifact(const char* kind, const Artifact& artifact) {
  return {{"kind", kind},
          {"name", artifact.name},
          {"fingerprint", artifact.fingerprint},
          {"model", artifact.model},
          {"weights_hash", artifact.weights_hash},
          {"layers", artifact.num_layers},
          {"kv_heads", artifact.num_kv_heads},
          {"head_dim", artifact.head_dim}};
}

// A strategy: for which model, which patterns, and how uneven its budgets are.
Json ToJson(const Strategy& strategy) {
  Json out = WhoseArtifact(kStrategyKind, strategy);
  out["budgets"] = Json::array();
  for (const StrategyBudget& budget : strategy.budgets) {
    const auto [least, most] = std::minmax_element(budget.prefill.entries.begin(), budget.prefill.entries.end());
    Json lists = Json::object();
    for (const int pattern : budget.prefill.patterns) {
      Json& count = lists[strategy.patterns[static_cast<size_t>(pattern)].policy];
      count = count.is_null() ? 1 : count.get<int>() + 1;
    }
    out["budgets"].push_back({{"mean", budget.mean}, {"least", *least}, {"most", *most}, {"lists", lists}});
  }
  return out;
}

// A profile: for which model, and how much of what lists lose the most sensitive ones do.
Json ToJson(const SphericalProfile& profile) {
  Json out = WhoseArtifact(kProfileKind, profile);
  std::vector<double> losses;
  for (const ListCosts& costs : profile.lists) losses.push_back(CostOfBits(costs, 2, 2));
  std::sort(losses.rbegin(), losses.rend());
  const auto sum = [&](size_t count) { return std::accumulate(losses.begin(), losses.begin() + static_cast<std::ptrdiff_t>(count), 0.0); };
  const double all = sum(losses.size());
  out["lists"] = profile.lists.size();
  out["nats_at_2_bits"] = all;
  if (all > 0) out["share_of_the_ten_most_sensitive"] = sum(std::min<size_t>(10, losses.size())) / all;
  return out;
}

absl::Status InspectArtifact(const std::string& path, bool json) {
  const auto text = ReadText("artifact", path);
  if (!text.ok()) return text.status();
  const std::string name = std::filesystem::path(path).stem().string();
  absl::StatusOr<Json> out;
  const auto show = [&](const auto& artifact) { out = artifact.ok() ? absl::StatusOr<Json>(ToJson(*artifact)) : artifact.status(); };
  KindOfArtifact(*text) == kProfileKind ? show(ParseProfile(*text, name)) : show(ParseStrategy(*text, name));
  if (!out.ok()) return absl::InvalidArgumentError(absl::StrCat("artifact ", path, ": ", std::string(out.status().message())));
  (*out)["calibration"] = Json::parse(*text)["calibration"];
  (*out)["supported"] = true;
  std::printf("%s\n", out->dump(json ? -1 : 2, ' ', false, Json::error_handler_t::replace).c_str());
  return absl::OkStatus();
}

}  // namespace

Command AddInspectCommand(CLI::App* root) {
  Command command = MakeCommand(root, "inspect", "say what a model or an artifact contains and whether it is supported",
                                "loupe inspect models/SmolLM2-135M-Instruct.Q4_1.gguf");
  auto path = std::make_shared<std::string>();
  command.app->add_option("file", *path, "GGUF file of a model, or .json file of an artifact")->required();
  const auto common = command.common;
  command.run = [path, common] {
    if (path->ends_with(".json")) {
      const absl::Status status = InspectArtifact(*path, common->json);
      return status.ok() ? kExitOk : Fail(status);
    }
    const auto summary = InspectModel(*path);
    if (!summary.ok()) return Fail(summary.status());
    if (common->json) {
      std::printf("%s\n", ToJson(*summary).dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    } else {
      PrintText(*summary);
    }
    return kExitOk;
  };
  return command;
}

}  // namespace loupe
