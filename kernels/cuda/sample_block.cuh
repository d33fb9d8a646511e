// What the blocks of a cluster do together to choose a token of one row of logits: reductions, sums of weights, the best
// candidates in order. Passes over the row are shared among the blocks; what they find is copied to all, and everything
// after it is done by each block alike, so that all threads of the cluster see the same. Keys order logits, best first as
// numbers descend, and among equal logits the lowest id.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/ops.h"

namespace loupe::cuda {

constexpr int kSampleThreads = 1024;
constexpr int kSampleWarps = kSampleThreads / 32;
constexpr int kChunk = 1024;  // ids whose weights are summed together, and drawn from together
constexpr int kMaxChunks = kSampleThreads;
constexpr int kMaxCandidates = 8192;
constexpr int kShare = kMaxCandidates / kSampleThreads;
constexpr int kBins = kSampleThreads;
constexpr double kMassSlack = 1e-3;  // floats are added in any order
constexpr float kBinRange = 24;  // in units of the temperature; what lies below weighs less than 4e-11 of the best

struct SampleShared {
  uint64_t keys[kMaxCandidates];  // sorted by Gather
  double chunk_sums[kMaxChunks];
  uint64_t reduce[kSampleWarps];
  double scan[kSampleWarps];
  uint64_t exchange;         // the block's value of a reduction over the cluster
  uint32_t own_bins[kBins];  // counted by this block
  float own_masses[kBins];
  double found_mass;
  int found;
};

__device__ __forceinline__ uint64_t KeyOf(float logit, int id) {
  const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));  // one zero
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ float KeyLogit(uint64_t key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}
__device__ __forceinline__ int32_t KeyId(uint64_t key) { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key)); }

// The CPU's approximation (kernels/cpu/sample.cpp), operation by operation: exp(x) for x <= 0.
__device__ __forceinline__ float ExpOfNegative(float x) {
  const float c = x > -87.0f ? x : -87.0f;
  const float shifted = __fadd_rn(__fmul_rn(c, 1.44269504f), 12582912.0f);
  const float n = __fsub_rn(shifted, 12582912.0f);
  const float r = __fadd_rn(__fsub_rn(c, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, 2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
  p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
  p = __fadd_rn(__fmul_rn(p, r), 5.0000001201e-1f);
  p = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r), 1.0f);
  const float scale = __int_as_float((static_cast<int>(n) + 127) << 23);
  return x > -87.0f ? __fmul_rn(p, scale) : 0.0f;
}

struct Weighting {
  float best, inverse_t, threshold;
  __device__ __forceinline__ float operator()(float logit) const {
    return logit >= threshold ? ExpOfNegative(__fmul_rn(__fsub_rn(logit, best), inverse_t)) : 0.0f;
  }
};

struct Best {
  float logit;  // not finite if there is none
  int32_t id;
};
struct Above {
  int count;
  double mass;
};

// Bins of equal width below the best logit, how many logits each holds and about how much they weigh: thread i knows bin i.
struct Bins {
  float best, inverse_width;
  int own;      // in this thread's bin
  double mass;  // of it, to within kMassSlack
  int seen;     // above -inf, in no bin perhaps

  // By count, the range holds the best tokens of any temperature.
  __device__ Bins(float best_logit, float temperature, bool by_count)
      : best(best_logit),
        inverse_width(kBins / (kBinRange * (by_count ? fmaxf(temperature, 1.0f) : temperature))),
        own(0),
        mass(0),
        seen(0) {}
  __device__ __forceinline__ int Of(float logit) const {
    const float at = (best - logit) * inverse_width;
    return at < kBins ? static_cast<int>(at) : kBins;
  }
};
// A run of bins whose candidates fit into shared memory; none do if count is 0.
struct Window {
  int first, end, count;
};

struct SampleBlock {
  SampleShared& shared;
  float* x;  // the row's logits
  int vocab;
  float* saved;  // of the row's changes
  int rank, ranks;  // of the block in its cluster

  __device__ int num_chunks() const { return (vocab + kChunk - 1) / kChunk; }
  // The row is shared among the blocks in strides of a block.
  __device__ int first_id() const { return rank * kSampleThreads + static_cast<int>(threadIdx.x); }
  __device__ int stride() const { return ranks * kSampleThreads; }

  __device__ void Sync() const {
#if __CUDA_ARCH__ >= 900
    if (ranks > 1) {
      asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }
  // Where `own`, in this block's shared memory, lies in another block's.
  template <class T>
  __device__ const volatile T* In(const T* own, int other) const {
#if __CUDA_ARCH__ >= 900
    uint64_t there;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(other));
    return ranks > 1 ? reinterpret_cast<const volatile T*>(there) : own;
#else
    return own;
#endif
  }

  // ---- over the threads of a block

