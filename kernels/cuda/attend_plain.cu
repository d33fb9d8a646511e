// Attention in f32 arithmetic for whatever the fast kernels do not take: exact mode with its f32 pages, head sizes
// other than 64 and 128, devices without wgmma. One block a (row, kv head), page by page: the slow version that stays.
// What coded values add is summed up as it is coded and turned back once, at the end of the row.
// Also the probabilities of pages and entries, computed in a second pass from the rows' log-sums, so that nobody else
// pays.
#include "kernels/cuda/attend_inputs.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/plain_keys.cuh"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 128;
constexpr float kNone = -INFINITY;

struct Plain : AttendInputs {
  bool q_half, out_half, round_q;
  float* row_lse;
  int first_row, num_rows;
  float *page_mass, *entry_probability;
};

Plain MakePlain(const AttendArgs& args, int64_t first, int64_t num, const CudaContext& context) {
  Plain p = {};
  SetInputs(args, &p);
  p.q_half = args.q.dtype == DType::kF16, p.out_half = args.out.dtype == DType::kF16;
  p.row_lse = context.workspace->row_lse;
  p.first_row = static_cast<int>(first), p.num_rows = static_cast<int>(num);
  p.page_mass = args.page_mass.as<float>(), p.entry_probability = args.entry_probability.as<float>();
  return p;
}

// The row's queries of the group into shared memory.
__device__ void LoadQueries(const Plain& p, int row, int group, float* q) {
  for (int i = threadIdx.x; i < p.heads * p.dim; i += kThreads) {
    const int64_t at = row * p.q_stride + int64_t{group} * p.heads * p.dim + i;
    float x = p.q_half ? ToFloat(static_cast<const __half*>(p.q)[at]) : static_cast<const float*>(p.q)[at];
    if (p.round_q) x = ToFloat(FromFloat<__half>(x));
    q[i] = x;
  }
  TurnQueries(q, p.heads, p.dim, p.mean_keys ? p.mean_keys + group * p.dim : nullptr);
}

// log2-domain logit of an entry.
__device__ float Logit(const Plain& p, const PageView& page, int e, const float* q, int head) {
  return PlainDot(PlainQueryAt(q, p.heads, p.dim, head), page, e, p.dim, p.arena) * p.scale_log2e + LogWeight2(page, e, p.dim, p.arena);
}

struct Running {
  float max, sum, factor;
};

// The finished row of a group: the sink joins the denominator.
__device__ void StoreRow(const Plain& p, int row, int group, const float* out, const Running* running) {
  for (int j = threadIdx.x; j < p.heads * p.dim; j += kThreads) {
    const int head = j / p.dim;
    float sum = running[head].sum, value = out[j];
    const float max = running[head].max;
    float top = max;
    if (p.sinks) {
      const float sink = p.sinks[group * p.heads + head] * kLog2e;
      top = fmaxf(max, sink);
      if (top != kNone) sum = sum * exp2f(max - top) + exp2f(sink - top), value *= exp2f(max - top);
    }
    value = max == kNone ? 0 : value / sum;
    const int64_t at = row * p.out_stride + int64_t{group} * p.heads * p.dim + j;
    if (p.out_half) {
      static_cast<__half*>(p.out)[at] = FromFloat<__half>(value);
    } else {
      static_cast<float*>(p.out)[at] = value;
    }
    if (p.row_lse && j % p.dim == 0)
      p.row_lse[int64_t{row} * p.groups * p.heads + group * p.heads + head] = top == kNone ? 0 : top + log2f(sum);
  }
}

// The values of a page's entries [low, high), weighted by x [heads][64].
__device__ void AddValues(const Plain& p, const PageView& page, int low, int high, const float* x, const Running* running, float* out,
                          float* turned_out) {
  PageView first = page;
  first.count = 0;
  Side side(first, false, p.dim, const_cast<uint8_t*>(p.arena));  // only read
  const bool coded = IsCoded(page.value_codec);
  for (int j = threadIdx.x; j < p.heads * p.dim; j += kThreads) {
    const int head = j / p.dim, d = j % p.dim;
    float plain = out[j] * running[head].factor, turned = turned_out[j] * running[head].factor;
    for (int e = low; e < high; ++e) {
      const float weight = x[head * kPageEntries + e];
      side.slot = e;
      if (coded) {
        turned = fmaf(weight, 0.5f * static_cast<float>(ReadTwice(side.Entry(p.dim), d)) * ToFloat(side.scales[e]), turned);
      } else {
        plain = fmaf(weight, PlainElement(side.plane, page.value_bytes, ElementIndex(e, d, page.entries)), plain);
      }
    }
    out[j] = plain, turned_out[j] = turned;
  }
}

