#include "engine/grammar/json_schema.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "engine/grammar/automaton.h"
#include "engine/grammar/regex.h"
#include "engine/grammar/schema_formats.h"
#include "engine/grammar/schema_merge.h"

namespace loupe::grammar {
namespace {

constexpr int kMaxSchemaDepth = 64;
constexpr int kMaxEnum = 10'000;

class SchemaWriter : public Resolver {
 public:
  SchemaWriter(JsonText& text, const Json& root) : text_(text), nfa_(text.nfa()), root_(root) {}

  void Write(StateId from, StateId to) {
    AddValue(from, root_, to);
    CheckLeftCalls();
  }
  const Json& Resolve(const std::string& reference) const override;
  void CheckTime() const override { nfa_.CheckTime(); }

 private:
  // Adds `name` to the path while it lives; the first byte of a value inside a list or an object is another place.
  class Step {
   public:
    Step(SchemaWriter& writer, const std::string& name, bool inside = false) : writer_(writer), owner_(writer.owner_) {
      writer.path_.push_back(name);
      if (inside) writer.owner_.clear();
      if (++writer.depth_ > kMaxSchemaDepth * 4) writer.Fail(absl::StrCat("more than ", kMaxSchemaDepth * 4, " schemas inside each other"));
    }
    ~Step() {
      writer_.path_.pop_back();
      writer_.owner_ = std::move(owner_);
      --writer_.depth_;
    }

   private:
    SchemaWriter& writer_;
    std::string owner_;
  };

  [[noreturn]] void Fail(const std::string& why) const {
    std::string where;
    for (const std::string& name : path_) absl::StrAppend(&where, where.empty() ? "" : ".", name);
    throw Refusal(where.empty() ? why : absl::StrCat(where.substr(0, 200), ": ", why));
  }
  // What `work` refuses is said with the path.
  template <class Work>
  auto Here(const Work& work) const {
    try {
      return work();
    } catch (const Refusal& refusal) {
      Fail(refusal.what());
    }
  }

  void AddReference(StateId from, const std::string& reference, StateId to);
  void CheckLeftCalls() const;
  void CheckKeywords(const Json& schema) const;
  int Count(const Json& schema, const char* keyword, int absent) const;

  void AddValue(StateId from, const Json& schema, StateId to);
  void AddBranches(StateId from, const Json& schema, const char* keyword, StateId to);
  void AddEnum(StateId from, const Json& schema, StateId to);
  void AddType(StateId from, const Json& schema, const std::string& type, StateId to);
  void AddString(StateId from, const Json& schema, StateId to);
  void AddNumber(StateId from, const Json& schema, bool integer, StateId to);
  void AddArray(StateId from, const Json& schema, StateId to);
  void AddObject(StateId from, const Json& schema, StateId to);
  void AddMember(StateId from, const std::string& name, const Json& schema, StateId to);
  JsonText::Part OtherMembers(const Json& schema, const Json& properties);
  bool Satisfies(const Json& schema, const Json& value) const;

