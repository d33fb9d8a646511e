// Schemas by texts that they take and texts that they do not, and by the words in which they are refused.
#include <gtest/gtest.h>

#include "engine/grammar/grammar.h"
#include "tests/unit/engine/grammar/byte_tokenizer.h"

namespace loupe::testing {
namespace {

absl::StatusOr<std::shared_ptr<Grammar>> Compile(const std::string& schema) {
  static const ByteTokenizer tokens;
  static const grammar::TokenTrie trie(tokens, tokens.vocab_size());
  return Grammar::Compile({GrammarSpec::Kind::kJsonSchema, schema, {}}, trie);
}

void Check(const std::string& schema, const std::vector<std::string>& good, const std::vector<std::string>& bad) {
  const auto grammar = Compile(schema);
  ASSERT_TRUE(grammar.ok()) << schema << ": " << grammar.status();
  for (const auto* list : {&good, &bad}) {
    for (const std::string& text : *list) {
      GrammarMatcher matcher(*grammar);
      const bool taken = matcher.Accept(text).ok() && matcher.accepts();
      EXPECT_EQ(taken, list == &good) << schema << " on " << text;
    }
  }
}

TEST(JsonSchema, Types) {
  Check("{}", {"1", "\"a\"", "{\"a\": [1, 2]}", "null", "[]", "{}", "[\n  1,\n  2\n]"}, {"", "nul", "01", "[1,]", "{\"a\" :1}", " 1"});
  Check("true", {"true"}, {"tru"});
  Check(R"({"type": "integer"})", {"0", "-12", "-0"}, {"1.0", "01", "1e3", "+1", "-"});
  Check(R"({"type": "number"})", {"0", "-1.5", "1e9", "1.25E-10"}, {".5", "1.", "1e100", "NaN"});
  Check(R"({"type": ["string", "null"]})", {"null", "\"\""}, {"1", "true"});
  Check(R"({"type": "string", "minLength": 2, "maxLength": 3})", {"\"ab\"", "\"é日x\"", "\"\\n\\u0041\"", "\"\\ud83d\\ude00b\""}, {"\"a\"", "\"abcd\"", "\"\\ud83d\""});
}

TEST(JsonSchema, Objects) {
  const std::string schema = R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}}, "required": ["b"]})";
  Check(schema, {R"({"b":true})", R"({"a": 1, "b": false})", R"({"a":1,"b":true,"c":null})", "{\n\t\"b\": true\n}"},
        {"{}", R"({"a":1})", R"({"b":true,"a":1})", R"({"b":true,})", R"({,"b":true})", R"({"b":true,"d":1})"});
  Check(R"({"properties": {"a": true}})", {"{}", R"({"a":[1]})"}, {R"({"b":1})", "1"});
  Check(R"({"properties": {"ab": {"type":"null"}}, "additionalProperties": {"type": "integer"}})",
        {"{}", R"({"ab":null})", R"({"ab":null,"b":1,"a":2,"abc":3,"":4,"é\"":5})", R"({"x":1})"},
        {R"({"ab":1})", R"({"x":1,"ab":null})", R"({"x":null})", R"({"\u0061b":1})"});
  Check(R"({"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2})",
        {R"({"x":true})", R"({"x":true, "y":false})"}, {"{}", R"({"x":true,"y":true,"z":true})", R"({"x":1})"});
  Check(R"({"type": "object", "patternProperties": {"^k[0-9]+$": {"type": "integer"}}, "additionalProperties": false})",
        {"{}", R"({"k1":1,"k22":2})"}, {R"({"k":1})", R"({"k1":true})"});
  Check(R"({"type": "object", "required": ["z"]})", {R"({"z":1})"}, {"{}"});
}

