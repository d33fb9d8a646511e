#include "engine/load/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF values are read in place");

// Real files have below 100 keys and 2,000 tensors; the limits only bound what a hostile file can make us keep.
constexpr uint64_t kMaxKeys = 65536;
constexpr uint64_t kMaxTensors = 65536;
constexpr uint64_t kMaxKeyBytes = 65535;
constexpr uint64_t kMaxTensorNameBytes = 255;
constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kMaxAlignment = 1 << 20;

constexpr GgufTensorType kTensorTypes[] = {
    {0, "F32", 1, 4},         {1, "F16", 1, 2},        {2, "Q4_0", 32, 18},      {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},     {8, "Q8_0", 32, 34},      {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},  {13, "Q5_K", 256, 176},   {14, "Q6_K", 256, 210},
    {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74}, {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110}, {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136},
    {24, "I8", 1, 1},         {25, "I16", 1, 2},       {26, "I32", 1, 4},        {27, "I64", 1, 8},
    {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},  {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},
};

template <class T>
T Load(const char* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}

absl::Status Invalid(const std::string& text) { return absl::InvalidArgumentError(text); }

// Reads forward through the header; a read past the end changes nothing and says so.
struct Cursor {
  std::string_view bytes;
  size_t position = 0;

  size_t left() const { return bytes.size() - position; }

  absl::Status Truncated(const std::string& what, uint64_t wanted) const {
    return Invalid(absl::StrCat("file ends inside ", what, ": ", wanted, " bytes wanted at offset ", position, ", ",
                                left(), " left; the file is truncated or not a GGUF file"));
  }
  template <class T>
  absl::Status Read(const std::string& what, T* out) {
    if (left() < sizeof(T)) return Truncated(what, sizeof(T));
    *out = Load<T>(bytes.data() + position);
    position += sizeof(T);
    return absl::OkStatus();
  }
  absl::Status Take(const std::string& what, uint64_t count, std::string_view* out) {
    if (left() < count) return Truncated(what, count);
    *out = bytes.substr(position, count);
    position += count;
    return absl::OkStatus();
  }
  absl::Status ReadString(const std::string& what, uint64_t max_bytes, std::string_view* out) {
    uint64_t length = 0;
    if (absl::Status s = Read(what, &length); !s.ok()) return s;
    if (length > max_bytes) {
      return Invalid(absl::StrCat(what, " is ", length, " bytes long; at most ", max_bytes, " are allowed"));
    }
    return Take(what, length, out);
  }
};

// Control characters would make error messages and logs lie.
bool IsPlainName(std::string_view name) {
  return !name.empty() && IsUtf8(name) && std::none_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
  });
}

absl::Status ReadArray(Cursor& cursor, const std::string& what, GgufValue* value) {
  uint32_t element = 0;
  if (absl::Status s = cursor.Read(what, &element); !s.ok()) return s;
  if (absl::Status s = cursor.Read(what, &value->count); !s.ok()) return s;
  if (element > static_cast<uint32_t>(GgufType::kF64)) {
    return Invalid(absl::StrCat(what, " is an array of type ", element, "; known are 0 to 12"));
  }
  value->element = static_cast<GgufType>(element);
  if (value->element == GgufType::kArray)
    return Invalid(absl::StrCat(what, " is an array of arrays, which is not supported"));
  const bool strings = value->element == GgufType::kString;
  // A string takes 8 bytes at least, so a count that cannot be true is refused before anything is read.
  const uint64_t element_bytes = strings ? 8 : static_cast<uint64_t>(GgufFixedBytes(value->element));
  if (value->count > cursor.left() / element_bytes) {
    return Invalid(absl::StrCat(what, " claims ", value->count, " elements of ", element_bytes, " bytes or more; ",
                                cursor.left(), " bytes are left in the file"));
  }
  if (!strings) return cursor.Take(what, value->count * element_bytes, &value->raw);
  const size_t begin = cursor.position;
  std::string_view text;
  for (uint64_t i = 0; i < value->count; ++i) {
    if (absl::Status s = cursor.ReadString(what, cursor.bytes.size(), &text); !s.ok()) {
      return Invalid(absl::StrCat("element ", i, " of ", value->count, ": ", std::string(s.message())));
    }
  }
  value->raw = cursor.bytes.substr(begin, cursor.position - begin);
  return absl::OkStatus();
}

