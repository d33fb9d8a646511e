#include "engine/load/strategy_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/load/model_path.h"
#include "engine/load/read_text.h"

namespace loupe {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr uint64_t kFnvStart = 14695981039346656037u, kFnvPrime = 1099511628211u;

uint64_t Hash(std::string_view bytes, uint64_t hash) {
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), 8);
    hash = (hash ^ word) * kFnvPrime;
  }
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * kFnvPrime;
  return hash;
}

// Reads fields of an object; the first that is missing or of another type is the status.
class Fields {
 public:
  Fields(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
    if (!json.is_object()) Fail("", "must be an object");
  }
  const absl::Status& status() const { return status_; }

  const Json& Get(const char* key) {
    static const Json nothing;
    if (!status_.ok()) return nothing;
    const auto it = json_.find(key);
    if (it != json_.end()) return *it;
    Fail(key, "is missing");
    return nothing;
  }
  void Text(const char* key, std::string* out) {
    const Json& value = Get(key);
    if (!status_.ok()) return;
    if (value.is_string())
      *out = value.get<std::string>();
    else
      Fail(key, absl::StrCat("is ", Shown(value), ", must be a string"));
  }
  void Whole(const char* key, int* out) {
    const Json& value = Get(key);
    if (status_.ok()) ReadWhole(key, value, out);
  }
  // [layers][kv heads] numbers.
  void Lists(const char* key, int layers, int groups, std::vector<int>* out) {
    const Json& value = Get(key);
    if (!status_.ok()) return;
    if (!value.is_array() || value.size() != static_cast<size_t>(layers)) {
      Fail(key, absl::StrCat("must be an array of ", layers, " layers",
                             value.is_array() ? absl::StrCat(", has ", value.size()) : ""));
      return;
    }
    for (const Json& layer : value) {
      if (!layer.is_array() || layer.size() != static_cast<size_t>(groups)) {
        Fail(key, absl::StrCat("has ", Shown(layer), ", must have arrays of ", groups, " kv heads"));
        return;
      }
      for (const Json& head : layer) {
        if (!status_.ok()) return;
        ReadWhole(key, head, &out->emplace_back());
      }
    }
  }
  void Fail(const std::string& key, const std::string& why) {
    if (status_.ok())
      status_ =
          absl::InvalidArgumentError(absl::StrCat(path_, path_.empty() || key.empty() ? "" : ".", key, ": ", why));
  }

 private:
  static std::string Shown(const Json& value) {
    const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() > 60 ? text.substr(0, 57) + "..." : text;
  }
  void ReadWhole(const char* key, const Json& value, int* out) {
    if (value.is_number_integer() && value.get<double>() >= 0 && value.get<double>() <= (1 << 30))
      *out = value.get<int>();
    else
      Fail(key, absl::StrCat("is ", Shown(value), ", must be a whole number from 0 to ", 1 << 30));
  }

  const Json& json_;
  const std::string path_;
  absl::Status status_;
};

absl::Status ReadPattern(const Json& json, const std::string& path, StrategyPattern* out) {
  Fields fields(json, path);
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
  Fields fields(json, path);
  fields.Lists("patterns", strategy.num_layers, strategy.num_kv_heads, &out->patterns);
  fields.Lists("entries", strategy.num_layers, strategy.num_kv_heads, &out->entries);
  return fields.status();
}

absl::Status ReadModel(const Json& json, Strategy* out) {
  Fields fields(json, "model");
  fields.Text("name", &out->model);
  fields.Text("weights_hash", &out->weights_hash);
  fields.Whole("layers", &out->num_layers);
  fields.Whole("kv_heads", &out->num_kv_heads);
  fields.Whole("head_dim", &out->head_dim);
  return fields.status();
}

absl::Status ReadBudgets(const Json& json, Strategy* out) {
  if (!json.is_array()) return absl::InvalidArgumentError("budgets: must be an array");
  for (size_t i = 0; i < json.size(); ++i) {
    const std::string path = absl::StrCat("budgets[", i, "]");
    StrategyBudget& budget = out->budgets.emplace_back();
    Fields fields(json[i], path);
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

absl::Status Mismatch(const std::string& field, const std::string& in_file, const std::string& in_model) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": is ", in_file, ", the model's is ", in_model,
                                                 "; a strategy fits only the weights that it was calibrated on"));
}

