// A view of memory with a type and a shape. It owns nothing and is passed by value. Any thread may hold one; who owns
// the memory, and for how long, is said where the view comes from. Element (i, j, ...) of a tensor lies at
// data + i * row_stride + the row-major offset of the rest: only the first dimension may have a stride.
#pragma once

#include <cstdint>

namespace loupe {

enum class DType : uint8_t { kF32, kF16, kBF16, kI32, kBytes };

inline constexpr int64_t DTypeBytes(DType type) {
  return type == DType::kF32 || type == DType::kI32 ? 4 : type == DType::kBytes ? 1 : 2;
}

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  int64_t shape[4] = {1, 1, 1, 1};
  int64_t row_stride = 0;  // elements between rows of the first dimension

  bool defined() const { return data != nullptr; }
  int64_t rows() const { return shape[0]; }
  int64_t row_elements() const { return shape[1] * shape[2] * shape[3]; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  template <class T>
  T* row(int64_t i) const {
    return static_cast<T*>(data) + i * row_stride;
  }
};

// A contiguous tensor of up to four dimensions.
inline Tensor MakeTensor(void* data, DType dtype, int64_t d0, int64_t d1 = 1, int64_t d2 = 1, int64_t d3 = 1) {
  Tensor t;
  t.data = data;
  t.dtype = dtype;
  t.rank = d3 > 1 ? 4 : d2 > 1 ? 3 : d1 > 1 ? 2 : 1;
  t.shape[0] = d0, t.shape[1] = d1, t.shape[2] = d2, t.shape[3] = d3;
  t.row_stride = d1 * d2 * d3;
  return t;
}

}  // namespace loupe
