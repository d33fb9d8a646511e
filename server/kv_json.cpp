#include "server/kv_json.h"

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

absl::Status Refuse(const std::string& field, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("kv.", field, ": ", why));
}

absl::Status CheckBits(const Json& bits) {
  if (!bits.is_object()) return Refuse("bits", "must be an object {\"key\": 16, \"value\": 16}");
  for (const auto& [side, value] : bits.items()) {
    if (side != "key" && side != "value") return Refuse("bits." + side, "unknown field; use key and value");
    const bool full = (value.is_string() && value == "auto") || (value.is_number_integer() && value == 16);
    if (!full) return Refuse("bits." + side, absl::StrCat(value.dump(), " is not offered; this build stores 16 bits (or \"auto\")"));
  }
  return absl::OkStatus();
}

absl::Status CheckBudget(const Json& budget) {
  if (!budget.is_object() || budget.size() != 1) {
    return Refuse("budget", "must be an object with one of ratio, tokens, bytes");
  }
  const std::string kind = budget.begin().key();
  const Json& value = budget.begin().value();
  if (kind != "ratio" && kind != "tokens" && kind != "bytes") {
    return Refuse("budget." + kind, "unknown field; use ratio, tokens or bytes");
  }
  if (!value.is_number()) return Refuse("budget." + kind, "must be a number");
  if (kind == "ratio" && value.get<double>() >= 1) return absl::OkStatus();
  return Refuse("budget." + kind, absl::StrCat(value.dump(), " would drop entries, but policy full keeps everything; "
                                               "leave the budget out or use {\"ratio\": 1}"));
}

absl::Status CheckField(const std::string& key, const Json& value, KvOptions* options) {
  if (key == "policy") {
    if (!value.is_string()) return Refuse(key, "must be a string");
    options->policy = value.get<std::string>();
    return absl::OkStatus();
  }
  if (key == "budget") return CheckBudget(value);
  if (key == "bits") return CheckBits(value);
  if (key == "protect" || key == "floor" || key == "params") {
    // The full policy protects everything and has no parameters, so nothing of these is lost.
    return value.is_object() ? absl::OkStatus() : Refuse(key, "must be an object");
  }
  if (key == "on_miss") {
    const bool known = value.is_string() && (value == "block" || value == "stale");
    return known ? absl::OkStatus() : Refuse(key, "must be \"block\" or \"stale\"");
  }
  if (key == "strategy") return Refuse(key, "this server was started without artifacts");
  return Refuse(key, "unknown field; known are policy, budget, bits, floor, protect, on_miss, strategy, params");
}

}  // namespace

absl::StatusOr<KvOptions> ParseKvOptions(const Json& json) {
  KvOptions options;
  if (!json.is_object()) return absl::InvalidArgumentError("kv: must be an object");
  for (const auto& [key, value] : json.items()) {
    const absl::Status status = CheckField(key, value, &options);
    if (!status.ok()) return status;
  }
  return options;
}

absl::StatusOr<KvOptions> ParseKvOptions(const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) return absl::InvalidArgumentError(absl::StrCat("kv: not valid JSON: ", text));
  return ParseKvOptions(json);
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
