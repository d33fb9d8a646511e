// Writes new keys and values into their slots, as fp16 or f32 by the page's format. Keys are scattered, since the entries
// of a block are lanes; at 6 bytes moved an element (4 read, 2 written) it is memory-light next to the projections before
// it. Step thread.
#include <cstdint>
#include <cstring>

#include "kernels/check.h"
#include "kernels/cpu/attend_kernels.h"
#include "kernels/cpu/cpu_ops.h"

namespace loupe {
namespace {

// Below this many elements waking the other threads costs more than they save.
constexpr int64_t kMinElementsToSplit = 16384;

using ToHalf = void (*)(const float* x, uint16_t* y, int n);

ToHalf ToHalfOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return attend::Avx512Kernels().to_half;
  if (isa == Isa::kAvx2) return attend::Avx2Kernels().to_half;
#endif
  (void)isa;
  return attend::PortableKernels().to_half;
}

void AppendOne(const AppendKvArgs& args, int64_t row, int g, ToHalf to_half) {
  const int dim = static_cast<int>(args.k.shape[2]);
  const PageRef ref = args.slots.row<PageRef>(row)[g];
  const PageClass page_class = ref.page_class();
  LOUPE_CHECK(ref.count < page_class.entries()) << "slot " << ref.count << " of row " << row << ", kv head " << g;
  const PageLayout layout = MakePageLayout(page_class, dim);
  auto* page = static_cast<uint8_t*>(args.arena) + int64_t{ref.unit} * kPageAlignment;
  const int64_t block = ref.count / kBlockEntries, lane = ref.count % kBlockEntries;

  const float* k = args.k.row<float>(row) + int64_t{g} * dim;
  if (page_class.format.key == Codec::kF32) {
    float* keys = reinterpret_cast<float*>(page) + block * dim * kBlockEntries + lane;
    for (int d = 0; d < dim; ++d) keys[d * kBlockEntries] = k[d];
  } else {
    alignas(64) uint16_t half[attend::kMaxHeadDim];
    to_half(k, half, dim);
    uint16_t* keys = reinterpret_cast<uint16_t*>(page) + block * dim * kBlockEntries + lane;
    for (int d = 0; d < dim; ++d) keys[d * kBlockEntries] = half[d];
  }
  const float* v = args.v.row<float>(row) + int64_t{g} * dim;
  uint8_t* values = page + layout.value_offset + ref.count * CodecBytes(page_class.format.value, dim);
  if (page_class.format.value == Codec::kF32) {
    std::memcpy(values, v, sizeof(float) * static_cast<size_t>(dim));
  } else {
    to_half(v, reinterpret_cast<uint16_t*>(values), dim);
  }
  if (ref.log_weights) reinterpret_cast<float*>(page + layout.log_weight_offset)[ref.count] = 0;
}

}  // namespace

void AppendKvCpu(const AppendKvArgs& args, CpuContext context) {
  const int64_t rows = args.k.rows();
  const int groups = static_cast<int>(args.k.shape[1]), dim = static_cast<int>(args.k.shape[2]);
  LOUPE_CHECK(dim > 0 && dim % 8 == 0 && dim <= attend::kMaxHeadDim)
      << "head size " << dim << " is not a multiple of 8 up to " << attend::kMaxHeadDim;
  const ToHalf to_half = ToHalfOf(context.isa);
  const auto append = [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
      for (int g = 0; g < groups; ++g) AppendOne(args, row, g, to_half);
    }
  };
  if (rows * groups * dim < kMinElementsToSplit) return append(0, rows);
  context.pool.Run([&](int thread) {
    const auto [from, to] = context.pool.Share(rows, thread);
    append(from, to);
  });
}

}  // namespace loupe
