// Reading artifacts, which are JSON: fields by name, the first that is missing or of another type is the error. Any thread.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace loupe {

class JsonFields {
 public:
  using Json = nlohmann::ordered_json;
  // `json` outlives this; `path` is how messages call it.
  JsonFields(const Json& json, std::string path);
  // INVALID_ARGUMENT: "<path>.<key>: <what is wrong>".
  const absl::Status& status() const { return status_; }
  void Fail(const std::string& key, const std::string& why);

  const Json& Get(const char* key);
  void Text(const char* key, std::string* out);
  void Whole(const char* key, int* out);  // 0 to 2^30
  // Exactly as many numbers as `out` has, each in [least, most].
  void Numbers(const char* key, double least, double most, std::span<double> out);
  // [layers][kv heads] whole numbers.
  void Lists(const char* key, int layers, int groups, std::vector<int>* out);
  // The fields `kind` and `version` have to be these.
  void Kind(const char* kind, int version);

 private:
  static std::string Shown(const Json& value);
  void ReadWhole(const char* key, const Json& value, int* out);

  const Json& json_;
  const std::string path_;
  absl::Status status_;
};

// What every artifact says of the model that it was made for.
template <class Artifact>
absl::Status ReadModelOf(const nlohmann::ordered_json& json, Artifact* out) {
  JsonFields fields(json, "model");
  fields.Text("name", &out->model);
  fields.Text("weights_hash", &out->weights_hash);
  fields.Whole("layers", &out->num_layers);
  fields.Whole("kv_heads", &out->num_kv_heads);
  fields.Whole("head_dim", &out->head_dim);
  return fields.status();
}
template <class Artifact>
nlohmann::ordered_json ModelOf(const Artifact& artifact) {
  return {{"name", artifact.model},
          {"weights_hash", artifact.weights_hash},
          {"layers", artifact.num_layers},
          {"kv_heads", artifact.num_kv_heads},
          {"head_dim", artifact.head_dim}};
}

// 16 hex digits that tell texts apart.
std::string FingerprintOfText(const std::string& text);
// Starts a line before each of `keys`, in order of their appearance: a file that people can read and compare.
void BreakLines(std::span<const char* const> keys, std::string* text);

}  // namespace loupe
