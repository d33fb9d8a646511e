// Working memory of ops, owned by the backend: grows to the largest step seen and stays, so that a step after warm-up
// allocates nothing. Grown by the step thread before a job starts, written by the pool's threads during it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/check.h"

namespace loupe {

// Memory without contents: growing forgets what was there. Starts on a cache line.
class ScratchBuffer {
 public:
  // At least `bytes`; a fresh piece is zero.
  void Reserve(int64_t bytes) {
    if (bytes <= bytes_) return;
    bytes_ = (bytes + kLine - 1) / kLine * kLine;
    data_.reset(static_cast<uint8_t*>(std::aligned_alloc(kLine, static_cast<size_t>(bytes_))));
    LOUPE_CHECK(data_ != nullptr) << "no memory for " << bytes_ << " bytes of working space";
    for (int64_t i = 0; i < bytes_; ++i) data_[static_cast<size_t>(i)] = 0;
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t[], Free> data_;
  int64_t bytes_ = 0;
};

// The rotations of one step: all layers of a step ask for the same, so they are computed once.
struct RotationTable {
  std::vector<int32_t> positions;   // [T]
  std::vector<float> frequencies;   // [pairs]
  std::vector<float> cosine, sine;  // [T, pairs]
};

struct CpuScratch {
  explicit CpuScratch(int num_threads) : thread(static_cast<size_t>(num_threads)) {}

  ScratchBuffer activations;          // of all rows, coded for the kernels
  std::vector<ScratchBuffer> thread;  // one a thread
  RotationTable rotations;
};

}  // namespace loupe
