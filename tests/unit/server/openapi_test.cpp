// The document says what the parser and the router do: every bound, every refusal, every route is tried.
#include "server/openapi.h"

#include <set>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/openai_fields.h"
#include "server/openai_routes.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

absl::Status Parse(Endpoint endpoint, const std::string& field, const Json& value) {
  Json body = endpoint == Endpoint::kChat ? Json{{"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})}} : Json{{"prompt", "hi"}};
  if (field == "top_logprobs") body["logprobs"] = true;
  if (field == "stream_options") body["stream"] = true;
  if (field == "min_tokens") body["max_tokens"] = 2147483647;
  if (field == "prompt_token_ids") body = Json::object();
  body[field] = value;
  return ParseApiRequest(endpoint, body.dump(), true).status();
}

class EveryField : public testing::TestWithParam<Endpoint> {
 protected:
  template <class Visit>
  void ForEach(Visit visit) {
    for (const FieldSpec& field : ApiFields()) {
      if (IsFieldOf(field, GetParam())) visit(field, Json::parse(field.schema, nullptr, false));
    }
  }
};

TEST_P(EveryField, HasOneRowASchemaAndANote) {
  std::set<std::string> names;
  ForEach([&](const FieldSpec& field, const Json& schema) {
    EXPECT_TRUE(names.insert(field.name).second) << field.name << " has two rows";
    EXPECT_FALSE(schema.is_discarded()) << field.name;
    EXPECT_FALSE(std::string(field.note).empty()) << field.name;
  });
  EXPECT_GT(names.size(), 50u);
}

TEST_P(EveryField, BoundsAreTheParsers) {
  int tried = 0;
  ForEach([&](const FieldSpec& field, const Json& schema) {
    if (schema.is_null()) return;
    const auto expect = [&](const Json& value, bool taken) {
      const absl::Status status = Parse(GetParam(), field.name, value);
      EXPECT_EQ(status.ok(), taken) << field.name << " = " << value << ": " << status;
      ++tried;
    };
    const double step = schema.value("type", "") == "integer" ? 1 : 0.01;
    if (schema.contains("minimum")) {
      expect(schema["minimum"], true);
      if (schema["minimum"].get<double>() > -1e18) expect(schema["minimum"].get<double>() - step, false);
    }
    if (schema.contains("exclusiveMinimum")) expect(schema["exclusiveMinimum"], false);
    if (schema.contains("maximum")) {
      expect(schema["maximum"], true);
      if (schema["maximum"].get<double>() < 1e18) expect(schema["maximum"].get<double>() + step, false);
    }
    if (schema.contains("const")) expect(schema["const"], true);
    for (const Json& one : schema.value("enum", Json::array())) expect(one, true);
    if (schema.contains("enum") || schema.contains("const")) expect("no such value", false);
  });
  EXPECT_GT(tried, 30);
}

TEST_P(EveryField, TypesAreTheParsers) {
  ForEach([&](const FieldSpec& field, const Json& schema) {
    if (schema.is_null() || !schema.contains("type")) return;
    const std::string type = schema["type"];
    for (const Json& value : {Json("text"), Json(0.5), Json(Json::array({Json::object()})), Json(Json::object({{"no such key", Json::array()}}))}) {
      const bool fits = (type == "string" && value.is_string()) || (type == "number" && value.is_number());
      const bool object = type == "object" && value.is_object() && !schema.contains("additionalProperties") && !schema.contains("required");
      EXPECT_EQ(Parse(GetParam(), field.name, value).ok(), fits || object) << field.name << " = " << value;
    }
    if (type == "boolean") EXPECT_FALSE(Parse(GetParam(), field.name, 1).ok()) << field.name;
  });
}

TEST_P(EveryField, WhatIsRefusedIsNamedAndNullMeansAbsent) {
  ForEach([&](const FieldSpec& field, const Json& schema) {
    const bool asked = std::string(field.name) == "messages" || std::string(field.name) == "prompt" || std::string(field.name) == "prompt_token_ids";
    if (!asked) EXPECT_TRUE(Parse(GetParam(), field.name, nullptr).ok()) << field.name;
    if (field.support != FieldSupport::kRefused) return;
    const Json value = std::string(field.name) == "best_of" ? Json(3)
                       : schema == Json{{"const", false}}   ? Json(true)
                       : schema.contains("maxItems")        ? Json(Json::array({1}))
                                                            : Json(Json::object({{"type", "else"}}));
    const absl::Status status = Parse(GetParam(), field.name, value);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field.name;
    EXPECT_TRUE(std::string(status.message()).starts_with(field.name)) << status;
  });
}

INSTANTIATE_TEST_SUITE_P(OpenApi, EveryField, testing::Values(Endpoint::kChat, Endpoint::kCompletion));

TEST(OpenApi, RoutesAreTheRouters) {
  ServerContext context;
  const std::string offered = OpenAiRoutes(context).Offered();
  std::set<std::string> documented;
  std::string all;
  const Json document = OpenApiDocument(false);
  for (const auto& [path, methods] : document["paths"].items()) {
    for (const auto& [method, operation] : methods.items()) {
      const std::string route = absl::StrCat(absl::AsciiStrToUpper(method), " ", path);
      EXPECT_NE(absl::StrCat(", ", offered, ",").find(absl::StrCat(", ", route, ",")), std::string::npos) << route << " is not in " << offered;
      EXPECT_TRUE(operation["responses"].contains("200")) << route;
      documented.insert(route);
    }
  }
  EXPECT_EQ(static_cast<size_t>(std::count(offered.begin(), offered.end(), ',')) + 1, documented.size()) << offered;
}

TEST(OpenApi, ReferencesPointAtSchemas) {
  const Json document = OpenApiDocument(true);
  const std::string text = document.dump();
  const std::string mark = "#/components/schemas/";
  int found = 0;
  for (size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at + 1), ++found) {
    const std::string name = text.substr(at + mark.size(), text.find('"', at) - at - mark.size());
    EXPECT_TRUE(document["components"]["schemas"].contains(name)) << name;
  }
  EXPECT_GT(found, 40);
  EXPECT_TRUE(document["paths"]["/health"]["get"]["security"].empty());
}

}  // namespace
}  // namespace loupe
