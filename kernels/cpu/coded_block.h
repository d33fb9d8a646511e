// How the CPU orders the codes of a block of 16 entries, so that vectors unpack them by shifts alone. Words of 32 bits hold
// one byte for each of four neighbours along the reduced dimension, which is what a byte dot product takes:
//
//   keys    word (i, e): entry e, four dimensions a byte each; the fields of a byte are further groups of four dimensions
//           s8 [D / 4][16], s4 [D / 8][16], s2 [D / 16][16]
//   values  word (q, i, l): four entries 4q.. a byte each, of one dimension; the fields are dimensions 16 apart
//           s8 [4][D / 16][16], s4 [4][D / 32][16], s2 [4][D / 64][16]
//   s3      the two lower bits of its codes as s2, then the sign bits: keys [D / 32][16] words of eight groups of dimensions,
//           values [2][D / 64][16] words of two q, four groups of dimensions each
//
// s8 keeps code + 128. Plain static functions: files built for different instruction sets include this.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/page_layout.h"

namespace loupe {

// Where the field of one dimension of one entry lies: a byte of the block and a shift.
struct CodeField {
  int64_t byte;
  int shift;
};

// `bits` of a field: 8, 4, 2, or 1 for the sign bits of s3 (whose place counts from the end of the lower bits).
static inline CodeField KeyField(int bits, int entry, int d) {
  const int fields = 8 / bits, group = d / 4;
  return {int64_t{group / fields} * 64 + entry * 4 + d % 4, group % fields * bits};
}
static inline CodeField ValueField(int bits, int entry, int d, int dim) {
  const int quad = entry / 4, lane = d % 16, group = d / 16;
  if (bits == 1) return {int64_t{quad / 2} * dim + group / 4 * 64 + lane * 4 + entry % 4, quad % 2 * 4 + group % 4};
  const int fields = 8 / bits;
  return {int64_t{quad} * dim * 4 / fields + group / fields * 64 + lane * 4 + entry % 4, group % fields * bits};
}

static inline void PutField(uint8_t* block, CodeField at, int bits, uint32_t value) {
  const uint32_t mask = (1u << bits) - 1;
  block[at.byte] = static_cast<uint8_t>((block[at.byte] & ~(mask << at.shift)) | (value & mask) << at.shift);
}
static inline uint32_t GetField(const uint8_t* block, CodeField at, int bits) {
  return static_cast<uint32_t>(block[at.byte]) >> at.shift & ((1u << bits) - 1);
}

// The codes of one entry, `stride` apart, into its places of a block; and back.
static inline void PutCodes(Codec codec, bool key, uint8_t* block, int entry, int dim, const uint32_t* codes, int stride) {
  const int bits = codec == Codec::kS3 ? 2 : CodecBits(codec);
  for (int d = 0; d < dim; ++d) {
    PutField(block, key ? KeyField(bits, entry, d) : ValueField(bits, entry, d, dim), bits, codes[d * stride]);
  }
  if (codec != Codec::kS3) return;
  uint8_t* signs = block + 4 * dim;
  for (int d = 0; d < dim; ++d) {
    PutField(signs, key ? KeyField(1, entry, d) : ValueField(1, entry, d, dim), 1, codes[d * stride] >> 2);
  }
}
static inline void GetCodes(Codec codec, bool key, const uint8_t* block, int entry, int dim, uint32_t* codes, int stride) {
  const int bits = codec == Codec::kS3 ? 2 : CodecBits(codec);
  for (int d = 0; d < dim; ++d) {
    codes[d * stride] = GetField(block, key ? KeyField(bits, entry, d) : ValueField(bits, entry, d, dim), bits);
  }
  if (codec != Codec::kS3) return;
  const uint8_t* signs = block + 4 * dim;
  for (int d = 0; d < dim; ++d) {
    codes[d * stride] |= GetField(signs, key ? KeyField(1, entry, d) : ValueField(1, entry, d, dim), 1) << 2;
  }
}

}  // namespace loupe