absl::Status ReadValue(Cursor& cursor, const std::string& what, GgufValue* value) {
  uint32_t type = 0;
  if (absl::Status s = cursor.Read(what, &type); !s.ok()) return s;
  if (type > static_cast<uint32_t>(GgufType::kF64)) {
    return Invalid(absl::StrCat(what, " has type ", type, "; known are 0 to 12"));
  }
  value->type = static_cast<GgufType>(type);
  if (value->type == GgufType::kArray) return ReadArray(cursor, what, value);
  if (value->type == GgufType::kString) return cursor.ReadString(what, cursor.bytes.size(), &value->raw);
  return cursor.Take(what, static_cast<uint64_t>(GgufFixedBytes(value->type)), &value->raw);
}

// The bytes of a tensor follow from its shape and type; every product is checked before it is made.
absl::Status SizeTensor(int64_t file_bytes, GgufTensor* tensor) {
  const std::string what = absl::StrCat("tensor ", QuoteName(tensor->name));
  int64_t elements = 1;
  for (int i = 0; i < tensor->rank; ++i) {
    const int64_t extent = tensor->shape[static_cast<size_t>(i)];
    if (extent <= 0 || extent > std::numeric_limits<int64_t>::max() / 8 / elements) {
      return Invalid(absl::StrCat(what, ": dimension ", i, " of ", tensor->rank, " is ", static_cast<uint64_t>(extent),
                                  ", which is zero or too large"));
    }
    elements *= extent;
  }
  if (tensor->shape[0] % tensor->type->block_elements != 0) {
    return Invalid(absl::StrCat(what, ": rows of ", tensor->shape[0], " elements are no multiple of the ",
                                tensor->type->block_elements, "-element blocks of type ", tensor->type->name));
  }
  tensor->elements = elements;
  const int64_t blocks = elements / tensor->type->block_elements;
  // No tensor is larger than the file, which also keeps the product below from overflowing.
  if (blocks > file_bytes / tensor->type->block_bytes) {
    return Invalid(absl::StrCat(what, ": ", elements, " elements of type ", tensor->type->name,
                                " do not fit into a file of ", file_bytes, " bytes"));
  }
  tensor->bytes = blocks * tensor->type->block_bytes;
  return absl::OkStatus();
}

absl::Status ReadTensor(Cursor& cursor, uint64_t index, GgufTensor* tensor) {
  const std::string entry = absl::StrCat("the name of tensor ", index);
  std::string_view name;
  if (absl::Status s = cursor.ReadString(entry, kMaxTensorNameBytes, &name); !s.ok()) return s;
  if (!IsPlainName(name))
    return Invalid(absl::StrCat(entry, ", ", QuoteName(name), ", is empty or no plain UTF-8 text"));
  tensor->name = std::string(name);
  const std::string what = absl::StrCat("tensor ", QuoteName(name));
  uint32_t rank = 0, type = 0;
  if (absl::Status s = cursor.Read(what, &rank); !s.ok()) return s;
  if (rank < 1 || rank > tensor->shape.size())
    return Invalid(absl::StrCat(what, " has ", rank, " dimensions; 1 to 4 are allowed"));
  tensor->rank = static_cast<int>(rank);
  for (uint32_t i = 0; i < rank; ++i) {
    if (absl::Status s = cursor.Read(what, &tensor->shape[i]); !s.ok()) return s;
  }
  if (absl::Status s = cursor.Read(what, &type); !s.ok()) return s;
  const auto* found =
      std::find_if(std::begin(kTensorTypes), std::end(kTensorTypes), [&](const auto& t) { return t.id == type; });
  if (found == std::end(kTensorTypes))
    return Invalid(absl::StrCat(what, " has type number ", type, ", which is unknown"));
  tensor->type = found;
  if (absl::Status s = cursor.Read(what, &tensor->offset); !s.ok()) return s;
  return SizeTensor(static_cast<int64_t>(cursor.bytes.size()), tensor);
}

