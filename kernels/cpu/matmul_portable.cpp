// Matrix kernels in plain C++ for any CPU: weights are expanded to f32 and multiplied in f32. Also the yardstick of the
// others. Built without contraction of a * b + c, so that a row's bits do not depend on what the compiler makes of a
// tile.
#include <cstring>

#include "kernels/half.h"
#include "kernels/cpu/matmul_kernels.h"

namespace loupe {
namespace {

constexpr int kTile = 4;

template <int R>
void F32Tile(const StripCall& c) {
  const float* w = reinterpret_cast<const float*>(c.strip);
  const float* x = static_cast<const float*>(c.rows);
  float sum[R][kStripRows] = {};
  for (int64_t col = 0; col < c.cols; ++col, w += kStripRows) {
    for (int r = 0; r < R; ++r) {
      const float value = x[r * c.row_stride + col];
      for (int lane = 0; lane < kStripRows; ++lane) sum[r][lane] += value * w[lane];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int lane = 0; lane < kStripRows; ++lane) {
      float value = sum[r][lane];
      if (c.bias) value += c.bias[lane];
      if (c.add) value += c.add[r * c.add_stride + lane];
      c.out[r * c.out_stride + lane] = value;
    }
  }
}

void F32(const StripCall& c) {
  switch (c.num_rows) {
    case 1:
      return F32Tile<1>(c);
    case 2:
      return F32Tile<2>(c);
    case 3:
      return F32Tile<3>(c);
    default:
      return F32Tile<4>(c);
  }
}

void LoadHalfs(const uint8_t* from, float* to) {
  uint16_t half[kStripRows];
  std::memcpy(half, from, sizeof(half));
  for (int lane = 0; lane < kStripRows; ++lane) to[lane] = HalfToFloat(half[lane]);
}

void ExpandBlock(WeightType type, const uint8_t* codes, const uint8_t* scales, float* out) {
  float scale[kStripRows];
  float minimum[kStripRows] = {};
  LoadHalfs(scales, scale);
  if (type == WeightType::kQ4_1) LoadHalfs(scales + 32, minimum);
  const bool bytes = type == WeightType::kQ8_0;
  const int zero = LayoutOf(type).zero;
  for (int c = 0; c < kQuantBlock; ++c, out += kStripRows) {
    const uint8_t* vector = codes + (bytes ? c : c % 16) / 4 * 64 + c % 4;
    const int shift = !bytes && c >= 16 ? 4 : 0;
    const int mask = bytes ? 255 : 15;
    for (int lane = 0; lane < kStripRows; ++lane) {
      const int code = (vector[lane * 4] >> shift & mask) - zero;
      out[lane] = scale[lane] * static_cast<float>(code) + minimum[lane];
    }
  }
}

void Expand(WeightType type, const uint8_t* strip, int64_t cols, float* out) {
  if (IsQuantised(type)) {
    for (int64_t b = 0; b < cols / kQuantBlock; ++b) {
      const BlockPlace place = PlaceOf(type, b);
      ExpandBlock(type, strip + place.codes, strip + place.scales, out + b * kQuantBlock * kStripRows);
    }
    return;
  }
  for (int64_t c = 0; c < cols; ++c, out += kStripRows) {
    if (type == WeightType::kF32) {
      std::memcpy(out, strip + c * 64, 64);
    } else if (type == WeightType::kF16) {
      LoadHalfs(strip + c * 32, out);
    } else {
      for (int lane = 0; lane < kStripRows; ++lane) {
        uint16_t bits;
        std::memcpy(&bits, strip + c / 2 * 64 + lane * 4 + c % 2 * 2, sizeof(bits));
        out[lane] = Bf16ToFloat(bits);
      }
    }
  }
}

constexpr MatMulKernels Make() {
  MatMulKernels kernels;
  kernels.float_tile = kTile;
  kernels.f32 = F32;
  kernels.expand = Expand;
  return kernels;
}

}  // namespace

constinit const MatMulKernels kPortableMatMul = Make();

}  // namespace loupe