absl::Status CheckDimensions(const Strategy& s, const ModelConfig& c) {
  if (s.num_layers != c.num_layers)
    return Mismatch("model.layers", absl::StrCat(s.num_layers), absl::StrCat(c.num_layers));
  if (s.num_kv_heads != c.num_kv_heads)
    return Mismatch("model.kv_heads", absl::StrCat(s.num_kv_heads), absl::StrCat(c.num_kv_heads));
  if (s.head_dim != c.head_dim) return Mismatch("model.head_dim", absl::StrCat(s.head_dim), absl::StrCat(c.head_dim));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Strategy> ParseStrategy(const std::string& text, const std::string& name) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) return absl::InvalidArgumentError("is not JSON");
  Strategy strategy;
  strategy.name = name;
  strategy.fingerprint = absl::StrFormat("%016x", Hash(text, kFnvStart));
  Fields fields(json, "");
  std::string kind;
  int version = 0;
  fields.Text("kind", &kind);
  if (fields.status().ok() && kind != kStrategyKind)
    fields.Fail("kind", absl::StrCat("is ", kind, ", must be ", kStrategyKind));
  fields.Whole("version", &version);
  if (fields.status().ok() && version != kStrategyVersion)
    fields.Fail("version", absl::StrCat("is ", version, ", this build reads ", kStrategyVersion));
  const Json& model = fields.Get("model");
  const Json& patterns = fields.Get("patterns");
  const Json& budgets = fields.Get("budgets");
  if (!fields.status().ok()) return fields.status();
  if (absl::Status s = ReadModel(model, &strategy); !s.ok()) return s;
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
               {"model",
                {{"name", s.model},
                 {"weights_hash", s.weights_hash},
                 {"layers", s.num_layers},
                 {"kv_heads", s.num_kv_heads},
                 {"head_dim", s.head_dim}}},
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
  for (const char* key : {"\"version\"", "\"model\"", "\"calibration\"", "\"patterns\":[{", "\"budgets\"", "{\"mean\"",
                          "\"prefill\"", "\"decode\""}) {
    for (size_t at = text.find(key); at != std::string::npos; at = text.find(key, at + std::strlen(key) + 1))
      text.insert(at, "\n");
  }
  return text + "\n";
}

std::string HashWeights(const MappedFile& file, const Gguf& gguf) {
  uint64_t hash = kFnvStart;
  for (const GgufTensor& tensor : gguf.tensors()) {
    hash = Hash(file.bytes().substr(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.bytes)),
                Hash(tensor.name, hash));
  }
  return absl::StrFormat("%016x", hash);
}

absl::StatusOr<std::string> HashWeights(const std::string& model_path) {
  auto file = OpenModelFile(model_path);
  if (!file.ok()) return file.status();
  const auto gguf = Gguf::Parse((*file)->bytes());
  if (!gguf.ok()) return gguf.status();
  return HashWeights(**file, *gguf);
}

absl::StatusOr<std::vector<std::shared_ptr<const Strategy>>> LoadStrategies(const EngineConfig& config,
                                                                            const ModelFile& model) {
  std::vector<std::string> paths = config.strategy_files;
  const bool shipped = paths.empty();
  std::error_code none;  // a folder that is not there holds no artifacts
  for (fs::directory_iterator it(shipped ? fs::path(config.artifact_folder) : fs::path(), none), end;
       !none && it != end; it.increment(none)) {
    if (it->path().extension() == ".json") paths.push_back(it->path().string());
  }
  if (shipped) std::sort(paths.begin(), paths.end());
  std::vector<std::shared_ptr<const Strategy>> strategies;
  std::string hash;  // of the model, once it is needed
  for (const std::string& path : paths) {
    const auto refuse = [&](const absl::Status& status) {
      return absl::Status(status.code(), absl::StrCat("strategy ", path, ": ", std::string(status.message())));
    };
    const auto text = ReadText("strategy", path);
    if (!text.ok()) return text.status();
    auto strategy = ParseStrategy(*text, fs::path(path).stem().string());
    if (!strategy.ok()) return refuse(strategy.status());
    for (const auto& other : strategies) {
      if (other->name != strategy->name) continue;
      return refuse(absl::InvalidArgumentError(absl::StrCat("another one is called ", strategy->name, " too; rename one of them")));
    }
    absl::Status fits = CheckDimensions(*strategy, model.config);
    if (fits.ok()) {
      if (hash.empty()) hash = HashWeights(model.file, model.gguf);
      if (strategy->weights_hash != hash) fits = Mismatch("model.weights_hash", strategy->weights_hash, hash);
    }
    if (fits.ok())
      strategies.push_back(std::make_shared<const Strategy>(*std::move(strategy)));
    else if (!shipped)
      return refuse(fits);
  }
  return strategies;
}

}  // namespace loupe
