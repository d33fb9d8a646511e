#include "kernels/cpu/entry_io.h"

#include <bit>
#include <cstring>

#include "kernels/check.h"
#include "kernels/cpu/coded_block.h"
#include "kernels/half.h"
#include "kernels/spherical.h"

namespace loupe {
namespace {

constexpr int kMaxDim = 256;

// Whether the sides are the 16 entries of one block, in order.
bool IsBlock(const EntrySide* sides, int n) {
  if (n != kSideLanes) return false;
  for (int i = 0; i < n; ++i) {
    if (sides[i].block != sides[0].block || sides[i].lane != i) return false;
  }
  return true;
}

}  // namespace

EntrySide SideOf(const PageRef& ref, bool key, int dim, void* arena) {
  const PageClass c = ref.page_class();
  LOUPE_CHECK(ref.count < c.entries()) << "slot " << ref.count << " of a page of " << c.entries();
  const PageLayout layout = MakePageLayout(c, dim);
  auto* page = static_cast<uint8_t*>(arena) + int64_t{ref.unit} * kPageAlignment;
  EntrySide side;
  side.codec = key ? c.format.key : c.format.value;
  side.key = key;
  side.lane = ref.count % kBlockEntries;
  side.block = page + (key ? 0 : layout.value_offset) + ref.count / kBlockEntries * kBlockEntries * PlaneBytes(side.codec, dim);
  const int64_t scales = key ? layout.key_scale_offset : layout.value_scale_offset;
  if (IsCoded(side.codec)) {
    LOUPE_CHECK(dim % spherical::kDimStep == 0 && dim <= kMaxDim) << "codes of head size " << dim;
    side.scale = reinterpret_cast<uint16_t*>(page + scales) + ref.count;
  }
  return side;
}

float* LogWeightOf(const PageRef& ref, int dim, void* arena) {
  if (!ref.log_weights) return nullptr;
  auto* page = static_cast<uint8_t*>(arena) + int64_t{ref.unit} * kPageAlignment;
  return reinterpret_cast<float*>(page + MakePageLayout(ref.page_class(), dim).log_weight_offset) + ref.count;
}

void CopySide(const EntrySide& from, const EntrySide& to, int dim) {
  if (IsCoded(from.codec)) {
    uint32_t codes[kMaxDim];
    GetCodes(from.codec, from.key, from.block, from.lane, dim, codes, 1);
    PutCodes(to.codec, to.key, to.block, to.lane, dim, codes, 1);
    *to.scale = *from.scale;
    return;
  }
  const int64_t size = from.codec == Codec::kF32 ? 4 : 2;
  if (!from.key) {
    std::memmove(to.block + to.lane * dim * size, from.block + from.lane * dim * size, static_cast<size_t>(dim * size));
    return;
  }
  // Elements of an entry's key lie 16 elements apart.
  const uint8_t* x = from.block + from.lane * size;
  uint8_t* y = to.block + to.lane * size;
  for (int d = 0; d < dim; ++d) std::memcpy(y + d * kBlockEntries * size, x + d * kBlockEntries * size, static_cast<size_t>(size));
}

void LoadPlainSide(const EntrySide& from, int dim, float* x, int stride) {
  const int step = from.key ? kBlockEntries : 1;
  const int64_t first = from.key ? from.lane : int64_t{from.lane} * dim;
  if (from.codec == Codec::kF32) {
    const float* y = reinterpret_cast<const float*>(from.block) + first;
    for (int d = 0; d < dim; ++d) x[d * stride] = y[d * step];
  } else {
    const auto* y = reinterpret_cast<const uint16_t*>(from.block) + first;
    for (int d = 0; d < dim; ++d) x[d * stride] = HalfToFloat(y[d * step]);
  }
}

void StorePlainSide(const EntrySide& to, int dim, const float* x, int stride) {
  const int step = to.key ? kBlockEntries : 1;
  const int64_t first = to.key ? to.lane : int64_t{to.lane} * dim;
  if (to.codec == Codec::kF32) {
    float* y = reinterpret_cast<float*>(to.block) + first;
    for (int d = 0; d < dim; ++d) y[d * step] = x[d * stride];
  } else {
    auto* y = reinterpret_cast<uint16_t*>(to.block) + first;
    for (int d = 0; d < dim; ++d) y[d * step] = FloatToHalf(x[d * stride]);
  }
}

const SphericalKernels& SphericalKernelsOf(Isa isa) {
  return isa == Isa::kAvx512 ? kAvx512Spherical : isa == Isa::kAvx2 ? kAvx2Spherical : kPortableSpherical;
}

void LoadSides(const EntrySide* from, int n, int dim, const float* const* means, const SphericalKernels& kernels, float* x) {
  if (!IsCoded(from[0].codec)) {
    if (from[0].key && from[0].codec == Codec::kDense && IsBlock(from, n)) {
      const auto* half = reinterpret_cast<const uint16_t*>(from[0].block);
      for (int i = 0; i < dim * kSideLanes; ++i) x[i] = HalfToFloat(half[i]);
      return;
    }
    for (int i = 0; i < n; ++i) LoadPlainSide(from[i], dim, x + i, kSideLanes);
    return;
  }
  alignas(64) uint32_t codes[kMaxDim * kSideLanes] = {};
  uint16_t scales[kSideLanes] = {};
  for (int i = 0; i < n; ++i) scales[i] = *from[i].scale;
  if (IsBlock(from, n)) {
    (from[0].key ? kernels.get_key_block : kernels.get_value_block)(from[0].block, dim, from[0].codec, codes);
  } else {
    for (int i = 0; i < n; ++i) GetCodes(from[i].codec, from[i].key, from[i].block, from[i].lane, dim, codes + i, kSideLanes);
  }
  kernels.decode(codes, scales, dim, from[0].codec, x);
  for (int i = 0; i < n && from[0].key; ++i) {
    for (int d = 0; d < dim && means[i] != nullptr; ++d) x[d * kSideLanes + i] += means[i][d];
  }
}

int StoreSides(const EntrySide* to, int n, int dim, const float* const* means, const SphericalKernels& kernels, float* x) {
  if (!IsCoded(to[0].codec)) {
    for (int i = 0; i < n; ++i) StorePlainSide(to[i], dim, x + i, kSideLanes);
    return 0;
  }
  for (int i = 0; i < n && to[0].key; ++i) {
    for (int d = 0; d < dim && means[i] != nullptr; ++d) x[d * kSideLanes + i] -= means[i][d];
  }
  alignas(64) uint32_t codes[kMaxDim * kSideLanes];
  uint16_t scales[kSideLanes];
  uint32_t faults = kernels.encode(x, dim, to[0].codec, codes, scales);
  if (n < kSideLanes) faults &= (1u << n) - 1;
  for (int i = 0; i < n; ++i) *to[i].scale = scales[i];
  if (IsBlock(to, n)) {
    (to[0].key ? kernels.put_key_block : kernels.put_value_block)(codes, dim, to[0].codec, to[0].block);
  } else {
    for (int i = 0; i < n; ++i) PutCodes(to[i].codec, to[i].key, to[i].block, to[i].lane, dim, codes + i, kSideLanes);
  }
  return std::popcount(faults);
}

}  // namespace loupe
