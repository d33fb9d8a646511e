#include "engine/load/profile_file.h"

#include <algorithm>
#include <cstdlib>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/load/json_fields.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMostNats = 1e3;
constexpr double kLargestKey = 6e4;  // fp16's

double Rounded(double value, int digits) { return std::strtod(absl::StrFormat("%.*g", digits, value).c_str(), nullptr); }

template <class Numbers>
Json Array(const Numbers& numbers, int digits) {
  Json out = Json::array();
  for (const auto x : numbers) out.push_back(Rounded(static_cast<double>(x), digits));
  return out;
}

// What was measured has to be what this build measures, or its numbers would be taken for others.
template <size_t n, class Number>
void Same(JsonFields& fields, const char* key, const std::array<Number, n>& expected) {
  std::array<double, n> numbers{};
  fields.Numbers(key, 0, 64, numbers);
  if (!fields.status().ok() || std::equal(numbers.begin(), numbers.end(), expected.begin())) return;
  fields.Fail(key, absl::StrCat("is ", Array(numbers, 6).dump(), ", this build reads ", Array(expected, 6).dump()));
}

absl::Status ReadList(const Json& json, const std::string& path, SphericalProfile* profile) {
  JsonFields fields(json, path);
  ListCosts& costs = profile->lists.emplace_back();
  fields.Numbers("key", 0, kMostNats, costs.key);
  fields.Numbers("value", 0, kMostNats, costs.value);
  fields.Numbers("share", 0, kMostNats, costs.share);
  std::vector<double> mean(static_cast<size_t>(profile->head_dim));
  fields.Numbers("mean_key", -kLargestKey, kLargestKey, mean);
  for (const double x : mean) profile->mean_keys.push_back(static_cast<float>(x));
  return fields.status();
}

}  // namespace

absl::StatusOr<SphericalProfile> ParseProfile(const std::string& text, const std::string& name) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) return absl::InvalidArgumentError("is not JSON");
  SphericalProfile profile;
  profile.name = name;
  profile.fingerprint = FingerprintOfText(text);
  JsonFields fields(json, "");
  fields.Kind(kProfileKind, kProfileVersion);
  const Json& model = fields.Get("model");
  Same(fields, "bits", kProfileBits);
  Same(fields, "shares", kProfileShares);
  const Json& lists = fields.Get("lists");
  if (!fields.status().ok()) return fields.status();
  if (absl::Status s = ReadModelOf(model, &profile); !s.ok()) return s;
  const int64_t num_lists = int64_t{profile.num_layers} * profile.num_kv_heads;
  if (!lists.is_array() || static_cast<int64_t>(lists.size()) != num_lists) {
    return absl::InvalidArgumentError(absl::StrCat("lists: must be an array of ", num_lists, " lists",
                                                   lists.is_array() ? absl::StrCat(", has ", lists.size()) : ""));
  }
  if (profile.head_dim > 4096) return absl::InvalidArgumentError(absl::StrCat("model.head_dim: is ", profile.head_dim, ", at most 4096"));
  for (size_t i = 0; i < lists.size(); ++i) {
    if (absl::Status s = ReadList(lists[i], absl::StrCat("lists[", i, "]"), &profile); !s.ok()) return s;
  }
  if (absl::Status s = CheckProfile(profile); !s.ok()) return s;
  return profile;
}

std::string ProfileToText(const SphericalProfile& p, const Json& calibration) {
  Json json = {{"kind", kProfileKind},
               {"version", kProfileVersion},
               {"model", ModelOf(p)},
               {"calibration", calibration},
               {"bits", Array(kProfileBits, 6)},
               {"shares", Array(kProfileShares, 6)},
               {"lists", Json::array()}};
  for (size_t i = 0; i < p.lists.size(); ++i) {
    const ListCosts& costs = p.lists[i];
    const auto mean = std::span(p.mean_keys).subspan(i * static_cast<size_t>(p.head_dim), static_cast<size_t>(p.head_dim));
    json["lists"].push_back({{"key", Array(costs.key, 4)},
                             {"value", Array(costs.value, 4)},
                             {"share", Array(costs.share, 4)},
                             {"mean_key", Array(mean, 4)}});
  }
  std::string text = json.dump();
  static constexpr const char* kKeys[] = {"\"version\"", "\"model\"", "\"calibration\"", "\"bits\"", "\"lists\"", "{\"key\""};
  BreakLines(kKeys, &text);
  return text + "\n";
}

}  // namespace loupe
