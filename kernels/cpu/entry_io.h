// One entry's key or value inside a page, whatever its codec: where it lies, copies byte by byte, reading and writing as
// f32. For ops that move entries; attention has readers of its own. Any thread; two threads must not write to the same
// block of 16 entries, since codes of neighbours share bytes.
#pragma once

#include <cstdint>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/spherical_kernels.h"
#include "kernels/page_layout.h"

namespace loupe {

struct EntrySide {
  Codec codec = Codec::kDense;
  bool key = true;
  int lane = 0;               // in its block
  uint8_t* block = nullptr;   // of 16 entries
  uint16_t* scale = nullptr;  // the entry's, if coded
};
// `ref.count` is the slot.
EntrySide SideOf(const PageRef& ref, bool key, int dim, void* arena);
float* LogWeightOf(const PageRef& ref, int dim, void* arena);  // null if the page has none

// Of equal codecs.
void CopySide(const EntrySide& from, const EntrySide& to, int dim);
// A side that is not coded, as floats `stride` apart.
void LoadPlainSide(const EntrySide& from, int dim, float* x, int stride);
void StorePlainSide(const EntrySide& to, int dim, const float* x, int stride);

const SphericalKernels& SphericalKernelsOf(Isa isa);

// Up to 16 entries at once.
inline constexpr int kSideLanes = 16;
// Sides of one codec as x [D][16]; coded ones are decoded and get their mean ([D], or null) back.
void LoadSides(const EntrySide* from, int n, int dim, const float* const* means, const SphericalKernels& kernels, float* x);
// x [D][16], which is lost, into sides of one codec; coded ones without their mean. Returns how many were not finite.
int StoreSides(const EntrySide* to, int n, int dim, const float* const* means, const SphericalKernels& kernels, float* x);

}  // namespace loupe
