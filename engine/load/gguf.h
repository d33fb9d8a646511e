// The GGUF container, versions 2 and 3: metadata and the table of tensors, as views into the bytes of the file. Parse
// trusts nothing: every length, count, offset and product is checked against the file's size before it is used, so that
// what it returns can be read without further checks. Immutable afterwards; any thread may read it. The bytes must
// outlive it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace loupe {

enum class GgufType : uint32_t { kU8 = 0, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };

// Bytes of one value; 0 for strings and arrays, whose size the file says.
int GgufFixedBytes(GgufType type);

struct GgufValue {
  GgufType type = GgufType::kU8;
  GgufType element = GgufType::kU8;  // of an array
  uint64_t count = 1;                // elements of an array
  std::string_view raw;              // a string's bytes, otherwise the encoded value or values
};

// How a tensor's elements are packed: `block_elements` of a row take `block_bytes`.
struct GgufTensorType {
  uint32_t id;
  const char* name;
  int block_elements;
  int block_bytes;
};

struct GgufTensor {
  std::string name;
  const GgufTensorType* type = nullptr;
  int rank = 0;
  std::array<int64_t, 4> shape = {1, 1, 1, 1};  // innermost first: [cols, rows, ...]
  int64_t offset = 0;                           // from the start of the file
  int64_t bytes = 0;
  int64_t elements = 0;
};

class Gguf {
 public:
  // INVALID_ARGUMENT names the key or tensor, with the numbers.
  static absl::StatusOr<Gguf> Parse(std::string_view bytes);

  uint32_t version() const { return version_; }
  const std::map<std::string, GgufValue, std::less<>>& metadata() const { return metadata_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* FindTensor(std::string_view name) const;
  const GgufValue* Find(std::string_view key) const;

  // Typed access; INVALID_ARGUMENT names a key that is missing, of another type or out of range. The forms with a
  // default return it only if the key is missing.
  absl::StatusOr<int64_t> Int(std::string_view key, int64_t min, int64_t max) const;
  absl::StatusOr<int64_t> IntOr(std::string_view key, int64_t missing, int64_t min, int64_t max) const;
  absl::StatusOr<double> Number(std::string_view key) const;
  absl::StatusOr<double> NumberOr(std::string_view key, double missing) const;
  absl::StatusOr<bool> BoolOr(std::string_view key, bool missing) const;
  absl::StatusOr<std::string> String(std::string_view key) const;
  absl::StatusOr<std::string> StringOr(std::string_view key, std::string_view missing) const;
  absl::StatusOr<std::vector<std::string>> Strings(std::string_view key) const;
  absl::StatusOr<std::vector<int64_t>> Ints(std::string_view key) const;

 private:
  uint32_t version_ = 0;
  std::map<std::string, GgufValue, std::less<>> metadata_;
  std::vector<GgufTensor> tensors_;  // in the order of the file
  std::map<std::string, size_t, std::less<>> tensor_index_;
};

// A name from a file, fit for an error message: quoted, escaped, cut at 80 bytes.
std::string QuoteName(std::string_view name);
bool IsUtf8(std::string_view text);

}  // namespace loupe
