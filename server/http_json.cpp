#include "server/http_json.h"

#include <cmath>
#include <limits>
#include <unordered_set>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

// Builds the value while the library's parser calls; returning false stops it.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return Put(nullptr); }
  bool boolean(bool value) override { return Put(value); }
  bool number_integer(number_integer_t value) override { return Put(value); }
  bool number_unsigned(number_unsigned_t value) override { return Put(value); }
  bool number_float(number_float_t value, const string_t& text) override {
    if (!std::isfinite(value)) return Fail(absl::StrCat("the number ", text.substr(0, 40), " is too large"));
    return Put(value);
  }
  bool string(string_t& value) override { return Put(std::move(value)); }
  bool binary(binary_t&) override { return Fail("binary values are no JSON"); }

  bool start_object(size_t) override { return Open(Json::object()); }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& key) override {
    Level& level = levels_.back();
    if (!level.keys.insert(key).second)
      return Fail(absl::StrCat("the key \"", key.substr(0, 80), "\" stands twice in one object"));
    if (static_cast<int64_t>(level.keys.size()) > limits_.max_keys) {
      return Fail(absl::StrCat("an object has more than ", limits_.max_keys, " keys"));
    }
    key_ = std::move(key);
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    std::string what = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    const size_t end_of_tag = what.find("] ");
    if (end_of_tag != std::string::npos) what = what.substr(end_of_tag + 2);
    what = what.substr(0, what.find("; last read:"));  // what follows is the text itself
    error_ = absl::StrCat(what.substr(0, 300), " (byte ", position, ")");
    return false;
  }

  Json Take() { return std::move(root_); }
  const std::string& error() const { return error_; }

 private:
  struct Level {
    Json* value;
    std::unordered_set<std::string> keys;
  };

  bool Fail(std::string why) {
    error_ = std::move(why);
    return false;
  }

  Json* Place(Json value) {
    if (levels_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *levels_.back().value;
    if (parent.is_array()) {
      parent.get_ref<Json::array_t&>().push_back(std::move(value));
      return &parent.back();
    }
    // The map's own insertion searches for the key first, which is quadratic; duplicates are known already.
    auto& members = parent.get_ref<Json::object_t&>();
    members.emplace_back(std::move(key_), std::move(value));
    return &members.back().second;
  }

  bool Count() {
    return ++num_values_ <= limits_.max_values || Fail(absl::StrCat("more than ", limits_.max_values, " values"));
  }

  bool Put(Json value) {
    if (!Count()) return false;
    Place(std::move(value));
    return true;
  }

  bool Open(Json value) {
    if (!Count()) return false;
    if (static_cast<int>(levels_.size()) >= limits_.max_depth) {
      return Fail(absl::StrCat("nested deeper than ", limits_.max_depth, " levels"));
    }
    Json* placed = Place(std::move(value));
    levels_.push_back({placed, {}});
    return true;
  }

  bool Close() {
    levels_.pop_back();
    return true;
  }

  const JsonLimits& limits_;
  Json root_;
  std::vector<Level> levels_;
  std::string key_;
  std::string error_;
  int64_t num_values_ = 0;
};

absl::Status WrongType(const std::string& name, const char* wanted, const Json& json) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": must be ", wanted, ", got ", Describe(json)));
}

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text, const JsonLimits& limits) {
  Builder builder(limits);
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    return absl::InvalidArgumentError(absl::StrCat("the body is not valid JSON: ", builder.error()));
  }
  return builder.Take();
}

std::string DumpJson(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string Describe(const Json& json) {
  switch (json.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::string:
      return "a string";
    case Json::value_t::array:
      return absl::StrCat("a list of ", json.size());
    case Json::value_t::object:
      return absl::StrCat("an object of ", json.size(), " keys");
    default:
      return DumpJson(json);
  }
}

absl::Status ReadBool(const std::string& name, const Json& json, bool* out) {
  if (!json.is_boolean()) return WrongType(name, "true or false", json);
  *out = json.get<bool>();
  return absl::OkStatus();
}

absl::Status ReadInt64(const std::string& name, const Json& json, int64_t* out) {
  if (json.is_number_unsigned()) {
    const uint64_t value = json.get<uint64_t>();
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      return WrongType(name, "an integer of 64 bits", json);
    *out = static_cast<int64_t>(value);
    return absl::OkStatus();
  }
  if (json.is_number_integer()) {
    *out = json.get<int64_t>();
    return absl::OkStatus();
  }
  if (json.is_number_float()) {
    const double value = json.get<double>();
    // 2^53: beyond it a double does not tell neighbours apart.
    if (value == std::floor(value) && std::abs(value) <= 9007199254740992.0) {
      *out = static_cast<int64_t>(value);
      return absl::OkStatus();
    }
  }
  return WrongType(name, "an integer", json);
}

absl::Status ReadInt(const std::string& name, const Json& json, int* out) {
  int64_t value = 0;
  if (auto status = ReadInt64(name, json, &value); !status.ok()) return status;
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": is ", value, ", must fit 32 bits"));
  }
  *out = static_cast<int>(value);
  return absl::OkStatus();
}

absl::Status ReadFloat(const std::string& name, const Json& json, float* out) {
  if (!json.is_number()) return WrongType(name, "a number", json);
  *out = static_cast<float>(json.get<double>());
  return absl::OkStatus();
}

absl::Status ReadString(const std::string& name, const Json& json, std::string* out) {
  if (!json.is_string()) return WrongType(name, "a string", json);
  *out = json.get<std::string>();
  return absl::OkStatus();
}

absl::Status ReadInts(const std::string& name, const Json& json, std::vector<int32_t>* out) {
  if (!json.is_array()) return WrongType(name, "a list of integers", json);
  out->reserve(json.size());
  for (size_t i = 0; i < json.size(); ++i) {
    int value = 0;
    if (auto status = ReadInt(absl::StrCat(name, "[", i, "]"), json[i], &value); !status.ok()) return status;
    out->push_back(value);
  }
  return absl::OkStatus();
}

}  // namespace loupe
