// What every attention kernel reads: AttendArgs as plain pointers.
#pragma once

#include "kernels/check.h"
#include "kernels/cuda/device.cuh"
#include "kernels/ops.h"

namespace loupe::cuda {

struct AttendInputs {
  const void* q;
  int64_t q_stride;
  const int32_t* row_sequence;
  const PageRef* pages;
  const int32_t *list_begin, *list_end;
  const int32_t *visible_begin, *visible_end;
  const PageRef* extra_pages;
  const int32_t* extra_counts;
  int64_t extra_stride;
  const uint8_t* arena;
  const float* sinks;
  const float* mean_keys;  // [G, D] or null
  void* out;
  int64_t out_stride;
  float scale_log2e;
  int groups, heads, dim;  // G, R, D

  __device__ int PagesOf(int list) const { return list_end[list] - list_begin[list]; }
};

inline void SetInputs(const AttendArgs& args, AttendInputs* p) {
  p->q = args.q.data, p->q_stride = args.q.row_stride;
  p->row_sequence = args.row_sequence.as<int32_t>();
  p->pages = args.pages.as<PageRef>(), p->list_begin = args.list_begin.as<int32_t>();
  p->list_end = args.list_end.defined() ? args.list_end.as<int32_t>() : p->list_begin + 1;
  p->visible_begin = args.visible_begin.as<int32_t>(), p->visible_end = args.visible_end.as<int32_t>();
  if (args.extra_pages.defined()) {
    p->extra_pages = args.extra_pages.as<PageRef>(), p->extra_counts = args.extra_counts.as<int32_t>();
    p->extra_stride = args.extra_pages.row_stride;
  }
  p->arena = static_cast<const uint8_t*>(args.arena);
  p->sinks = args.sinks.defined() ? args.sinks.as<float>() : nullptr;
  p->mean_keys = args.mean_keys.defined() ? args.mean_keys.as<float>() : nullptr;
  p->out = args.out.data, p->out_stride = args.out.row_stride;
  p->scale_log2e = args.scale * kLog2e;
  p->groups = static_cast<int>(args.visible_begin.shape[1]);
  p->heads = static_cast<int>(args.q.shape[1]) / p->groups;
  p->dim = static_cast<int>(args.q.shape[2]);
}

}  // namespace loupe::cuda
