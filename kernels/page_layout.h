// The byte layout of KV pages, for every backend. A page holds up to 64 entries of one list in one format; the small
// page holds up to 16. Both are sequences of blocks of 16 entries, so that a small page grows by copying one block.
//
//   page  := key plane | value plane | scale plane | log-weight plane; planes 128-byte aligned
//   plane := blocks of 16 entries
//   dense key block   [D][16]  2-byte elements: the 16 entries are the lanes of a vector
//   dense value block [16][D]  2-byte elements: the head dimensions are the lanes
//   f32 blocks                 as dense, with 4-byte elements
//   coded blocks               8, 4, 3 or 2 bits a coordinate (spherical.h)
//   scale plane       [entries] fp16 of the keys, if they are coded, then [entries] of the values, if those are
//   log-weight plane  [entries] f32, natural logarithm; -inf removes the entry; only in classes that have one
//
// Sizes are common to all backends; the order of elements inside a block is the backend's own.
#pragma once

#include <cstdint>

namespace loupe {

inline constexpr int kPageEntries = 64;
inline constexpr int kSmallPageEntries = 16;
inline constexpr int kBlockEntries = 16;
inline constexpr int64_t kPageAlignment = 128;

// How one side (keys or values) of a page is coded. A further codec is a further row here and a reader per backend.
enum class Codec : uint8_t {
  kDense = 0,  // 2-byte floats: fp16 on the CPU
  kF32 = 1,    // f32, what the exact mode calls dense
  kS8 = 2,     // spherical codes (spherical.h) of 8, 4, 3, 2 bits a coordinate
  kS4 = 3,
  kS3 = 4,
  kS2 = 5,
};
inline constexpr int kNumCodecs = 6;

constexpr bool IsCoded(Codec codec) { return codec >= Codec::kS8; }
// Of one coordinate, scales apart.
constexpr int CodecBits(Codec codec) {
  constexpr int kBits[kNumCodecs] = {16, 32, 8, 4, 3, 2};
  return kBits[static_cast<int>(codec)];
}

struct PageFormat {
  Codec key = Codec::kDense;
  Codec value = Codec::kDense;
  bool operator==(const PageFormat&) const = default;
};

// What pages are carved as: pages of one class are interchangeable.
struct PageClass {
  PageFormat format;
  bool small = false;        // 16 entries in place of 64
  bool log_weights = false;  // has a log-weight plane
  bool operator==(const PageClass&) const = default;

  constexpr int entries() const { return small ? kSmallPageEntries : kPageEntries; }
};

// Bytes of one entry's key or value in its plane, and with its scale.
inline constexpr int64_t PlaneBytes(Codec codec, int head_dim) { return int64_t{CodecBits(codec)} * head_dim / 8; }
inline constexpr int64_t ScaleBytes(Codec codec) { return IsCoded(codec) ? 2 : 0; }
inline constexpr int64_t CodecBytes(Codec codec, int head_dim) { return PlaneBytes(codec, head_dim) + ScaleBytes(codec); }

struct PageLayout {
  int64_t value_offset = 0;        // the key plane starts at 0
  int64_t key_scale_offset = 0;    // meaningful if keys are coded
  int64_t value_scale_offset = 0;  // if values are
  int64_t log_weight_offset = 0;   // if the class has log-weights
  int64_t bytes = 0;
};

inline constexpr int64_t AlignPage(int64_t bytes) { return (bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment; }

inline constexpr PageLayout MakePageLayout(const PageClass& c, int head_dim) {
  PageLayout layout;
  layout.value_offset = AlignPage(c.entries() * PlaneBytes(c.format.key, head_dim));
  layout.key_scale_offset = layout.value_offset + AlignPage(c.entries() * PlaneBytes(c.format.value, head_dim));
  layout.value_scale_offset = layout.key_scale_offset + c.entries() * ScaleBytes(c.format.key);
  layout.log_weight_offset = AlignPage(layout.value_scale_offset + c.entries() * ScaleBytes(c.format.value));
  layout.bytes = layout.log_weight_offset + (c.log_weights ? AlignPage(int64_t{4} * c.entries()) : 0);
  return layout;
}

// How kernels see a page of a list. `unit` counts 128 bytes from the start of the arena: 512 GiB can be addressed.
struct PageRef {
  uint32_t unit = 0;
  uint16_t count = 0;  // entries in use
  uint8_t key_codec : 4 = 0;
  uint8_t value_codec : 4 = 0;
  uint8_t small : 1 = 0;
  uint8_t log_weights : 1 = 0;

  PageClass page_class() const {
    return {{static_cast<Codec>(key_codec), static_cast<Codec>(value_codec)}, small != 0, log_weights != 0};
  }
};
static_assert(sizeof(PageRef) == 8);

inline PageRef MakePageRef(uint32_t unit, int count, const PageClass& c) {
  PageRef ref;
  ref.unit = unit;
  ref.count = static_cast<uint16_t>(count);
  ref.key_codec = static_cast<uint8_t>(c.format.key) & 15;
  ref.value_codec = static_cast<uint8_t>(c.format.value) & 15;
  ref.small = c.small;
  ref.log_weights = c.log_weights;
  return ref;
}

}  // namespace loupe
