// Writes GGUF files in memory for tests: right ones, and wrong ones through the overrides. The opposite of the parser,
// written from the format's description and sharing no code with it.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace loupe::testing {

template <class T>
std::string Bytes(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(T));
}

inline std::string LengthAndText(const std::string& text) { return Bytes<uint64_t>(text.size()) + text; }

class GgufWriter {
 public:
  struct TensorEntry {
    std::string name;
    std::vector<int64_t> shape;  // innermost first
    uint32_t type = 0;
    std::string data;
    std::optional<uint64_t> offset;  // in place of the right one
  };

  uint32_t version = 3;
  int64_t alignment = 32;
  std::optional<uint64_t> num_keys, num_tensors;          // in place of the right ones
  std::vector<std::pair<std::string, std::string>> keys;  // name, encoded type and value
  std::vector<TensorEntry> tensors;

  // `value` is encoded already.
  void Raw(const std::string& key, uint32_t type, const std::string& value) {
    keys.emplace_back(key, Bytes(type) + value);
  }
  void U32(const std::string& key, uint32_t value) { Raw(key, 4, Bytes(value)); }
  void I32(const std::string& key, int32_t value) { Raw(key, 5, Bytes(value)); }
  void F32(const std::string& key, float value) { Raw(key, 6, Bytes(value)); }
  void Bool(const std::string& key, bool value) { Raw(key, 7, Bytes<uint8_t>(value ? 1 : 0)); }
  void String(const std::string& key, const std::string& value) { Raw(key, 8, LengthAndText(value)); }
  void Strings(const std::string& key, const std::vector<std::string>& values) {
    std::string body = Bytes<uint32_t>(8) + Bytes<uint64_t>(values.size());
    for (const std::string& v : values) body += LengthAndText(v);
    Raw(key, 9, body);
  }
  void Ints(const std::string& key, const std::vector<int32_t>& values) {
    std::string body = Bytes<uint32_t>(5) + Bytes<uint64_t>(values.size());
    for (int32_t v : values) body += Bytes(v);
    Raw(key, 9, body);
  }
  void Tensor(const std::string& name, std::vector<int64_t> shape, uint32_t type, std::string data) {
    tensors.push_back({name, std::move(shape), type, std::move(data), std::nullopt});
  }
  // The entry of a tensor that was added; null if there is none.
  TensorEntry* Find(const std::string& name) {
    for (TensorEntry& t : tensors) {
      if (t.name == name) return &t;
    }
    return nullptr;
  }
  void Remove(const std::string& key) {
    std::erase_if(keys, [&](const auto& k) { return k.first == key; });
  }
  void RemoveTensor(const std::string& name) {
    std::erase_if(tensors, [&](const auto& t) { return t.name == name; });
  }

  std::string Build() const {
    std::string out = "GGUF" + Bytes(version) + Bytes<uint64_t>(num_tensors.value_or(tensors.size())) +
                      Bytes<uint64_t>(num_keys.value_or(keys.size()));
    for (const auto& [name, body] : keys) out += LengthAndText(name) + body;
    uint64_t offset = 0;
    for (const TensorEntry& t : tensors) {
      out += LengthAndText(t.name) + Bytes<uint32_t>(static_cast<uint32_t>(t.shape.size()));
      for (int64_t extent : t.shape) out += Bytes(extent);
      out += Bytes(t.type) + Bytes<uint64_t>(t.offset.value_or(offset));
      offset += Padded(t.data.size());
    }
    out.resize(Padded(out.size()));
    for (const TensorEntry& t : tensors) {
      out += t.data;
      out.resize(out.size() + Padded(t.data.size()) - t.data.size());
    }
    return out;
  }

 private:
  size_t Padded(size_t size) const {
    const size_t a = static_cast<size_t>(alignment);
    return (size + a - 1) / a * a;
  }
};

}  // namespace loupe::testing