  template <class T, class Combine>
  __device__ T Reduce(T value, Combine combine) const {
    T* partial = reinterpret_cast<T*>(shared.reduce);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(~0u, value, offset));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = partial[threadIdx.x % 32];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(~0u, value, offset));
    __syncthreads();
    return value;
  }
  struct Plus {
    template <class T>
    __device__ T operator()(T a, T b) const {
      return a + b;
    }
  };
  struct Larger {
    template <class T>
    __device__ T operator()(T a, T b) const {
      return a > b ? a : b;
    }
  };
  __device__ double Sum(double v) const { return Reduce(v, Plus{}); }
  __device__ int Count(int v) const { return Reduce(v, Plus{}); }
  __device__ int Most(int v) const { return Reduce(v, Larger{}); }
  __device__ int Least(int v) const { return -Reduce(-v, Larger{}); }
  // The sum over the threads before this one.
  __device__ double Before(double v) const {
    double sum = v;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const double other = __shfl_up_sync(~0u, sum, offset);
      if (static_cast<int>(threadIdx.x % 32) >= offset) sum += other;
    }
    if (threadIdx.x % 32 == 31) shared.scan[threadIdx.x / 32] = sum;
    double before = __shfl_up_sync(~0u, sum, 1);
    if (threadIdx.x % 32 == 0) before = 0;
    __syncthreads();
    double warps = 0;
    for (unsigned w = 0; w < threadIdx.x / 32; ++w) warps += shared.scan[w];
    __syncthreads();
    return warps + before;
  }

  // ---- over the cluster

  template <class T, class Combine>
  __device__ T ReduceAll(T value, Combine combine) const {
    value = Reduce(value, combine);
    if (ranks == 1) return value;
    T* own = reinterpret_cast<T*>(&shared.exchange);
    if (threadIdx.x == 0) *own = value;
    Sync();
    value = *In(own, 0);
    for (int other = 1; other < ranks; ++other) value = combine(value, static_cast<T>(*In(own, other)));
    Sync();
    return value;
  }
  __device__ uint64_t MostKey(unsigned long long key) const { return ReduceAll(key, Larger{}); }

  __device__ Best FindBest() const {
    float best = -INFINITY;
    int id = INT_MAX;
#pragma unroll 8
    for (int i = first_id(); i < vocab; i += stride()) {
      const float logit = x[i];
      if (logit > best) best = logit, id = i;
    }
    const uint64_t key = MostKey(id == INT_MAX ? 0 : KeyOf(best, id));
    if (key == 0) return {-INFINITY, -1};
    return {KeyLogit(key), KeyId(key)};
  }

  // Sums of weights of each chunk into shared memory, and over all. Within a chunk the CPU's 64 sums in its order. Bins
  // are filled on the way.
  template <bool kWithBins>
  __device__ double ChunkSums(const Weighting& weight, Bins* bins) const {
    const int lane = static_cast<int>(threadIdx.x % 32), warps = kSampleWarps * ranks;
    int seen = 0;
    if (kWithBins) {
      shared.own_bins[threadIdx.x] = 0, shared.own_masses[threadIdx.x] = 0;
      __syncthreads();
    }
    const auto weigh = [&](float logit) {
      const float w = weight(logit);
      if (kWithBins) {
        const int bin = bins->Of(logit);
        seen += logit > -INFINITY;
        if (bin < kBins) atomicAdd(&shared.own_bins[bin], 1u), atomicAdd(&shared.own_masses[bin], w);
      }
      return w;
    };
    for (int c = rank * kSampleWarps + static_cast<int>(threadIdx.x / 32); c < num_chunks(); c += warps) {
      float low = 0, high = 0;
      const int left = vocab - c * kChunk - lane;  // ids from the lane's first one on
      const float* values = x + c * kChunk + lane;
      if (left + lane >= kChunk) {
#pragma unroll
        for (int k = 0; k < kChunk; k += 64) {
          low = __fadd_rn(low, weigh(values[k]));
          high = __fadd_rn(high, weigh(values[k + 32]));
        }
      } else {
        for (int k = 0; k < kChunk; k += 64) {
          if (k < left) low = __fadd_rn(low, weigh(values[k]));
          if (k + 32 < left) high = __fadd_rn(high, weigh(values[k + 32]));
        }
      }
      double sum = static_cast<double>(low) + static_cast<double>(high);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane == 0) shared.chunk_sums[c] = sum;
    }
    Sync();
    const int c = static_cast<int>(threadIdx.x);
    double own = 0;
    if (c < num_chunks()) own = shared.chunk_sums[c] = *In(&shared.chunk_sums[c], c / kSampleWarps % ranks);
    if (kWithBins) {
      bins->own = 0, bins->mass = 0;
      for (int other = 0; other < ranks; ++other) {
        bins->own += static_cast<int>(*In(&shared.own_bins[c], other));
        bins->mass += static_cast<double>(*In(&shared.own_masses[c], other));
      }
      bins->seen = ReduceAll(seen, Plus{});
    }
    const double total = Sum(own);
    Sync();  // all have read what the next call writes
    return total;
  }

  // The bins from the top that hold `wanted` logits, or all of them.
  __device__ Window TopWindow(const Bins& bins, int wanted) const {
    const int before = static_cast<int>(Before(bins.own));
    const int end = Count(before < wanted);
    const int count = Count(static_cast<int>(threadIdx.x) < end ? bins.own : 0);
    return {0, end, count <= kMaxCandidates ? count : 0};
  }
  // The bins in one of which the mass from the top reaches `target`. From the very top if these are few.
  __device__ Window MassWindow(const Bins& bins, double target) const {
    const int bin = static_cast<int>(threadIdx.x);
    const double mass = Before(bins.mass) + bins.mass;
    int first = Count(mass * (1 + kMassSlack) < target);
    const int end = min(kBins, 1 + Count(mass * (1 - kMassSlack) < target));
    if (Count(bin < end ? bins.own : 0) <= kSampleThreads) first = 0;
    const int count = Count(bin >= first && bin < end ? bins.own : 0);
    return {first, end, count <= kMaxCandidates ? count : 0};
  }

  // A window's candidates into shared memory, in order. The mass of what lies above the window.
  __device__ double Gather(const Bins& bins, const Window& window, const Weighting& weight) const {
    if (threadIdx.x == 0) shared.found = 0;
    __syncthreads();
    double above = 0;
#pragma unroll 8
    for (int i = first_id(); i < vocab; i += stride()) {
      const float logit = x[i];
      const int bin = bins.Of(logit);
      if (bin < window.first) above += static_cast<double>(weight(logit));
      if (bin >= window.first && bin < window.end) shared.keys[atomicAdd(&shared.found, 1)] = KeyOf(logit, i);
    }
    Sync();
    int at = shared.found;
    for (int step = 1; step < ranks; ++step) {
      const int other = (rank + step) % ranks, count = *In(&shared.found, other);
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kSampleThreads) shared.keys[at + i] = *In(&shared.keys[i], other);
      at += count;
    }
    Sync();
    Sort(window.count);
    return window.first > 0 ? ReduceAll(above, Plus{}) : 0;
  }

  // Keys [0, count) in descending order, bitonically; zeros up to the next power of two.
  __device__ void Sort(int count) const {
    int size = 1;
    while (size < count) size *= 2;
    for (int i = count + static_cast<int>(threadIdx.x); i < size; i += kSampleThreads) shared.keys[i] = 0;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
      for (int step = run / 2; step > 0; step /= 2) {
        for (int t = static_cast<int>(threadIdx.x); t < size / 2; t += kSampleThreads) {
          const int i = 2 * t - (t & (step - 1));
          const uint64_t a = shared.keys[i], b = shared.keys[i + step];
          if ((a < b) == ((i & run) == 0)) shared.keys[i] = b, shared.keys[i + step] = a;
        }
        __syncthreads();
      }
    }
  }

  // ---- a pass each, for what has not been gathered

  __device__ Above SumAbove(uint64_t least, const Weighting& weight) const {
    int count = 0;
    double mass = 0;
#pragma unroll 4
    for (int i = first_id(); i < vocab; i += stride()) {
      const float logit = x[i];
      if (!(logit > -INFINITY) || KeyOf(logit, i) < least) continue;
      ++count;
      mass += static_cast<double>(weight(logit));
    }
    return {ReduceAll(count, Plus{}), ReduceAll(mass, Plus{})};
  }
  // The last key that is needed so that what lies from it upwards is enough; 0 if nothing is.
  template <class Enough>
  __device__ uint64_t LastNeeded(const Weighting& weight, Enough enough) const {
    uint64_t low = 0, high = KeyOf(weight.best, 0) + 1;
    while (high - low > 1) {
      const uint64_t middle = low + (high - low) / 2;
      (enough(SumAbove(middle, weight)) ? low : high) = middle;
    }
    return low;
  }
  // The lowest key that weighs at least that.
  __device__ uint64_t FirstKeyOfWeight(double least, const Weighting& weight) const {
    uint64_t first = ~uint64_t{0};
    for (int i = first_id(); i < vocab; i += stride()) {
      const uint64_t own = KeyOf(x[i], i);
      if (static_cast<double>(weight(x[i])) >= least && own < first) first = own;
    }
    return ~MostKey(~first);
  }
  __device__ uint64_t LargestBelow(uint64_t key) const {
    uint64_t best = 0;
    for (int i = first_id(); i < vocab; i += stride()) {
      const uint64_t own = KeyOf(x[i], i);
      if (x[i] > -INFINITY && own < key && own > best) best = own;
    }
    return MostKey(best);
  }
};

}  // namespace loupe::cuda
