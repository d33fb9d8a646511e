#include "server/kv_json.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kvcache/page_format.h"
#include "kvcache/policies/coded.h"
#include "kvcache/policies/registry.h"
#include "nlohmann/json.hpp"
#include "server/http_json.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

absl::Status Refuse(const std::string& field, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("kv.", field, ": ", why));
}

absl::Status ReadBits(const std::string& field, const Json& value, bool may_be_auto, int* out) {
  if (may_be_auto && value.is_string() && value == "auto") return absl::OkStatus();
  const int64_t bits = value.is_number_integer() ? value.get<int64_t>() : 0;
  if (bits == 16 || CodecOfBits(static_cast<int>(std::clamp<int64_t>(bits, 0, 100)))) {
    *out = static_cast<int>(bits);
    return absl::OkStatus();
  }
  return Refuse(field, absl::StrCat("is ", value.dump(), ", must be 16, 8, 4, 3", may_be_auto ? ", 2 or \"auto\"" : " or 2"));
}

absl::Status ReadSides(const Json& bits, KvBits* out) {
  if (!bits.is_object()) return Refuse("bits", "must be an object {\"key\": 4, \"value\": 4}");
  for (const auto& [side, value] : bits.items()) {
    if (side != "key" && side != "value") return Refuse("bits." + side, "unknown field; use key and value");
    if (auto s = ReadBits("bits." + side, value, true, side == "key" ? &out->key : &out->value); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status ReadFloor(const Json& floor, KvFloor* out) {
  if (!floor.is_object()) return Refuse("floor", "must be an object {\"bits\": 4, \"ratio\": 0.1}");
  for (const auto& [key, value] : floor.items()) {
    if (key == "bits") {
      if (auto s = ReadBits("floor.bits", value, false, &out->bits); !s.ok()) return s;
    } else if (key == "ratio") {
      out->ratio = value.is_number() ? value.get<double>() : 0;
      if (!(out->ratio > 0 && out->ratio <= 1)) {
        return Refuse("floor.ratio", absl::StrCat("is ", value.dump(), ", must be above 0 and at most 1"));
      }
    } else {
      return Refuse("floor." + key, "unknown field; use bits and ratio");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadBudget(const Json& budget, KvBudget* out) {
  if (!budget.is_object() || budget.size() != 1) {
    return Refuse("budget", "must be an object with one of ratio, tokens, bytes");
  }
  const std::string kind = budget.begin().key();
  const Json& value = budget.begin().value();
  if (kind != "ratio" && kind != "tokens" && kind != "bytes") {
    return Refuse("budget." + kind, "unknown field; use ratio, tokens or bytes");
  }
  if (!value.is_number()) return Refuse("budget." + kind, "must be a number");
  out->kind = kind == "ratio" ? KvBudget::Kind::kRatio : kind == "tokens" ? KvBudget::Kind::kTokens : KvBudget::Kind::kBytes;
  out->value = value.get<double>();
  return absl::OkStatus();
}

absl::Status ReadCount(const std::string& field, const Json& value, int* out) {
  if (!value.is_number_integer() || value.get<double>() < 0 || value.get<double>() > (1 << 30)) {
    return Refuse(field, absl::StrCat("is ", value.dump(), ", must be a whole number from 0 to ", 1 << 30));
  }
  *out = value.get<int>();
  return absl::OkStatus();
}

absl::Status ReadRanges(const Json& value, KvProtect* out) {
  if (!value.is_array() || value.size() > kMaxProtectRanges) {
    return Refuse("protect.ranges", absl::StrCat("must be an array of at most ", kMaxProtectRanges, " ranges [from, to]"));
  }
  for (const Json& range : value) {
    if (!range.is_array() || range.size() != 2) {
      return Refuse("protect.ranges", absl::StrCat("has ", range.dump(), ", must have [from, to]"));
    }
    std::pair<int, int> read;
    if (auto s = ReadCount("protect.ranges", range[0], &read.first); !s.ok()) return s;
    if (auto s = ReadCount("protect.ranges", range[1], &read.second); !s.ok()) return s;
    out->ranges.push_back(read);
  }
  return absl::OkStatus();
}

absl::Status ReadProtect(const Json& protect, KvProtect* out) {
  if (!protect.is_object()) return Refuse("protect", "must be an object");
  for (const auto& [key, value] : protect.items()) {
    const std::string field = "protect." + key;
    if (key == "sinks" || key == "recent") {
      int count = 0;
      if (auto s = ReadCount(field, value, &count); !s.ok()) return s;
      (key == "sinks" ? out->sinks : out->recent) = count;
    } else if (key == "ranges") {
      if (auto s = ReadRanges(value, out); !s.ok()) return s;
    } else if (key == "messages") {
      if (!value.is_array()) return Refuse(field, "must be an array of message numbers, counted from 0");
      for (const Json& message : value) {
        if (auto s = ReadCount(field, message, &out->messages.emplace_back()); !s.ok()) return s;
      }
    } else if (key == "roles") {
      if (!value.is_array()) return Refuse(field, "must be an array of roles");
      for (const Json& role : value) {
        if (!role.is_string()) return Refuse(field, absl::StrCat("has ", role.dump(), ", must have strings"));
        out->roles.push_back(role.get<std::string>());
      }
    } else {
      return Refuse(field, "unknown field; known are sinks, recent, ranges, messages, roles");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadParams(const Json& params, KvOptions* options) {
  if (!params.is_object()) return Refuse("params", "must be an object");
  for (const auto& [name, value] : params.items()) {
    if (value.is_number()) {
      options->params[name] = value.get<double>();
    } else if (value.is_string()) {
      options->params[name] = value.get<std::string>();
    } else {
      return Refuse("params." + name, absl::StrCat("is ", value.dump(), ", must be a number or a word"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadField(const std::string& key, const Json& value, KvOptions* options) {
  if (key == "policy" || key == "strategy") {
    if (!value.is_string()) return Refuse(key, "must be a string");
    (key == "policy" ? options->policy : options->strategy) = value.get<std::string>();
    return absl::OkStatus();
  }
  if (key == "budget") return ReadBudget(value, &options->budget);
  if (key == "bits") return ReadSides(value, &options->bits);
  if (key == "floor") return ReadFloor(value, &options->floor);
  if (key == "protect") return ReadProtect(value, &options->protect);
  if (key == "params") return ReadParams(value, options);
  if (key == "on_miss") return Refuse(key, "is not offered; this build keeps nothing outside device memory");
  return Refuse(key, "unknown field; known are policy, budget, bits, floor, protect, on_miss, strategy, params");
}

Json ParamToJson(const ParamSpec& spec) {
  Json json = {{"name", spec.name}, {"summary", spec.summary}};
  if (!spec.choices.empty()) {
    json["default"] = spec.choices[static_cast<size_t>(spec.default_value)];
    json["choices"] = spec.choices;
    return json;
  }
  const auto number = [&](double x) { return spec.integer ? Json(static_cast<int64_t>(x)) : Json(x); };
  json["default"] = number(spec.default_value);
  json["min"] = number(spec.min);
  json["max"] = number(spec.max);
  return json;
}

}  // namespace

absl::StatusOr<KvOptions> ParseKvOptions(const Json& json) {
  KvOptions options;
  if (!json.is_object()) return absl::InvalidArgumentError("kv: must be an object");
  for (const auto& [key, value] : json.items()) {
    const absl::Status status = ReadField(key, value, &options);
    if (!status.ok()) return status;
  }
  return options;
}

absl::StatusOr<KvOptions> ParseKvOptions(const std::string& text) {
  const auto json = ParseJson(text);
  if (!json.ok()) return absl::InvalidArgumentError(absl::StrCat("kv: ", std::string(json.status().message()), ": ", text));
  return ParseKvOptions(*json);
}

Json KvOptionsToJson(const KvOptions& options) {
  Json json = {{"policy", options.policy}};
  const auto number = [](double x) { return x == std::floor(x) && std::abs(x) < 1e15 ? Json(static_cast<int64_t>(x)) : Json(x); };
  switch (options.budget.kind) {
    case KvBudget::Kind::kNone: break;
    case KvBudget::Kind::kRatio: json["budget"] = {{"ratio", options.budget.value}}; break;
    case KvBudget::Kind::kTokens: json["budget"] = {{"tokens", number(options.budget.value)}}; break;
    case KvBudget::Kind::kBytes: json["budget"] = {{"bytes", number(options.budget.value)}}; break;
  }
  const auto bits = [](int b) { return b == 0 ? Json("auto") : Json(b); };
  if (options.bits.key != 0 || options.bits.value != 0) {
    json["bits"] = {{"key", bits(options.bits.key)}, {"value", bits(options.bits.value)}};
  }
  if (options.floor.bits != 0) json["floor"]["bits"] = options.floor.bits;
  if (options.floor.ratio > 0) json["floor"]["ratio"] = options.floor.ratio;
  const KvProtect& protect = options.protect;
  json["protect"] = {{"sinks", protect.sinks.value_or(4)}, {"recent", protect.recent ? Json(*protect.recent) : Json("auto")}};
  if (!protect.ranges.empty()) json["protect"]["ranges"] = protect.ranges;
  if (!protect.messages.empty()) json["protect"]["messages"] = protect.messages;
  if (!protect.roles.empty()) json["protect"]["roles"] = protect.roles;
  if (!options.strategy.empty()) json["strategy"] = options.strategy;
  const PolicyRow* row = FindPolicy(options.policy);
  for (size_t i = 0; row != nullptr && i < row->params.size(); ++i) {
    const ParamSpec& spec = row->params[i];
    const auto given = options.params.find(spec.name);
    if (given == options.params.end()) {
      json["params"][spec.name] =
          spec.choices.empty() ? number(spec.default_value) : Json(spec.choices[static_cast<size_t>(spec.default_value)]);
    } else {
      const auto* value = std::get_if<double>(&given->second);
      json["params"][spec.name] = value != nullptr ? number(*value) : Json(std::get<std::string>(given->second));
    }
  }
  for (const ParamSpec& spec : CodingParams()) {
    const auto given = options.params.find(spec.name);
    if (given == options.params.end()) continue;
    const auto* value = std::get_if<double>(&given->second);
    json["params"][spec.name] = value != nullptr ? number(*value) : Json(std::get<std::string>(given->second));
  }
  return json;
}

Json KvPoliciesToJson(bool baselines) {
  // Further ones have another number of bits for keys than for values.
  const Json formats = {"dense", "s8", "s4", "s3", "s2"};
  Json list = Json::array();
  list.push_back({{"name", "auto"},
                  {"summary", "full while it fits well, else the server's default policy; with a budget a policy that holds it"},
                  {"needs", "nothing"},
                  {"formats", formats},
                  {"parameters", Json::array()}});
  for (const PolicyRow& row : AllPolicies()) {
    if (row.baseline && !baselines) continue;
    Json params = Json::array();
    for (const ParamSpec& spec : row.params) params.push_back(ParamToJson(spec));
    // A policy that chooses formats has them among its own, in its own words.
    for (const ParamSpec& spec : CodingParams()) {
      if (!row.chooses_formats) params.push_back(ParamToJson(spec));
    }
    list.push_back({{"name", row.name}, {"summary", row.summary}, {"needs", row.needs}, {"formats", formats}, {"parameters", params}});
  }
  return {{"policies", list}};
}

std::string KvPoliciesAsText() {
  std::string text =
      "The kv object says what a request's cache keeps, e.g. {\"policy\": \"h2o\", \"budget\": {\"ratio\": 0.25}}.\n\n"
      "budget   {\"ratio\": 0.25} of the prompt's bytes, {\"tokens\": 512} a list, or {\"bytes\": 8388608};\n"
      "         without one nothing is dropped\n"
      "bits     {\"key\": 4, \"value\": 4}: what is kept is stored with 16, 8, 4, 3 or 2 bits a number\n"
      "protect  {\"sinks\": 4, \"recent\": 64, \"ranges\": [[0, 100]], \"messages\": [0], \"roles\": [\"system\"]}\n"
      "params   parameters of the policy, below\n\n";
  const Json json = KvPoliciesToJson(true);
  for (const Json& policy : json["policies"]) {
    absl::StrAppend(&text, policy["name"].get<std::string>(), ": ", policy["summary"].get<std::string>(), "\n");
    for (const Json& p : policy["parameters"]) {
      const std::string range = p.contains("choices") ? absl::StrCat("one of ", p["choices"].dump())
                                                      : absl::StrCat("from ", p["min"].dump(), " to ", p["max"].dump());
      absl::StrAppend(&text, "  ", p["name"].get<std::string>(), " [", p["default"].dump(), "] ", range, ": ",
                      p["summary"].get<std::string>(), "\n");
    }
  }
  return text + "\nBaselines are for comparison; serve takes them with --allow-baselines only.\n";
}

Json KvReportToJson(const KvReport& r) {
  Json formats = Json::object();
  for (const auto& [name, count] : r.entries_by_format) formats[name] = count;
  return {{"policy", r.policy},
          {"reason", r.reason},
          {"bytes", {{"device", r.device_bytes}, {"host", r.host_bytes}, {"full", r.full_bytes}}},
          {"bytes_ratio", r.bytes_ratio},
          {"peak_bytes_ratio", r.peak_bytes_ratio},
          {"lists", r.lists},
          {"entries",
           {{"kept", r.entries_kept}, {"merged", r.entries_merged}, {"dropped", r.entries_dropped}, {"on_host", r.entries_on_host}}},
          {"bits", {{"key", r.key_bits}, {"value", r.value_bits}}},
          {"entries_by_format", formats},
          {"zooms", r.zooms},
          {"zoom_tokens", r.zoom_tokens},
          {"fetched_bytes", r.fetched_bytes},
          {"read_bytes_per_token", r.read_bytes_per_token},
          {"full_read_bytes_per_token", r.full_read_bytes_per_token},
          {"lowered", r.lowered},
          {"estimated_error", r.estimated_error ? Json(*r.estimated_error) : Json(nullptr)}};
}

}  // namespace loupe
