// Keys and values that are not finite cannot be coded. The ops count them on the device; whoever has one in its pages is
// found by its scale, which is NaN then (kernels/spherical.h).
#include <cstring>

#include "kernels/half.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {

Tensor KvCache::Impl::Faults() const { return MakeTensor(faults->data(), DType::kI32, 1); }

Tensor KvCache::Impl::MeanKeys(int layer) const {
  if (!mean_keys) return {};
  const int64_t values = int64_t{shape.num_kv_heads} * shape.head_dim;
  return MakeTensor(static_cast<float*>(mean_keys->data()) + layer * values, DType::kF32, shape.num_kv_heads, shape.head_dim);
}

std::vector<SeqId> KvCache::Impl::TakeFaults(Stream& stream) {
  std::vector<SeqId> faulty;
  if (faults_on_host == faults_told) return faulty;
  encode_faults += faults_on_host - faults_told;
  faults_told = faults_on_host;
  for (const auto& [id, sequence] : sequences) {
    Settle(*sequence);
    if (sequence->coded && HoldsFault(*sequence, stream)) faulty.push_back(SeqId{id});
  }
  return faulty;
}

bool KvCache::Impl::HoldsFault(const Sequence& sequence, Stream& stream) {
  for (const KvList& list : sequence.lists) {
    for (const PageRef& page : list.pages) {
      const PageLayout layout = MakePageLayout(page.page_class(), shape.head_dim);
      const int64_t bytes = layout.log_weight_offset - layout.key_scale_offset;
      if (bytes == 0) continue;
      raw_rows.resize(static_cast<size_t>(bytes));
      const char* plane = static_cast<const char*>(arena->data()) + int64_t{page.unit} * kPageAlignment + layout.key_scale_offset;
      backend.Copy(raw_rows.data(), plane, bytes, stream);
      stream.Synchronize().IgnoreError();  // a device that has failed says so at the end of the step
      const auto broken = [&](int64_t offset, int slot) {
        uint16_t bits;
        std::memcpy(&bits, raw_rows.data() + (offset - layout.key_scale_offset) + 2 * slot, sizeof bits);
        const float scale = HalfToFloat(bits);
        return scale != scale;
      };
      const PageFormat format = page.page_class().format;
      for (int slot = 0; slot < page.count; ++slot) {
        if (IsCoded(format.key) && broken(layout.key_scale_offset, slot)) return true;
        if (IsCoded(format.value) && broken(layout.value_scale_offset, slot)) return true;
      }
    }
  }
  return false;
}

}  // namespace loupe
