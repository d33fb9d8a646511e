#include "kvcache/page_format.h"

#include <charconv>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

int BitsOf(Codec codec) { return IsCoded(codec) ? CodecBits(codec) : 16; }

std::optional<Codec> SideOf(std::string_view digits, Codec dense) {
  int bits = 0;
  const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), bits);
  if (read.ec != std::errc() || read.ptr != digits.data() + digits.size()) return std::nullopt;
  return bits == 16 ? dense : CodecOfBits(bits);
}

}  // namespace

std::string FormatName(const PageFormat& format) {
  if (!IsCoded(format)) return "dense";
  const int key = BitsOf(format.key), value = BitsOf(format.value);
  return key == value ? absl::StrCat("s", key) : absl::StrCat("s", key, "v", value);
}

std::optional<PageFormat> FormatByName(std::string_view name, const PageFormat& dense) {
  if (name == "dense") return dense;
  if (name.empty() || name[0] != 's') return std::nullopt;
  const size_t split = name.find('v');
  const auto key = SideOf(name.substr(1, split == name.npos ? split : split - 1), dense.key);
  const auto value = split == name.npos ? key : SideOf(name.substr(split + 1), dense.value);
  if (!key || !value) return std::nullopt;
  const PageFormat format{*key, *value};
  return FormatName(format) == name ? std::optional(format) : std::nullopt;
}

std::optional<Codec> CodecOfBits(int bits) {
  switch (bits) {
    case 8: return Codec::kS8;
    case 4: return Codec::kS4;
    case 3: return Codec::kS3;
    case 2: return Codec::kS2;
    default: return std::nullopt;
  }
}

}  // namespace loupe
