// Names of page formats: dense (the model's own type), s8, s4, s3, s2, and s4v2 and the like when key and value differ (16
// stands for dense there). Pure functions, any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "kernels/page_layout.h"

namespace loupe {

std::string FormatName(const PageFormat& format);
// Nothing for what is no name. `dense` is how dense entries are coded here.
std::optional<PageFormat> FormatByName(std::string_view name, const PageFormat& dense);

// 8, 4, 3, 2 bits; nothing for others.
std::optional<Codec> CodecOfBits(int bits);

inline bool IsCoded(const PageFormat& format) { return IsCoded(format.key) || IsCoded(format.value); }
// Key and value of one entry, scales included.
inline int64_t EntryBytes(const PageFormat& format, int head_dim) {
  return CodecBytes(format.key, head_dim) + CodecBytes(format.value, head_dim);
}

}  // namespace loupe
