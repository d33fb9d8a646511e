#include "server/grammar_json.h"

#include "absl/strings/str_cat.h"
#include "server/http_json.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

absl::Status Refuse(const std::string& name, const std::string& why) { return absl::InvalidArgumentError(absl::StrCat(name, ": ", why)); }

}  // namespace

absl::Status ReadResponseFormat(const std::string& name, const Json& json, std::optional<GrammarSpec>* out) {
  if (!json.is_object()) return Refuse(name, absl::StrCat("must be an object, got ", Describe(json)));
  const Json type = json.value("type", Json());
  if (type == "text") return absl::OkStatus();
  if (type == "json_object") {
    *out = GrammarSpec{GrammarSpec::Kind::kJsonObject, "", {}};
    return absl::OkStatus();
  }
  if (type != "json_schema") {
    return Refuse(name + ".type", absl::StrCat("is ", Describe(type), ", must be \"text\", \"json_object\" or \"json_schema\""));
  }
  const Json outer = json.value("json_schema", Json());
  if (!outer.is_object()) return Refuse(name + ".json_schema", "must be an object with a schema");
  const Json schema = outer.value("schema", Json());
  if (!schema.is_object()) return Refuse(name + ".json_schema.schema", absl::StrCat("must be an object, got ", Describe(schema)));
  *out = GrammarSpec{GrammarSpec::Kind::kJsonSchema, DumpJson(schema), {}};
  return absl::OkStatus();
}

absl::Status ReadRegex(const std::string& name, const Json& json, std::optional<GrammarSpec>* out) {
  GrammarSpec spec{GrammarSpec::Kind::kRegex, "", {}};
  if (auto status = ReadString(name, json, &spec.text); !status.ok()) return status;
  *out = std::move(spec);
  return absl::OkStatus();
}

absl::Status ReadChoice(const std::string& name, const Json& json, std::optional<GrammarSpec>* out) {
  GrammarSpec spec{GrammarSpec::Kind::kChoice, "", {}};
  if (!json.is_array() || json.empty()) return Refuse(name, absl::StrCat("must be a list of strings, got ", Describe(json)));
  if (json.size() > kMaxChoiceStrings) return Refuse(name, absl::StrCat("has ", json.size(), " strings, at most ", kMaxChoiceStrings));
  size_t bytes = 0;
  for (size_t i = 0; i < json.size(); ++i) {
    const std::string item = absl::StrCat(name, "[", i, "]");
    if (auto status = ReadString(item, json[i], &spec.choices.emplace_back()); !status.ok()) return status;
    if (spec.choices.back().empty()) return Refuse(item, "is empty; an answer has at least one token");
    bytes += spec.choices.back().size();
  }
  if (bytes > kMaxChoiceBytes) return Refuse(name, absl::StrCat("has ", bytes, " bytes, at most ", kMaxChoiceBytes));
  *out = std::move(spec);
  return absl::OkStatus();
}

}  // namespace loupe
