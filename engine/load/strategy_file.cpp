#include "engine/load/strategy_file.h"

#include "absl/strings/str_cat.h"
#include "engine/load/json_fields.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

absl::Status ReadPattern(const Json& json, const std::string& path, StrategyPattern* out) {
  JsonFields fields(json, path);
  fields.Text("policy", &out->policy);
  if (!fields.status().ok() || !json.contains("params")) return fields.status();
  const Json& params = json["params"];
  if (!params.is_object()) fields.Fail("params", "must be an object");
  for (auto it = params.begin(); fields.status().ok() && it != params.end(); ++it) {
    if (it->is_number())
      out->params[it.key()] = it->get<double>();
    else if (it->is_string())
      out->params[it.key()] = it->get<std::string>();
    else
      fields.Fail("params." + it.key(), "must be a number or a word");
  }
  return fields.status();
}

absl::Status ReadPhase(const Json& json, const std::string& path, const Strategy& strategy, StrategyPhase* out) {
  JsonFields fields(json, path);
  fields.Lists("patterns", strategy.num_layers, strategy.num_kv_heads, &out->patterns);
  fields.Lists("entries", strategy.num_layers, strategy.num_kv_heads, &out->entries);
  return fields.status();
}

absl::Status ReadBudgets(const Json& json, Strategy* out) {
  if (!json.is_array()) return absl::InvalidArgumentError("budgets: must be an array");
  for (size_t i = 0; i < json.size(); ++i) {
    const std::string path = absl::StrCat("budgets[", i, "]");
    StrategyBudget& budget = out->budgets.emplace_back();
    JsonFields fields(json[i], path);
    fields.Whole("mean", &budget.mean);
    const Json& prefill = fields.Get("prefill");
    const Json& decode = fields.Get("decode");
    if (!fields.status().ok()) return fields.status();
    if (absl::Status s = ReadPhase(prefill, path + ".prefill", *out, &budget.prefill); !s.ok()) return s;
    if (absl::Status s = ReadPhase(decode, path + ".decode", *out, &budget.decode); !s.ok()) return s;
  }
  return absl::OkStatus();
}

Json PhaseToJson(const StrategyPhase& phase, int groups) {
  const auto nested = [&](const std::vector<int>& flat) {
    Json layers = Json::array();
    for (size_t i = 0; i < flat.size(); i += static_cast<size_t>(groups)) {
      layers.push_back(std::vector<int>(flat.begin() + static_cast<std::ptrdiff_t>(i),
                                        flat.begin() + static_cast<std::ptrdiff_t>(i) + groups));
    }
    return layers;
  };
  return {{"patterns", nested(phase.patterns)}, {"entries", nested(phase.entries)}};
}

}  // namespace

absl::StatusOr<Strategy> ParseStrategy(const std::string& text, const std::string& name) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) return absl::InvalidArgumentError("is not JSON");
  Strategy strategy;
  strategy.name = name;
  strategy.fingerprint = FingerprintOfText(text);
  JsonFields fields(json, "");
  fields.Kind(kStrategyKind, kStrategyVersion);
  const Json& model = fields.Get("model");
  const Json& patterns = fields.Get("patterns");
  const Json& budgets = fields.Get("budgets");
  if (!fields.status().ok()) return fields.status();
  if (absl::Status s = ReadModelOf(model, &strategy); !s.ok()) return s;
  if (!patterns.is_array()) return absl::InvalidArgumentError("patterns: must be an array");
  for (size_t i = 0; i < patterns.size(); ++i) {
    const absl::Status s =
        ReadPattern(patterns[i], absl::StrCat("patterns[", i, "]"), &strategy.patterns.emplace_back());
    if (!s.ok()) return s;
  }
  if (absl::Status s = ReadBudgets(budgets, &strategy); !s.ok()) return s;
  if (absl::Status s = CheckStrategy(strategy); !s.ok()) return s;
  return strategy;
}

std::string StrategyToText(const Strategy& s, const Json& calibration) {
  Json json = {{"kind", kStrategyKind},
               {"version", kStrategyVersion},
               {"model", ModelOf(s)},
               {"calibration", calibration},
               {"patterns", Json::array()},
               {"budgets", Json::array()}};
  for (const StrategyPattern& pattern : s.patterns) {
    Json one = {{"policy", pattern.policy}};
    for (const auto& [name, value] : pattern.params) {
      if (const auto* number = std::get_if<double>(&value))
        one["params"][name] = *number;
      else
        one["params"][name] = std::get<std::string>(value);
    }
    json["patterns"].push_back(one);
  }
  for (const StrategyBudget& budget : s.budgets) {
    json["budgets"].push_back({{"mean", budget.mean},
                               {"prefill", PhaseToJson(budget.prefill, s.num_kv_heads)},
                               {"decode", PhaseToJson(budget.decode, s.num_kv_heads)}});
  }
  // A line a phase keeps the file readable and its changes small.
  std::string text = json.dump();
  static constexpr const char* kKeys[] = {"\"version\"", "\"model\"",   "\"calibration\"", "\"patterns\":[{",
                                          "\"budgets\"", "{\"mean\"", "\"prefill\"",     "\"decode\""};
  BreakLines(kKeys, &text);
  return text + "\n";
}

}  // namespace loupe
