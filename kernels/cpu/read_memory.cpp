// The speed of memory: every other figure is held against it.
#include <atomic>
#include <cstdint>

#include "kernels/cpu/cpu_ops.h"

namespace loupe {

void ReadMemoryCpu(const void* data, int64_t bytes, CpuContext context) {
  constexpr int64_t kStep = 16;    // words a turn
  constexpr int64_t kAhead = 512;  // words, to help the prefetcher
  const auto* words = static_cast<const uint64_t*>(data);
  std::atomic<uint64_t> total{0};  // so that the loads are not optimised away
  context.pool.Run([&](int thread) {
    const auto [begin, end] = context.pool.Share(bytes / 8, thread);
    uint64_t lanes[kStep] = {};
    for (int64_t i = begin; i + kStep <= end; i += kStep) {
      __builtin_prefetch(words + i + kAhead);
      __builtin_prefetch(words + i + kAhead + 8);
      for (int64_t lane = 0; lane < kStep; ++lane) lanes[lane] += words[i + lane];
    }
    uint64_t sum = 0;
    for (const uint64_t lane : lanes) sum += lane;
    total += sum;
  });
}

}  // namespace loupe
