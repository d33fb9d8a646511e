#include "engine/grammar/schema_merge.h"

#include <algorithm>
#include <unordered_map>

#include "absl/strings/str_cat.h"

namespace loupe::grammar {
namespace {

constexpr int kMaxDepth = 32;         // of references that have to be put together
constexpr size_t kMaxBranches = 256;  // of alternatives times alternatives

const std::set<std::string>& AllTypes() {
  static const std::set<std::string> types = {"null", "boolean", "number", "integer", "string", "array", "object"};
  return types;
}

// Follows references; false and true become schemas.
Json Plain(const Json& schema, const Resolver& resolve, int depth) {
  if (depth > kMaxDepth)
    throw Refusal(absl::StrCat("references lead through more than ", kMaxDepth, " schemas that have to be put together"));
  resolve.CheckTime();
  if (schema.is_boolean()) return schema.get<bool>() ? Json::object() : Json{{"enum", Json::array()}};
  if (!schema.is_object()) throw Refusal("a schema is an object, true or false");
  Json plain = schema;
  if (const auto reference = plain.find("$ref"); reference != plain.end()) {
    if (!reference->is_string()) throw Refusal("$ref: must be a string");
    const Json& target = resolve.Resolve(reference->get_ref<const std::string&>());
    plain.erase("$ref");
    plain = MergeSchemas(target, plain, resolve, depth + 1);
  }
  if (const auto all = plain.find("allOf"); all != plain.end()) {
    const Json parts = *all;
    if (!parts.is_array()) throw Refusal("allOf: must be a list");
    plain.erase("allOf");
    for (const Json& part : parts) plain = MergeSchemas(plain, part, resolve, depth + 1);
  }
  if (const auto value = plain.find("const"); value != plain.end()) {
    const Json one = Json::array({*value});
    plain.erase("const");
    plain = plain.contains("enum") ? MergeSchemas(plain, Json{{"enum", one}}, resolve, depth + 1) : (plain["enum"] = one, plain);
  }
  return plain;
}

Json MergeTypes(const Json& a, const Json& b) {
  const std::set<std::string> left = TypesOf(Json{{"type", a}}), right = TypesOf(Json{{"type", b}});
  Json both = Json::array();
  for (const std::string& type : AllTypes()) {
    // An integer is a number.
    const auto allows = [&](const std::set<std::string>& types) {
      return types.contains(type) || (type == "integer" && types.contains("number"));
    };
    if (allows(left) && allows(right) && !(type == "integer" && left.contains("number") && right.contains("number"))) both.push_back(type);
  }
  return both;
}

Json MergeEnums(const Json& a, const Json& b) {
  CheckProduct(a, b, "enum");
  Json both = Json::array();
  for (const Json& value : a) {
    if (std::find(b.begin(), b.end(), value) != b.end()) both.push_back(value);
  }
  return both;
}

Json MergeBranches(const Json& a, const Json& b, const Resolver& resolve, int depth) {
  if (a.size() * b.size() > kMaxBranches) throw Refusal(absl::StrCat("more than ", kMaxBranches, " alternatives put together"));
  Json both = Json::array();
  for (const Json& left : a) {
    for (const Json& right : b) both.push_back(MergeSchemas(left, right, resolve, depth + 1));
  }
  return both;
}

// Each property has to satisfy what either side says of it, by name or as an additional one.
void MergeProperties(const Json& a, const Json& b, const Resolver& resolve, int depth, Json* out) {
  const Json none = Json::object(), open = true;
  const auto member = [](const Json& schema, const char* key, const Json& absent) { return schema.value(key, absent); };
  const Json left = member(a, "properties", none), right = member(b, "properties", none);
  const Json left_rest = member(a, "additionalProperties", open), right_rest = member(b, "additionalProperties", open);
  CheckProduct(left, right, "properties");
  if (a.contains("patternProperties") || b.contains("patternProperties"))
    throw Refusal("patternProperties cannot be put together with other schemas");
  Json properties = Json::object();
  for (const auto& [name, schema] : left.items()) {
    properties[name] = MergeSchemas(schema, right.contains(name) ? right[name] : right_rest, resolve, depth + 1);
  }
  for (const auto& [name, schema] : right.items()) {
    if (!left.contains(name)) properties[name] = MergeSchemas(left_rest, schema, resolve, depth + 1);
  }
  if (!properties.empty()) (*out)["properties"] = std::move(properties);
  if (a.contains("additionalProperties") || b.contains("additionalProperties")) {
    (*out)["additionalProperties"] =
        left_rest == false || right_rest == false ? Json(false) : MergeSchemas(left_rest, right_rest, resolve, depth + 1);
  }
}

Json MergeRequired(const Json& a, const Json& b) {
  CheckProduct(a, b, "required");
  Json both = a;
  for (const Json& name : b) {
    if (std::find(both.begin(), both.end(), name) == both.end()) both.push_back(name);
  }
  return both;
}

// Of a keyword that both have.
Json MergeValues(const std::string& keyword, const Json& a, const Json& b, const Resolver& resolve, int depth) {
  if (a == b) return a;
  if (keyword == "type") return MergeTypes(a, b);
  if (keyword == "enum") return MergeEnums(a, b);
  if (keyword == "required") return MergeRequired(a, b);
  if (keyword == "anyOf" || keyword == "oneOf") return MergeBranches(a, b, resolve, depth);
  if (keyword == "items") return MergeSchemas(a, b, resolve, depth + 1);
  static const std::set<std::string> kLargest = {"minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"};
  static const std::set<std::string> kSmallest = {"maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"};
  if (kLargest.contains(keyword) && a.is_number() && b.is_number()) return a < b ? b : a;
  if (kSmallest.contains(keyword) && a.is_number() && b.is_number()) return a < b ? a : b;
  if (KindOf(keyword) == Keyword::kAnnotation) return a;
  throw Refusal(absl::StrCat(keyword, ": two different ones cannot be put together"));
}

}  // namespace

void CheckProduct(const Json& a, const Json& b, const char* what) {
  constexpr size_t kMost = 1'000'000;
  if (a.size() * b.size() <= kMost) return;
  throw Refusal(
      absl::StrCat(what, ": ", a.size(), " and ", b.size(), " cannot be held against each other; at most ", kMost, " pairs are offered"));
}

Keyword KindOf(const std::string& keyword) {
  static const std::unordered_map<std::string, Keyword> kinds = [] {
    std::unordered_map<std::string, Keyword> all;
    for (const char* k : {"$ref", "allOf", "anyOf", "oneOf", "enum", "const", "type", "properties", "required", "additionalProperties",
                          "patternProperties", "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems",
                          "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
                          "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}) {
      all[k] = Keyword::kOffered;
    }
    for (const char* k : {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
                          "unevaluatedItems", "contains", "minContains", "maxContains", "propertyNames", "$dynamicRef", "$recursiveRef",
                          "$anchor", "$dynamicAnchor"}) {
      all[k] = Keyword::kRefused;
    }
    return all;
  }();
  const auto found = kinds.find(keyword);
  return found == kinds.end() ? Keyword::kAnnotation : found->second;
}

std::set<std::string> TypesOf(const Json& schema) {
  std::set<std::string> types;
  if (const auto named = schema.find("type"); named != schema.end()) {
    const Json list = named->is_array() ? *named : Json::array({*named});
    for (const Json& type : list) {
      if (!type.is_string() || !AllTypes().contains(type.get<std::string>())) {
        throw Refusal(
            absl::StrCat("type: ", type.dump().substr(0, 60), " is none of null, boolean, number, integer, string, array, object"));
      }
      types.insert(type.get<std::string>());
    }
    return types;
  }
  static const std::unordered_map<std::string, const char*> spoken_of = {
      {"properties", "object"}, {"required", "object"}, {"additionalProperties", "object"}, {"patternProperties", "object"},
      {"minProperties", "object"}, {"maxProperties", "object"}, {"items", "array"}, {"prefixItems", "array"}, {"minItems", "array"},
      {"maxItems", "array"}, {"uniqueItems", "array"}, {"minLength", "string"}, {"maxLength", "string"}, {"pattern", "string"},
      {"format", "string"}, {"minimum", "number"}, {"maximum", "number"}, {"exclusiveMinimum", "number"}, {"exclusiveMaximum", "number"},
      {"multipleOf", "number"}};
  for (const auto& [keyword, value] : schema.items()) {
    if (const auto found = spoken_of.find(keyword); found != spoken_of.end()) types.insert(found->second);
  }
  return types.empty() ? AllTypes() : types;
}

Json MergeSchemas(const Json& a, const Json& b, const Resolver& resolve, int depth) {
  if (b == true || b == Json::object()) return a;
  if (a == true || a == Json::object()) return b;
  const Json left = Plain(a, resolve, depth), right = Plain(b, resolve, depth);
  Json out = left;
  const auto about_properties = [](const std::string& key) {
    return key == "properties" || key == "additionalProperties" || key == "patternProperties";
  };
  bool properties = false;
  for (const auto& [key, value] : right.items()) {
    if (about_properties(key)) {
      properties = true;
    } else {
      out[key] = left.contains(key) ? MergeValues(key, left[key], value, resolve, depth) : value;
    }
  }
  if (properties) {
    const bool on_both = left.contains("properties") || left.contains("additionalProperties") || left.contains("patternProperties");
    if (on_both) {
      MergeProperties(left, right, resolve, depth, &out);
    } else {
      for (const char* key : {"properties", "additionalProperties", "patternProperties"}) {
        if (right.contains(key)) out[key] = right[key];
      }
    }
  }
  if ((left.contains("prefixItems") != right.contains("prefixItems")) && (left.contains("items") || right.contains("items"))) {
    throw Refusal("prefixItems: cannot be put together with items of another schema");
  }
  return out;
}

bool AreDisjoint(const Json& a, const Json& b, const Resolver& resolve, int depth) {
  if (depth > 8) return false;
  const Json left = Plain(a, resolve, depth), right = Plain(b, resolve, depth);
  if (left.contains("enum") && right.contains("enum") && MergeEnums(left["enum"], right["enum"]).empty()) return true;
  const std::set<std::string> lt = TypesOf(left), rt = TypesOf(right);
  const auto number = [](const std::set<std::string>& types) { return types.contains("number") || types.contains("integer"); };
  const bool share = std::any_of(lt.begin(), lt.end(), [&](const std::string& t) { return rt.contains(t); }) || (number(lt) && number(rt));
  if (!share && !left.contains("enum") && !right.contains("enum")) return true;
  const bool objects = lt == std::set<std::string>{"object"} && rt == lt;
  if (!objects || !left.contains("properties") || !right.contains("properties")) return false;
  // A property that both must have and that cannot be both.
  const Json lr = left.value("required", Json::array()), rr = right.value("required", Json::array());
  CheckProduct(lr, rr, "required");
  for (const Json& name : lr) {
    if (!name.is_string() || std::find(rr.begin(), rr.end(), name) == rr.end()) continue;
    const std::string key = name.get<std::string>();
    if (!left["properties"].contains(key) || !right["properties"].contains(key)) continue;
    if (AreDisjoint(left["properties"][key], right["properties"][key], resolve, depth + 1)) return true;
  }
  return false;
}

}  // namespace loupe::grammar
