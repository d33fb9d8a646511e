// Weighted means of entries, as one entry with a log-weight. Sums in f32, in the order of the sources. Rare and small (a
// policy's decision, not a step's), so plain loops. Step thread.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/check.h"
#include "kernels/cpu/attend_kernels.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/half.h"

namespace loupe {
namespace {

// `stride` elements lie between the numbers of a row.
void AddRow(const uint8_t* from, Codec codec, int stride, int dim, float weight, float* sum) {
  const auto* full = reinterpret_cast<const float*>(from);
  const auto* half = reinterpret_cast<const uint16_t*>(from);
  for (int d = 0; d < dim; ++d) sum[d] += weight * (codec == Codec::kF32 ? full[d * stride] : HalfToFloat(half[d * stride]));
}

void StoreRow(const float* x, Codec codec, int stride, int dim, uint8_t* to) {
  alignas(64) uint16_t half[attend::kMaxHeadDim];
  if (codec != Codec::kF32) attend::PortableKernels().to_half(x, half, dim);
  for (int d = 0; d < dim; ++d) {
    if (codec == Codec::kF32) {
      reinterpret_cast<float*>(to)[d * stride] = x[d];
    } else {
      reinterpret_cast<uint16_t*>(to)[d * stride] = half[d];
    }
  }
}

struct Row {
  uint8_t* key;
  uint8_t* value;
  float* log_weight;  // or null
  PageFormat format;
};

Row RowOf(const PageRef& ref, int dim, void* arena) {
  const PageClass c = ref.page_class();
  LOUPE_CHECK(ref.count < c.entries()) << "slot " << ref.count << " of a page of " << c.entries();
  LOUPE_CHECK(!IsCoded(c.format.key) && !IsCoded(c.format.value)) << "means are made of dense entries";
  const PageLayout layout = MakePageLayout(c, dim);
  auto* page = static_cast<uint8_t*>(arena) + int64_t{ref.unit} * kPageAlignment;
  const int64_t key_bytes = PlaneBytes(c.format.key, dim);
  const int64_t block = ref.count / kBlockEntries * kBlockEntries * key_bytes, lane = ref.count % kBlockEntries * (key_bytes / dim);
  return {page + block + lane, page + layout.value_offset + ref.count * PlaneBytes(c.format.value, dim),
          ref.log_weights ? reinterpret_cast<float*>(page + layout.log_weight_offset) + ref.count : nullptr, c.format};
}

}  // namespace

void MergeEntriesCpu(const MergeEntriesArgs& args, CpuContext context) {
  (void)context;
  const int dim = args.head_dim;
  LOUPE_CHECK(dim > 0 && dim % 8 == 0 && dim <= attend::kMaxHeadDim) << "head size " << dim;
  alignas(64) float key[attend::kMaxHeadDim], value[attend::kMaxHeadDim];
  for (int64_t i = 0; i < args.num_merges; ++i) {
    const EntryMerge& merge = args.merges[i];
    std::fill_n(key, dim, 0.f);
    std::fill_n(value, dim, 0.f);
    for (int32_t s = 0; s < merge.count; ++s) {
      const MergeSource& source = args.sources[merge.first + s];
      const Row from = RowOf(source.entry, dim, args.arena);
      AddRow(from.key, from.format.key, kBlockEntries, dim, source.weight, key);
      AddRow(from.value, from.format.value, 1, dim, source.weight, value);
    }
    const Row to = RowOf(merge.to, dim, args.arena);
    LOUPE_CHECK(to.log_weight != nullptr) << "the log-weight of merge " << i << " would be lost: its page has none";
    StoreRow(key, to.format.key, kBlockEntries, dim, to.key);
    StoreRow(value, to.format.value, 1, dim, to.value);
    *to.log_weight = merge.log_weight;
  }
}

}  // namespace loupe