__global__ void PlainKernel(const Plain p) {
  extern __shared__ float shared[];
  float* q = shared;
  float* out = q + PlainQueryFloats(p.heads, p.dim);
  float* turned_out = out + p.heads * p.dim;
  float* x = turned_out + p.heads * p.dim;  // [heads][64]
  __shared__ Running running[32];
  GridWait();
  GridLaunch();
  const int row = p.first_row + blockIdx.x / p.groups, group = blockIdx.x % p.groups;
  const int list = p.row_sequence[row] * p.groups + group;
  LoadQueries(p, row, group, q);
  for (int i = threadIdx.x; i < 2 * p.heads * p.dim; i += kThreads) out[i] = 0;
  if (threadIdx.x < p.heads) running[threadIdx.x] = {kNone, 0, 1};
  const int in_list = p.PagesOf(list);
  const int pages = in_list + (p.extra_pages ? p.extra_counts[list] : 0);
  const int begin = p.visible_begin[int64_t{row} * p.groups + group],
            end = p.visible_end[int64_t{row} * p.groups + group];
  for (int i = 0; i < pages; ++i) {
    const int start = i * kPageEntries;
    const PageView page(i < in_list ? p.pages[p.list_begin[list] + i]
                                    : p.extra_pages[list * p.extra_stride + i - in_list]);
    const int low = i < in_list ? max(0, begin - start) : 0,
              high = i < in_list ? min(page.count, end - start) : page.count;
    if (low >= high) continue;
    __syncthreads();
    for (int j = threadIdx.x; j < p.heads * kPageEntries; j += kThreads) {
      const int head = j / kPageEntries, e = j % kPageEntries;
      x[j] = e >= low && e < high ? Logit(p, page, e, q, head) : kNone;
    }
    __syncthreads();
    if (threadIdx.x < p.heads) {
      Running& r = running[threadIdx.x];
      float* mine = x + threadIdx.x * kPageEntries;
      float top = r.max;
      for (int e = low; e < high; ++e) top = fmaxf(top, mine[e]);
      const float base = top == kNone ? 0 : top;
      r.factor = exp2f(r.max - base);
      r.sum *= r.factor;
      r.max = top;
      for (int e = low; e < high; ++e) mine[e] = exp2f(mine[e] - base), r.sum += mine[e];
    }
    __syncthreads();
    AddValues(p, page, low, high, x, running, out, turned_out);
  }
  __syncthreads();
  for (int head = threadIdx.x / 32; head < p.heads && p.dim % spherical::kDimStep == 0; head += kThreads / 32) {
    TurnShared(turned_out + head * p.dim, p.dim, true);
    for (int d = threadIdx.x % 32; d < p.dim; d += 32) out[head * p.dim + d] += turned_out[head * p.dim + d];
  }
  __syncthreads();
  StoreRow(p, row, group, out, running);
}

// One block a (row, kv head) and every gridDim.y-th page.
__global__ void ProbabilityKernel(const Plain p) {
  extern __shared__ float shared[];
  float* q = shared;
  float* x = q + PlainQueryFloats(p.heads, p.dim);  // [64][heads]
  GridWait();
  GridLaunch();
  const int at = blockIdx.x / p.groups, row = p.first_row + at, group = blockIdx.x % p.groups;
  const int sequence = p.row_sequence[row];
  if ((at > 0 && p.row_sequence[row - 1] == sequence) || (at + 1 < p.num_rows && p.row_sequence[row + 1] == sequence))
    return;
  const int list = sequence * p.groups + group;
  LoadQueries(p, row, group, q);
  const float* lse = p.row_lse + int64_t{row} * p.groups * p.heads + group * p.heads;
  const int first = p.list_begin[list], pages = p.PagesOf(list);
  const int begin = p.visible_begin[int64_t{row} * p.groups + group],
            end = p.visible_end[int64_t{row} * p.groups + group];
  for (int i = 0; i < pages; ++i) {
    const PageView page(p.pages[first + i]);
    const int low = max(0, begin - i * kPageEntries), high = min(page.count, end - i * kPageEntries);
    if (i % gridDim.y != blockIdx.y) continue;
    __syncthreads();
    for (int j = threadIdx.x; j < kPageEntries * p.heads; j += kThreads) {
      const int e = j / p.heads, head = j % p.heads;
      x[j] = e >= low && e < high ? exp2f(Logit(p, page, e, q, head) - lse[head]) : 0.0f;
      if (p.entry_probability) p.entry_probability[int64_t{first + i} * kPageEntries * p.heads + j] = x[j];
    }
    __syncthreads();
    if (p.page_mass && threadIdx.x < p.heads) {
      float mass = 0;
      for (int e = low; e < high; ++e) mass += x[e * p.heads + threadIdx.x];
      p.page_mass[int64_t{first + i} * p.heads + threadIdx.x] = mass;
    }
  }
}

// Many heads of a large size need more than a block gets unasked.
template <class Kernel>
void AllowShared(Kernel kernel, size_t bytes) {
  constexpr size_t kUnasked = 48 << 10;
  if (bytes > kUnasked) LOUPE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

}  // namespace

// Flops 4 D a (query head, entry); written for clarity, not for speed.
void AttendPlain(const AttendArgs& args, int64_t first, int64_t num, CudaContext context) {
  if (num == 0) return;
  Plain p = MakePlain(args, first, num, context);
  const bool probabilities = args.page_mass.defined() || args.entry_probability.defined();
  if (!probabilities || first < args.prompt_rows) p.row_lse = nullptr;
  const size_t bytes =
      sizeof(float) * static_cast<size_t>(PlainQueryFloats(p.heads, p.dim) + 2 * p.heads * p.dim + p.heads * kPageEntries);
  AllowShared(PlainKernel, bytes);
  Launch(PlainKernel, static_cast<unsigned>(num * p.groups), kThreads, bytes, context.stream, p);
}

// Reads the keys once more.
void AttendProbabilities(const AttendArgs& args, int64_t first, int64_t num, CudaContext context) {
  Plain p = MakePlain(args, first, num, context);
  p.round_q = !context.exact && (p.dim == 64 || p.dim == 128);
  const size_t bytes = sizeof(float) * static_cast<size_t>(PlainQueryFloats(p.heads, p.dim) + p.heads * kPageEntries);
  AllowShared(ProbabilityKernel, bytes);
  Launch(ProbabilityKernel, dim3(static_cast<unsigned>(num * p.groups), 16), kThreads, bytes, context.stream, p);
}

}  // namespace loupe::cuda
