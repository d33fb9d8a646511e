// What the kernels for column sums of attention read and write: SumAttentionArgs as plain device pointers, some heads and
// rows of it at a time. Step thread.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/page_layout.h"

namespace loupe::cuda {

inline constexpr int kSumRows = 128;  // of a launch

struct Sums {
  const void* q;  // [rows, H, D]
  int64_t q_stride;
  bool q_half;
  int rows, heads_per_group, dim;
  int first_head;  // of the launch: what follows counts heads from it
  const PageRef* pages;
  const int32_t* list_begin;  // [G + 1] into pages
  const int32_t *visible_begin, *visible_end;
  int64_t begin_stride, end_stride;
  const uint8_t* arena;
  const float* sinks;      // [H] or null
  const float* mean_keys;  // [G, D] or null
  float scale_log2e;
  int max_pages;     // of a list
  float* columns;    // [heads, max_pages, 64]
  float2* partials;  // [heads, rows, max_pages]: a page's maximum and sum, in log2; the plain kernel keeps scores there
  float2* stats;     // [heads, rows]: maximum and 1 / sum
};

void SumAttentionDense(const Sums& p, int heads, cudaStream_t stream);  // D 64 or 128, dense pages
void SumAttentionPlain(const Sums& p, int heads, cudaStream_t stream);  // anything, one block a head

}  // namespace loupe::cuda