// Turns offsets into positions in the file and checks that every tensor lies inside it, alone.
absl::Status PlaceTensors(int64_t data_begin, int64_t file_bytes, int64_t alignment, std::vector<GgufTensor>* tensors) {
  for (GgufTensor& t : *tensors) {
    const std::string what = absl::StrCat("tensor ", QuoteName(t.name));
    const uint64_t relative = static_cast<uint64_t>(t.offset);
    if (relative % static_cast<uint64_t>(alignment) != 0) {
      return Invalid(absl::StrCat(what, ": offset ", relative, " is no multiple of the alignment ", alignment));
    }
    const int64_t room = file_bytes - data_begin;
    if (room < t.bytes || relative > static_cast<uint64_t>(room - t.bytes)) {
      return Invalid(absl::StrCat(what, ": ", t.bytes, " bytes at offset ", relative, " end beyond the ",
                                  std::max<int64_t>(room, 0),
                                  " bytes of tensor data in the file; it is truncated or corrupt"));
    }
    t.offset += data_begin;
  }
  std::vector<const GgufTensor*> order;
  for (const GgufTensor& t : *tensors) order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i - 1]->offset + order[i - 1]->bytes > order[i]->offset) {
      return Invalid(absl::StrCat("tensors ", QuoteName(order[i - 1]->name), " and ", QuoteName(order[i]->name),
                                  " overlap at offset ", order[i]->offset, " of the file"));
    }
  }
  return absl::OkStatus();
}

struct Header {
  uint32_t version = 0;
  uint64_t num_tensors = 0, num_keys = 0;
};

absl::Status ReadHeader(Cursor& cursor, Header* header) {
  std::string_view magic;
  if (absl::Status s = cursor.Take("the magic number", 4, &magic); !s.ok()) return s;
  if (magic != "GGUF")
    return Invalid(absl::StrCat("not a GGUF file: it begins with ", QuoteName(magic), " in place of 'GGUF'"));
  if (absl::Status s = cursor.Read("the version", &header->version); !s.ok()) return s;
  if ((header->version & 0xffff) == 0 && header->version != 0) {
    return Invalid("GGUF file of a big-endian machine; convert it to little-endian");
  }
  if (header->version != 2 && header->version != 3) {
    return Invalid(absl::StrCat("GGUF version ", header->version, "; supported are 2 and 3"));
  }
  if (absl::Status s = cursor.Read("the tensor count", &header->num_tensors); !s.ok()) return s;
  if (absl::Status s = cursor.Read("the key count", &header->num_keys); !s.ok()) return s;
  if (header->num_tensors > kMaxTensors || header->num_keys > kMaxKeys) {
    return Invalid(absl::StrCat("the header claims ", header->num_tensors, " tensors and ", header->num_keys,
                                " keys; at most ", kMaxTensors, " and ", kMaxKeys, " are allowed"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Gguf> Gguf::Parse(std::string_view bytes) {
  Gguf gguf;
  Cursor cursor{bytes};
  Header header;
  if (absl::Status s = ReadHeader(cursor, &header); !s.ok()) return s;
  gguf.version_ = header.version;
  for (uint64_t i = 0; i < header.num_keys; ++i) {
    std::string_view key;
    const std::string entry = absl::StrCat("key ", i, " of ", header.num_keys);
    if (absl::Status s = cursor.ReadString(entry, kMaxKeyBytes, &key); !s.ok()) return s;
    if (!IsPlainName(key))
      return Invalid(absl::StrCat(entry, ", ", QuoteName(key), ", is empty or no plain UTF-8 text"));
    GgufValue value;
    if (absl::Status s = ReadValue(cursor, absl::StrCat("key ", QuoteName(key)), &value); !s.ok()) return s;
    if (!gguf.metadata_.emplace(std::string(key), value).second)
      return Invalid(absl::StrCat("key ", QuoteName(key), " occurs twice"));
  }
  absl::StatusOr<int64_t> alignment = gguf.IntOr("general.alignment", kDefaultAlignment, 1, kMaxAlignment);
  if (!alignment.ok()) return alignment.status();
  if (*alignment % 8 != 0 || !std::has_single_bit(static_cast<uint64_t>(*alignment))) {
    return Invalid(absl::StrCat("key 'general.alignment' is ", *alignment, "; it must be a power of two, 8 or more"));
  }
  for (uint64_t i = 0; i < header.num_tensors; ++i) {
    GgufTensor tensor;
    if (absl::Status s = ReadTensor(cursor, i, &tensor); !s.ok()) return s;
    if (!gguf.tensor_index_.emplace(tensor.name, gguf.tensors_.size()).second) {
      return Invalid(absl::StrCat("tensor ", QuoteName(tensor.name), " occurs twice"));
    }
    gguf.tensors_.push_back(std::move(tensor));
  }
  const int64_t header_end = static_cast<int64_t>(cursor.position);
  const int64_t data_begin = (header_end + *alignment - 1) / *alignment * *alignment;
  if (absl::Status s = PlaceTensors(data_begin, static_cast<int64_t>(bytes.size()), *alignment, &gguf.tensors_);
      !s.ok())
    return s;
  return gguf;
}

}  // namespace loupe