TEST(JsonSchema, Arrays) {
  Check(R"({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3})", {"[1]", "[1, 2,3]"}, {"[]", "[1,2,3,4]", "[true]"});
  Check(R"({"type": "array", "items": {"type": "integer"}, "minItems": 2})", {"[1,2]", "[1,2,3,4,5]"}, {"[]", "[1]"});
  Check(R"({"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": false})", {"[]", "[\"a\"]", "[\"a\",1]"}, {"[1]", "[\"a\",1,2]"});
  Check(R"({"prefixItems": [{"type": "string"}], "items": {"type": "null"}, "minItems": 1})", {"[\"a\"]", "[\"a\",null,null]"}, {"[]", "[null]"});
  Check(R"({"items": [{"type": "string"}], "additionalItems": false})", {"[]", "[\"a\"]"}, {"[1]", "[\"a\",1]"});
}

TEST(JsonSchema, Bounds) {
  const auto numbers = [](int from, int to) {
    std::vector<std::string> out;
    for (int i = from; i <= to; ++i) out.push_back(std::to_string(i));
    return out;
  };
  const auto join = [](std::vector<std::string> a, const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  Check(R"({"type": "integer", "minimum": 7, "maximum": 1234})", numbers(7, 1234), join(join(numbers(-20, 6), numbers(1235, 2000)), {"10000", "123400"}));
  Check(R"({"type": "integer", "minimum": -105, "exclusiveMaximum": -8})", numbers(-105, -9), join(numbers(-300, -106), numbers(-8, 200)));
  Check(R"({"type": "integer", "minimum": -3, "maximum": 12})", numbers(-3, 12), join(numbers(-40, -4), numbers(13, 150)));
  Check(R"({"type": "integer", "exclusiveMinimum": 0})", numbers(1, 200), join({"-0"}, numbers(-20, 0)));
  Check(R"({"type": "integer", "minimum": 0.5, "maximum": 2.5})", {"1", "2"}, {"0", "3", "1.0"});
  Check(R"({"type": "number", "minimum": 0, "maximum": 1})", {"0", "1", "0.5", "1.0", "1.000", "0.999"}, {"1.01", "-0.1", "2", "1.0001"});
  Check(R"({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1})", {"0.5", "0.001", "0.9999"}, {"0", "1", "0.0", "1.0", "-0.5", "0.000"});
  Check(R"({"type": "number", "minimum": -1.25, "maximum": 10.5})", {"-1.25", "-1.2", "-0.5", "0", "10.5", "10.50", "9.99", "10.4999"}, {"-1.26", "-2", "10.51", "11", "-1.2500001"});
  Check(R"({"type": "number", "minimum": 1e-3})", {"0.001", "1", "0.0010", "123456"}, {"0", "0.0009", "-1"});
  Check(R"({"type": "integer", "multipleOf": 7})", {"0", "7", "-14", "7007"}, {"1", "8", "-13"});
}

TEST(JsonSchema, Combinations) {
  Check(R"({"enum": ["a", 1, null, {"x": [1, 2]}]})", {"\"a\"", "1", "null", R"({"x":[1,2]})", R"({"x": [1, 2]})"}, {"\"b\"", "2", "{}"});
  Check(R"({"type": "string", "enum": ["a", 1, "bb"], "maxLength": 1})", {"\"a\""}, {"1", "\"bb\""});
  Check(R"({"const": "é\"\n"})", {R"("é\"\n")"}, {R"("e")"});
  Check(R"({"anyOf": [{"type": "integer"}, {"type": "string"}]})", {"1", "\"a\""}, {"null"});
  Check(R"({"oneOf": [{"type": "integer"}, {"type": "string"}]})", {"1", "\"a\""}, {"null"});
  Check(R"({"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k"]},
                      {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}]})",
        {R"({"k":"a","x":1})", R"({"k":"b"})"}, {R"({"k":"b","x":1})", R"({"k":"c"})"});
  Check(R"({"allOf": [{"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}, {"properties": {"b": {"type": "string"}, "a": {"minimum": 3}}}]})",
        {R"({"a":3})", R"({"a":4,"b":"x"})"}, {R"({"a":2})", R"({"b":"x"})"});
  Check(R"({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": -5}]})", {"5", "-5", "77"}, {"4", "0", "-4", "\"a\""});
  Check(R"({"allOf": [{"type": ["integer", "string"]}, {"type": ["number", "null"]}]})", {"1"}, {"1.5", "\"a\"", "null"});
}

