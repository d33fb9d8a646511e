#include "engine/load/json_fields.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/load/hash.h"

namespace loupe {

JsonFields::JsonFields(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
  if (!json.is_object()) Fail("", "must be an object");
}

void JsonFields::Fail(const std::string& key, const std::string& why) {
  if (!status_.ok()) return;
  status_ = absl::InvalidArgumentError(absl::StrCat(path_, path_.empty() || key.empty() ? "" : ".", key, ": ", why));
}

const JsonFields::Json& JsonFields::Get(const char* key) {
  static const Json nothing;
  if (!status_.ok()) return nothing;
  const auto it = json_.find(key);
  if (it != json_.end()) return *it;
  Fail(key, "is missing");
  return nothing;
}

void JsonFields::Text(const char* key, std::string* out) {
  const Json& value = Get(key);
  if (!status_.ok()) return;
  if (value.is_string()) {
    *out = value.get<std::string>();
  } else {
    Fail(key, absl::StrCat("is ", Shown(value), ", must be a string"));
  }
}

void JsonFields::Whole(const char* key, int* out) {
  const Json& value = Get(key);
  if (status_.ok()) ReadWhole(key, value, out);
}

void JsonFields::Numbers(const char* key, double least, double most, std::span<double> out) {
  const Json& value = Get(key);
  if (!status_.ok()) return;
  if (!value.is_array() || value.size() != out.size()) {
    Fail(key, absl::StrCat("is ", Shown(value), ", must be an array of ", out.size(), " numbers"));
    return;
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (value[i].is_number()) out[i] = value[i].get<double>();
    // Written so that NaN fails.
    if (value[i].is_number() && out[i] >= least && out[i] <= most) continue;
    Fail(key, absl::StrCat("has ", Shown(value[i]), ", must have numbers from ", least, " to ", most));
    return;
  }
}

void JsonFields::Lists(const char* key, int layers, int groups, std::vector<int>* out) {
  const Json& value = Get(key);
  if (!status_.ok()) return;
  if (!value.is_array() || value.size() != static_cast<size_t>(layers)) {
    Fail(key, absl::StrCat("must be an array of ", layers, " layers", value.is_array() ? absl::StrCat(", has ", value.size()) : ""));
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

void JsonFields::Kind(const char* kind, int version) {
  std::string of_file;
  int number = 0;
  Text("kind", &of_file);
  if (status_.ok() && of_file != kind) Fail("kind", absl::StrCat("is ", of_file, ", must be ", kind));
  Whole("version", &number);
  if (status_.ok() && number != version) Fail("version", absl::StrCat("is ", number, ", this build reads ", version));
}

std::string JsonFields::Shown(const Json& value) {
  const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

void JsonFields::ReadWhole(const char* key, const Json& value, int* out) {
  if (value.is_number_integer() && value.get<double>() >= 0 && value.get<double>() <= (1 << 30)) {
    *out = value.get<int>();
  } else {
    Fail(key, absl::StrCat("is ", Shown(value), ", must be a whole number from 0 to ", 1 << 30));
  }
}

std::string FingerprintOfText(const std::string& text) { return absl::StrFormat("%016x", HashWords(text)); }

void BreakLines(std::span<const char* const> keys, std::string* text) {
  for (const char* key : keys) {
    for (size_t at = text->find(key); at != std::string::npos; at = text->find(key, at + std::strlen(key) + 1)) text->insert(at, "\n");
  }
}

}  // namespace loupe
