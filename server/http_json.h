// Reads JSON that strangers sent. Stricter than the library alone: nesting, keys of an object and values in all are
// limited, an object may not name a key twice, strings must be UTF-8, NaN and Infinity do not exist. Pure, any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace loupe {

struct JsonLimits {
  int max_depth = 64;
  int64_t max_keys = 16'384;       // of one object
  int64_t max_values = 4'000'000;  // in all: bounds memory at a few times the text
};

// INVALID_ARGUMENT says what is wrong and at which byte.
absl::StatusOr<nlohmann::ordered_json> ParseJson(std::string_view text, const JsonLimits& limits = {});

// Any bytes to text that is safe to send: what is not UTF-8 becomes U+FFFD.
std::string DumpJson(const nlohmann::ordered_json& json);

// ---- typed fields; INVALID_ARGUMENT is "<name>: must be ..., got ..."
absl::Status ReadBool(const std::string& name, const nlohmann::ordered_json& json, bool* out);
// A float without fraction counts as an integer.
absl::Status ReadInt(const std::string& name, const nlohmann::ordered_json& json, int* out);
absl::Status ReadInt64(const std::string& name, const nlohmann::ordered_json& json, int64_t* out);
absl::Status ReadFloat(const std::string& name, const nlohmann::ordered_json& json, float* out);
absl::Status ReadString(const std::string& name, const nlohmann::ordered_json& json, std::string* out);
absl::Status ReadInts(const std::string& name, const nlohmann::ordered_json& json, std::vector<int32_t>* out);

// "a string", "an object with 3 keys", "1.5": for messages.
std::string Describe(const nlohmann::ordered_json& json);

}  // namespace loupe
