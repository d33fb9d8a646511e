// Typed access to GGUF metadata, and how names of a file are shown in messages.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/load/gguf.h"

namespace loupe {
namespace {

template <class T>
T Load(const char* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}

const char* TypeName(GgufType type) {
  static constexpr const char* kNames[] = {"uint8", "int8",   "uint16", "int16",  "uint32", "int32",  "float32",
                                           "bool",  "string", "array",  "uint64", "int64",  "float64"};
  return kNames[static_cast<uint32_t>(type)];
}

absl::Status Invalid(const std::string& text) { return absl::InvalidArgumentError(text); }

absl::Status Missing(std::string_view key) { return Invalid(absl::StrCat("key ", QuoteName(key), " is missing")); }

absl::Status WrongType(std::string_view key, const GgufValue& value, const char* wanted) {
  const bool array = value.type == GgufType::kArray;
  return Invalid(absl::StrCat("key ", QuoteName(key), " is ", array ? "an array of " : "a ",
                              TypeName(array ? value.element : value.type), "; wanted is ", wanted));
}

// False if the type is no integer, or the value is above INT64_MAX.
bool DecodeInt(GgufType type, const char* data, int64_t* out) {
  switch (type) {
    case GgufType::kU8:
      *out = Load<uint8_t>(data);
      return true;
    case GgufType::kI8:
      *out = Load<int8_t>(data);
      return true;
    case GgufType::kU16:
      *out = Load<uint16_t>(data);
      return true;
    case GgufType::kI16:
      *out = Load<int16_t>(data);
      return true;
    case GgufType::kU32:
      *out = Load<uint32_t>(data);
      return true;
    case GgufType::kI32:
      *out = Load<int32_t>(data);
      return true;
    case GgufType::kI64:
      *out = Load<int64_t>(data);
      return true;
    case GgufType::kU64:
      *out = static_cast<int64_t>(Load<uint64_t>(data));
      return *out >= 0;
    default:
      return false;
  }
}

}  // namespace

int GgufFixedBytes(GgufType type) {
  switch (type) {
    case GgufType::kU8:
    case GgufType::kI8:
    case GgufType::kBool:
      return 1;
    case GgufType::kU16:
    case GgufType::kI16:
      return 2;
    case GgufType::kU32:
    case GgufType::kI32:
    case GgufType::kF32:
      return 4;
    case GgufType::kU64:
    case GgufType::kI64:
    case GgufType::kF64:
      return 8;
    case GgufType::kString:
    case GgufType::kArray:
      break;
  }
  return 0;
}

const GgufTensor* Gguf::FindTensor(std::string_view name) const {
  const auto it = tensor_index_.find(name);
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

const GgufValue* Gguf::Find(std::string_view key) const {
  const auto it = metadata_.find(key);
  return it == metadata_.end() ? nullptr : &it->second;
}

absl::StatusOr<int64_t> Gguf::Int(std::string_view key, int64_t min, int64_t max) const {
  const GgufValue* value = Find(key);
  if (!value) return Missing(key);
  int64_t number = 0;
  if (!DecodeInt(value->type, value->raw.data(), &number)) return WrongType(key, *value, "an integer");
  if (number < min || number > max) {
    return Invalid(absl::StrCat("key ", QuoteName(key), " is ", number, "; allowed are ", min, " to ", max));
  }
  return number;
}

absl::StatusOr<int64_t> Gguf::IntOr(std::string_view key, int64_t missing, int64_t min, int64_t max) const {
  return Find(key) ? Int(key, min, max) : absl::StatusOr<int64_t>(missing);
}

absl::StatusOr<double> Gguf::Number(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (!value) return Missing(key);
  double number = 0;
  int64_t integer = 0;
  if (value->type == GgufType::kF32) {
    number = static_cast<double>(Load<float>(value->raw.data()));
  } else if (value->type == GgufType::kF64) {
    number = Load<double>(value->raw.data());
  } else if (DecodeInt(value->type, value->raw.data(), &integer)) {
    number = static_cast<double>(integer);
  } else {
    return WrongType(key, *value, "a number");
  }
  if (!std::isfinite(number)) return Invalid(absl::StrCat("key ", QuoteName(key), " is not a finite number"));
  return number;
}

absl::StatusOr<double> Gguf::NumberOr(std::string_view key, double missing) const {
  return Find(key) ? Number(key) : absl::StatusOr<double>(missing);
}

absl::StatusOr<bool> Gguf::BoolOr(std::string_view key, bool missing) const {
  const GgufValue* value = Find(key);
  if (!value) return missing;
  if (value->type != GgufType::kBool) return WrongType(key, *value, "a bool");
  return value->raw[0] != 0;
}

absl::StatusOr<std::string> Gguf::String(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (!value) return Missing(key);
  if (value->type != GgufType::kString) return WrongType(key, *value, "a string");
  return std::string(value->raw);
}

absl::StatusOr<std::string> Gguf::StringOr(std::string_view key, std::string_view missing) const {
  return Find(key) ? String(key) : absl::StatusOr<std::string>(std::string(missing));
}

absl::StatusOr<std::vector<std::string>> Gguf::Strings(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (!value) return Missing(key);
  if (value->type != GgufType::kArray || value->element != GgufType::kString)
    return WrongType(key, *value, "an array of strings");
  std::vector<std::string> out;
  out.reserve(value->count);
  size_t position = 0;
  for (uint64_t i = 0; i < value->count; ++i) {
    const uint64_t length = Load<uint64_t>(value->raw.data() + position);
    out.emplace_back(value->raw.substr(position + 8, length));
    position += 8 + length;
  }
  return out;
}

absl::StatusOr<std::vector<int64_t>> Gguf::Ints(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (!value) return Missing(key);
  if (value->type != GgufType::kArray || value->element == GgufType::kString)
    return WrongType(key, *value, "an array of integers");
  std::vector<int64_t> out(value->count);
  const size_t step = static_cast<size_t>(GgufFixedBytes(value->element));
  for (uint64_t i = 0; i < value->count; ++i) {
    if (!DecodeInt(value->element, value->raw.data() + i * step, &out[i]))
      return WrongType(key, *value, "an array of integers");
  }
  return out;
}

std::string QuoteName(std::string_view name) {
  constexpr size_t kShownBytes = 80;
  size_t length = std::min(name.size(), kShownBytes);
  while (length > 0 && length < name.size() && (static_cast<unsigned char>(name[length]) & 0xc0) == 0x80) --length;
  const std::string cut(name.substr(0, length));
  const std::string escaped = IsUtf8(cut) ? absl::Utf8SafeCEscape(cut) : absl::CHexEscape(cut);
  return absl::StrCat("'", escaped, length < name.size() ? "…'" : "'");
}

bool IsUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if ((lead >= 0x80 && lead < 0xc2) || lead > 0xf4 || i + length > text.size()) return false;
    uint32_t code = length == 1 ? lead : lead & (0x7fu >> length);
    for (size_t j = 1; j < length; ++j) {
      const auto byte = static_cast<unsigned char>(text[i + j]);
      if ((byte & 0xc0) != 0x80) return false;
      code = code << 6 | (byte & 0x3f);
    }
    const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
    if (overlong || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return false;
    i += length;
  }
  return true;
}

}  // namespace loupe
