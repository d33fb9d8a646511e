// Encoding and decoding of spherical codes (spherical.h), 16 vectors at a time, one lane each. Built once per instruction
// set from spherical_kernels.inc; all give the same bits. Plain structs only: files built for different instruction sets
// include this.
#pragma once

#include <cstdint>

#include "kernels/page_layout.h"

namespace loupe {

struct SphericalKernels {
  // x [D][16] becomes the turned vectors; codes [D][16] as pages keep them (s8: code + 128), scales [16] fp16. Returns the
  // lanes, a bit each, whose vector is not finite.
  uint32_t (*encode)(float* x, int dim, Codec codec, uint32_t* codes, uint16_t* scales);
  // The other way: codes to vectors as they were before the turn, without the mean.
  void (*decode)(const uint32_t* codes, const uint16_t* scales, int dim, Codec codec, float* x);
  // All codes of a block of 16 entries at once (coded_block.h).
  void (*put_key_block)(const uint32_t* codes, int dim, Codec codec, uint8_t* block);
  void (*put_value_block)(const uint32_t* codes, int dim, Codec codec, uint8_t* block);
  void (*get_key_block)(const uint8_t* block, int dim, Codec codec, uint32_t* codes);
  void (*get_value_block)(const uint8_t* block, int dim, Codec codec, uint32_t* codes);
};

extern const SphericalKernels kPortableSpherical;
extern const SphericalKernels kAvx2Spherical;    // as portable off x86
extern const SphericalKernels kAvx512Spherical;  // as portable off x86

}  // namespace loupe