  JsonText& text_;
  NfaBuilder& nfa_;
  const Json& root_;
  std::map<std::string, Rule> rules_;  // by reference
  // The rule of `owner_` (empty: none) is where no byte has been written yet; which rules are called from there.
  std::string owner_;
  std::map<std::string, std::vector<std::string>> left_calls_;
  std::vector<std::string> path_;
  int depth_ = 0;
};

const Json& SchemaWriter::Resolve(const std::string& reference) const {
  if (reference != "#" && !reference.starts_with("#/")) {
    throw Refusal(absl::StrCat("$ref: '", reference.substr(0, 80), "' does not point into this schema (\"#/...\")"));
  }
  const Json* at = &root_;
  for (std::string_view rest = std::string_view(reference).substr(1); !rest.empty();) {
    rest.remove_prefix(1);
    const size_t slash = std::min(rest.find('/'), rest.size());
    const std::string key =
        absl::StrReplaceAll(std::string(rest.substr(0, slash)), {{"~1", "/"}, {"~0", "~"}, {"%25", "%"}, {"%20", " "}, {"%22", "\""}});
    rest.remove_prefix(slash);
    size_t index = 0;
    if (at->is_object() && at->contains(key)) {
      at = &(*at)[key];
    } else if (at->is_array() && absl::SimpleAtoi(key, &index) && index < at->size()) {
      at = &(*at)[index];
    } else {
      throw Refusal(absl::StrCat("$ref: '", reference.substr(0, 80), "' points to nothing"));
    }
  }
  return *at;
}

void SchemaWriter::AddReference(StateId from, const std::string& reference, StateId to) {
  const Json& target = Here([&]() -> const Json& { return Resolve(reference); });
  if (!owner_.empty()) left_calls_[owner_].push_back(reference);
  const auto [at, fresh] = rules_.try_emplace(reference);
  if (fresh) {
    at->second = nfa_.NewRule();
    const Rule rule = at->second;
    const Step step(*this, absl::StrCat("$ref(", reference, ")"));
    owner_ = reference;
    AddValue(rule.start, target, rule.end);
  }
  nfa_.AddCall(from, at->second, to);
}

// A rule that calls itself before any byte is written would never come to one.
void SchemaWriter::CheckLeftCalls() const {
  std::map<std::string, int> seen;  // 1: on the way, 2: done
  const std::function<void(const std::string&)> visit = [&](const std::string& rule) {
    int& mark = seen[rule];
    if (mark == 1) throw Refusal(absl::StrCat("$ref: '", rule.substr(0, 80), "' refers to itself without anything in between"));
    if (mark == 2) return;
    mark = 1;
    if (const auto calls = left_calls_.find(rule); calls != left_calls_.end()) {
      for (const std::string& next : calls->second) visit(next);
    }
    seen[rule] = 2;
  };
  for (const auto& [rule, calls] : left_calls_) visit(rule);
}

void SchemaWriter::CheckKeywords(const Json& schema) const {
  for (const auto& [keyword, value] : schema.items()) {
    if (KindOf(keyword) == Keyword::kRefused) Fail(absl::StrCat(keyword, " is not offered"));
  }
}

int SchemaWriter::Count(const Json& schema, const char* keyword, int absent) const {
  const auto found = schema.find(keyword);
  if (found == schema.end()) return absent;
  const double value = found->is_number() ? found->get<double>() : -1;
  if (!(value >= 0) || value != static_cast<double>(static_cast<int64_t>(std::min(value, 1e15)))) {
    Fail(absl::StrCat(keyword, ": is ", found->dump().substr(0, 60), ", must be a number from 0 without fraction"));
  }
  if (value > kMaxRepeat) Fail(absl::StrCat(keyword, ": is ", found->dump().substr(0, 60), ", at most ", kMaxRepeat, " is offered"));
  return static_cast<int>(value);
}

void SchemaWriter::AddValue(StateId from, const Json& schema, StateId to) {
  nfa_.CheckTime();
  if (schema.is_boolean()) {
    if (schema.get<bool>()) text_.AddAnyValue(from, to);
    return;  // nothing satisfies false
  }
  if (!schema.is_object()) Fail("a schema is an object, true or false");
  CheckKeywords(schema);
  const bool alone = std::all_of(schema.items().begin(), schema.items().end(), [](const auto& member) {
    return member.key() == "$ref" || KindOf(member.key()) == Keyword::kAnnotation;
  });
  const auto reference = schema.find("$ref");
  if (reference != schema.end() && !reference->is_string()) Fail("$ref: must be a string");
  if (reference != schema.end() && alone) return AddReference(from, reference->get<std::string>(), to);
  if (reference != schema.end() || schema.contains("allOf")) {
    const Step step(*this, schema.contains("allOf") ? "allOf" : "$ref");
    // Merged with what says nothing but is not empty, so that it is taken apart.
    const Json merged = Here([&] { return MergeSchemas(schema, Json{{"$comment", ""}}, *this); });
    return AddValue(from, merged, to);
  }
  if (schema.contains("const") || schema.contains("enum")) return AddEnum(from, schema, to);
  for (const char* keyword : {"anyOf", "oneOf"}) {
    if (schema.contains(keyword)) return AddBranches(from, schema, keyword, to);
  }
  if (alone) return text_.AddAnyValue(from, to);
  std::set<std::string> types = Here([&] { return TypesOf(schema); });
  if (types.contains("number")) types.erase("integer");
  for (const std::string& type : types) AddType(from, schema, type, to);
}

void SchemaWriter::AddBranches(StateId from, const Json& schema, const char* keyword, StateId to) {
  Json others = schema;
  const Json branches = schema[keyword];
  others.erase(keyword);
  if (!branches.is_array() || branches.empty()) Fail(absl::StrCat(keyword, ": must be a list of schemas"));
  if (std::string_view(keyword) == "oneOf") {
    for (size_t i = 0; i < branches.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (Here([&] { return AreDisjoint(branches[i], branches[j], *this); })) continue;
        Fail(absl::StrCat("oneOf: ", j, " and ", i,
                          " may both be satisfied, as far as can be told here; use anyOf, or let them differ in type "
                          "or in the value of a required property"));
      }
    }
  }
  for (size_t i = 0; i < branches.size(); ++i) {
    const Step step(*this, absl::StrCat(keyword, "[", i, "]"));
    const bool merge = std::any_of(others.items().begin(), others.items().end(),
                                   [](const auto& member) { return KindOf(member.key()) != Keyword::kAnnotation; });
    AddValue(from, merge ? Here([&] { return MergeSchemas(others, branches[i], *this); }) : branches[i], to);
  }
}

// Whether a listed value fits the keywords beside the list.
bool SchemaWriter::Satisfies(const Json& schema, const Json& value) const {
  const std::string type = value.is_null()              ? "null"
                           : value.is_boolean()         ? "boolean"
                           : value.is_number_integer()  ? "integer"
                           : value.is_number()          ? "number"
                           : value.is_string()          ? "string"
                           : value.is_array()           ? "array"
                                                        : "object";
  for (const auto& [keyword, bound] : schema.items()) {
    if (keyword == "enum" || keyword == "const" || KindOf(keyword) == Keyword::kAnnotation) continue;
    bool fits = true;
    if (keyword == "type") {
      const std::set<std::string> types = TypesOf(schema);
      fits = types.contains(type) || (type == "integer" && types.contains("number"));
    } else if (keyword == "minLength" || keyword == "maxLength") {
      if (!value.is_string()) continue;
      const auto& text = value.get_ref<const std::string&>();
      const auto length = std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
      fits = keyword == "minLength" ? length >= Count(schema, "minLength", 0) : length <= Count(schema, "maxLength", 0);
    } else if (value.is_number() && bound.is_number() && (keyword.ends_with("imum"))) {
      const bool strict = keyword.starts_with("exclusive"), low = keyword.ends_with("inimum");
      fits = low ? (strict ? value > bound : value >= bound) : (strict ? value < bound : value <= bound);
    } else {
      Fail(absl::StrCat(keyword, ": is not offered beside enum or const; leave it out"));
    }
    if (!fits) return false;
  }
  return true;
}

void SchemaWriter::AddEnum(StateId from, const Json& schema, StateId to) {
  Json values = schema.contains("enum") ? schema["enum"] : Json::array({schema["const"]});
  if (!values.is_array()) Fail("enum: must be a list");
  if (values.size() > kMaxEnum) Fail(absl::StrCat("enum: has ", values.size(), " values, at most ", kMaxEnum, " are offered"));
  if (schema.contains("enum") && schema.contains("const")) {
    const bool listed = std::find(values.begin(), values.end(), schema["const"]) != values.end();
    values = listed ? Json::array({schema["const"]}) : Json::array();
  }
  for (const Json& value : values) {
    if (Satisfies(schema, value)) Here([&] { text_.AddLiteral(from, value, to); });
  }
}

void SchemaWriter::AddType(StateId from, const Json& schema, const std::string& type, StateId to) {
  if (type == "null") return nfa_.AddText(from, "null", to);
  if (type == "boolean") return nfa_.AddText(from, "true", to), nfa_.AddText(from, "false", to);
  if (type == "string") return AddString(from, schema, to);
  if (type == "array") return AddArray(from, schema, to);
  if (type == "object") return AddObject(from, schema, to);
  AddNumber(from, schema, type == "integer", to);
}

void SchemaWriter::AddString(StateId from, const Json& schema, StateId to) {
  const int min = Count(schema, "minLength", 0), max = Count(schema, "maxLength", -1);
  if (max >= 0 && max < min) Fail(absl::StrCat("minLength: is ", min, ", more than maxLength, which is ", max));
  const auto pattern = schema.find("pattern");
  std::string expression;
  if (const auto format = schema.find("format"); format != schema.end()) {
    if (!format->is_string()) Fail("format: must be a string");
    expression = FormatExpression(format->get_ref<const std::string&>());
    if (!expression.empty() && pattern != schema.end()) Fail("pattern: is not offered together with format");
  }
  if (pattern != schema.end()) {
    if (!pattern->is_string()) Fail("pattern: must be a string");
    expression = pattern->get<std::string>();
  }
  if (pattern == schema.end() && expression.empty()) return text_.AddString(from, min, max, to);
  if (min > 1 || max >= 0)
    Fail(absl::StrCat(pattern != schema.end() ? "pattern" : "format", ": is not offered together with a length; say it in the expression"));
  const Step step(*this, pattern != schema.end() ? "pattern" : "format");
  const StateId inside = nfa_.NewState(), end = nfa_.NewState();
  nfa_.AddByte(from, '"', '"', inside);
  Here([&] { AddRegex(nfa_, inside, *ParseRegex(expression), end, Spelling::kJsonString, RegexMatch::kSearch); });
  nfa_.AddByte(end, '"', '"', to);
}

void SchemaWriter::AddNumber(StateId from, const Json& schema, bool integer, StateId to) {
  std::optional<Bound> low, high;
  const auto read = [&](const char* keyword, bool inclusive, bool lower) {
    const auto found = schema.find(keyword);
    if (found == schema.end()) return;
    if (!found->is_number()) Fail(absl::StrCat(keyword, ": must be a number"));
    std::optional<Bound>& bound = lower ? low : high;
    const char* other = lower ? "minimum" : "maximum";
    // Of an inclusive and an exclusive one the tighter counts, of equal ones the exclusive.
    if (!inclusive && bound && (lower ? *found < schema[other] : *found > schema[other])) return;
    bound = Here([&] { return MakeBound(*found, inclusive); });
  };
  read("minimum", true, true);
  read("exclusiveMinimum", false, true);
  read("maximum", true, false);
  read("exclusiveMaximum", false, false);
  if (const auto multiple = schema.find("multipleOf"); multiple != schema.end()) {
    const double divisor = multiple->is_number() ? multiple->get<double>() : 0;
    if (!(divisor >= 1 && divisor <= kMaxDivisor) || divisor != static_cast<double>(static_cast<int>(divisor))) {
      Fail(absl::StrCat("multipleOf: is ", multiple->dump().substr(0, 60), ", whole numbers from 1 to ", kMaxDivisor, " are offered"));
    }
    if (divisor > 1 && (low || high)) Fail("multipleOf: is not offered together with bounds");
    if (divisor > 1) return AddMultiple(nfa_, from, static_cast<int>(divisor), to);
    integer = true;
  }
  if (low || high) return AddNumberBetween(nfa_, from, low, high, integer, to);
  integer ? text_.AddInteger(from, to) : text_.AddNumber(from, to);
}

void SchemaWriter::AddArray(StateId from, const Json& schema, StateId to) {
  int min = Count(schema, "minItems", 0), max = Count(schema, "maxItems", -1);
  if (max >= 0 && max < min) Fail(absl::StrCat("minItems: is ", min, ", more than maxItems, which is ", max));
  // Before 2020-12 a list of items was what prefixItems is, and additionalItems what items is.
  const bool old = schema.contains("items") && schema["items"].is_array();
  const Json prefix = old ? schema["items"] : schema.value("prefixItems", Json::array());
  const Json rest = old ? schema.value("additionalItems", Json(true)) : schema.value("items", Json(true));
  if (!prefix.is_array()) Fail("prefixItems: must be a list");
  if (schema.value("uniqueItems", Json(false)) != false && max != 0 && max != 1) Fail("uniqueItems: is not offered for more than one item");
  std::vector<JsonText::Part> first;
  for (size_t i = 0; i < prefix.size(); ++i) {
    first.push_back([this, &prefix, i](StateId a, StateId b) {
      const Step step(*this, absl::StrCat("prefixItems[", i, "]"), true);
      AddValue(a, prefix[i], b);
    });
  }
  // Items that are written more than once share a rule.
  std::optional<Rule> item;
  const JsonText::Part more = [&](StateId a, StateId b) {
    if (!item) {
      item = nfa_.NewRule();
      const Step step(*this, "items", true);
      AddValue(item->start, rest, item->end);
    }
    nfa_.AddCall(a, *item, b);
  };
  const bool closed = rest == false || (max >= 0 && max <= static_cast<int>(prefix.size()));
  if (closed && min > static_cast<int>(prefix.size()))
    Fail(absl::StrCat("minItems: is ", min, ", more than the ", prefix.size(), " items that there may be"));
  text_.AddList(from, '[', first, closed ? JsonText::Part() : more, min, max, ']', to);
}

void SchemaWriter::AddMember(StateId from, const std::string& name, const Json& schema, StateId to) {
  const Step step(*this, absl::StrCat("properties.", name), true);
  const StateId named = nfa_.NewState(), colon = nfa_.NewState();
  Here([&] { text_.AddLiteral(from, Json(name), named); });
  text_.AddColon(named, colon);
  AddValue(colon, schema, to);
}

// Members that are not declared; empty: there are none.
JsonText::Part SchemaWriter::OtherMembers(const Json& schema, const Json& properties) {
  const auto patterns = schema.find("patternProperties");
  const bool has_patterns = patterns != schema.end() && !patterns->empty();
  const Json additional = schema.value("additionalProperties", Json(properties.empty() && !has_patterns));
  if (has_patterns) {
    if (!patterns->is_object() || patterns->size() > 1) Fail("patternProperties: one pattern is offered");
    if (additional != false) Fail("patternProperties: is offered without additional properties only; set additionalProperties to false");
    if (!properties.empty()) Fail("patternProperties: is not offered beside properties");
  }
  if (!has_patterns && additional == false) return nullptr;
  std::vector<std::string> names;
  for (const auto& [name, ignored] : properties.items()) names.push_back(name);
  const Rule member = nfa_.NewRule();
  const StateId named = nfa_.NewState(), colon = nfa_.NewState();
  const Step step(*this, has_patterns ? "patternProperties" : "additionalProperties", true);
  if (has_patterns) {
    const StateId inside = nfa_.NewState(), end = nfa_.NewState();
    nfa_.AddByte(member.start, '"', '"', inside);
    const std::string& expression = patterns->begin().key();
    Here([&] { AddRegex(nfa_, inside, *ParseRegex(expression), end, Spelling::kJsonString, RegexMatch::kSearch); });
    nfa_.AddByte(end, '"', '"', named);
  } else {
    Here([&] { text_.AddOtherString(member.start, names, named); });
  }
  text_.AddColon(named, colon);
  AddValue(colon, has_patterns ? patterns->begin().value() : additional, member.end);
  return [this, member](StateId a, StateId b) { nfa_.AddCall(a, member, b); };
}

// Members in the order of their declaration. `must` is where one of those from here on has to come: an optional one is
// passed over on the way to the next such state, and the end can be reached behind a member only.
void SchemaWriter::AddObject(StateId from, const Json& schema, StateId to) {
  Json properties = schema.value("properties", Json::object());
  if (!properties.is_object()) Fail("properties: must be an object");
  const Json required = schema.value("required", Json::array());
  if (!required.is_array()) Fail("required: must be a list of names");
  Here([&] { CheckProduct(properties, required, "required"); });
  std::set<std::string> needed;
  for (const Json& name : required) {
    if (!name.is_string()) Fail("required: must be a list of names");
    needed.insert(name.get<std::string>());
    if (!properties.contains(name.get<std::string>()))
      properties[name.get<std::string>()] = schema.value("additionalProperties", Json(true));
  }
  const int min = Count(schema, "minProperties", 0), max = Count(schema, "maxProperties", -1);
  const JsonText::Part other = OtherMembers(schema, properties);
  if (properties.empty()) {
    if (!other && min > 0) Fail(absl::StrCat("minProperties: is ", min, ", but there are none"));
    return text_.AddList(from, '{', {}, other, min, max, '}', to);
  }
  const int most = other ? INT32_MAX : static_cast<int>(properties.size());
  if (min > static_cast<int>(needed.size())) Fail("minProperties: is offered up to the number of required properties");
  if (max >= 0 && max < most) Fail("maxProperties: is not offered beside properties");
  const StateId space = nfa_.NewState(), close = nfa_.NewState();
  nfa_.AddByte(close, '}', '}', to);
  nfa_.AddByte(from, '{', '{', space);
  StateId must = nfa_.NewState();
  text_.AddSpace(space, must);
  if (needed.empty()) nfa_.AddEmpty(must, close);
  size_t needed_left = needed.size();
  const auto follow = [&](StateId after, StateId next, bool more) {
    const StateId comma = nfa_.NewState();
    if (needed_left == 0) text_.AddSpace(after, close);
    if (!more) return;
    nfa_.AddByte(after, ',', ',', comma);
    text_.AddSpace(comma, next);
  };
  size_t left = properties.size();
  for (const auto& [name, member] : properties.items()) {
    const StateId after = nfa_.NewState(), next = nfa_.NewState();
    AddMember(must, name, member, after);
    if (needed.contains(name)) {
      --needed_left;
    } else {
      nfa_.AddEmpty(must, next);
    }
    follow(after, next, --left > 0 || other);
    must = next;
  }
  if (!other) return;
  const StateId after = nfa_.NewState();
  other(must, after);
  follow(after, must, true);
}

}  // namespace

void AddJsonSchema(JsonText& text, StateId from, const Json& schema, StateId to) { SchemaWriter(text, schema).Write(from, to); }

void AddJsonSchema(NfaBuilder& nfa, StateId from, std::string_view schema, StateId to) {
  const Json parsed = Json::parse(schema, nullptr, false);
  if (parsed.is_discarded()) throw Refusal("the schema is not valid JSON");
  JsonText text(nfa);
  AddJsonSchema(text, from, parsed, to);
}

void AddJsonObject(NfaBuilder& nfa, StateId from, StateId to) { JsonText(nfa).AddAnyObject(from, to); }

}  // namespace loupe::grammar