TEST(JsonSchema, References) {
  Check(R"({"$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
      "required": ["v", "next"]}}, "$ref": "#/$defs/node"})",
        {R"({"v":1,"next":null})", R"({"v":1,"next":{"v":2,"next":{"v":3,"next":null}}})"}, {R"({"v":1})", R"({"v":1,"next":{}})"});
  Check(R"({"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}})", {"{}", R"({"kids":[{},{"kids":[]}]})"}, {R"({"kids":[1]})"});
  Check(R"({"definitions": {"a/b": {"type": "null"}}, "properties": {"x": {"$ref": "#/definitions/a~1b", "description": "d"}}})", {R"({"x":null})"}, {R"({"x":1})"});
}

TEST(JsonSchema, Strings) {
  Check(R"({"type": "string", "pattern": "^[a-z]{2}$"})", {"\"ab\""}, {"\"abc\"", "\"a\"", "\"A1\""});
  Check(R"({"type": "string", "pattern": "b"})", {"\"abc\"", "\"b\"", "\"\\nb\""}, {"\"ac\""});
  Check(R"({"type": "string", "pattern": "^(a|\")\\\\?$"})", {R"("a")", R"("\"\\")", R"("a\\")"}, {R"(""")", R"("b")"});
  Check(R"({"type": "string", "format": "date"})", {"\"2024-12-31\""}, {"\"2024-02-30\"", "\"2024-13-01\"", "\"24-1-1\""});
  Check(R"({"type": "string", "format": "date-time"})", {"\"2024-12-31T23:59:59Z\"", "\"2024-12-31T00:00:00.5+01:30\""}, {"\"2024-12-31\""});
  Check(R"({"type": "string", "format": "ipv4"})", {"\"0.10.255.7\""}, {"\"256.1.1.1\"", "\"1.1.1\""});
  Check(R"({"type": "string", "format": "of-my-own"})", {"\"anything\""}, {"1"});
}

TEST(JsonSchema, RefusalsNameTheKeyword) {
  const std::pair<const char*, const char*> cases[] = {
      {"{", "not valid JSON"}, {"[]", "a schema is"}, {R"({"type": "text"})", "type: \"text\""}, {R"({"not": {}})", "not is not offered"},
      {R"({"properties": {"x": {"if": {}}}})", "properties.x: if is not offered"}, {R"({"type": "array", "uniqueItems": true})", "uniqueItems"},
      {R"({"$ref": "other.json"})", "other.json"}, {R"({"$ref": "#/nowhere"})", "points to nothing"}, {R"({"$ref": "#"})", "refers to itself"},
      {R"({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})", "refers to itself"},
      {R"({"type": "string", "minLength": 3, "maxLength": 2})", "more than maxLength"}, {R"({"type": "string", "maxLength": 1000000})", "65536"},
      {R"({"type": "string", "maxLength": -1})", "from 0"}, {R"({"type": "string", "pattern": "("})", "pattern: at byte"}, {"false", "no text"},
      {R"({"type": "integer", "minimum": 5, "maximum": 4})", "no text"}, {R"({"oneOf": [{"type": "number"}, {"type": "integer"}]})", "use anyOf"},
      {R"({"type": "number", "multipleOf": 0.01})", "multipleOf"}, {R"({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})", "no text"},
      {R"({"enum": ["a"], "pattern": "a"})", "beside enum"}, {R"({"allOf": [{"pattern": "a"}, {"pattern": "b"}]})", "cannot be put together"}};
  for (const auto& [schema, why] : cases) {
    const auto grammar = Compile(schema);
    ASSERT_FALSE(grammar.ok()) << schema;
    EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(grammar.status().message().find(why), std::string::npos) << schema << ": " << grammar.status();
  }
}

}  // namespace
}  // namespace loupe::testing
