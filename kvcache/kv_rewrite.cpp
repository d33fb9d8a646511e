// A list's entries get other keys and values, as a cache that rounds them would hold them: for measurements alone.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kernels/mirrored_buffer.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {

absl::Status KvCache::Impl::Rewrite(Sequence& sequence, int list_index, std::span<const float> keys, std::span<const float> values,
                                    Stream& stream) {
  KvList& list = sequence.lists[static_cast<size_t>(list_index)];
  const size_t floats = static_cast<size_t>(list.entries()) * static_cast<size_t>(shape.head_dim);
  LOUPE_CHECK(keys.size() == floats && values.size() == floats)
      << keys.size() << " and " << values.size() << " numbers for " << list.entries() << " entries of " << shape.head_dim;
  if (floats == 0) return absl::OkStatus();
  Reservation reservation(&pool);
  std::vector<PageRef> pages, slots;
  for (const PageRef& old : list.pages) {
    LOUPE_CHECK(old.page_class().format == landing_class.format) << "only dense entries are written anew";
    pages.push_back(MakePageRef(reservation.Take(old.page_class()).value_or(0), old.count, old.page_class()));
    for (int slot = 0; slot < old.count; ++slot) {
      slots.push_back(pages.back());
      slots.back().count = static_cast<uint16_t>(slot);
    }
  }
  if (reservation.failed()) {
    return absl::ResourceExhaustedError(absl::StrFormat("writing %d entries anew needs %d bytes of pages; %d are free", list.entries(),
                                                        reservation.bytes_asked(),
                                                        pool.BytesFree(landing_class) + reservation.bytes_taken()));
  }
  MirroredBuffer rows, places;
  const auto row_bytes = static_cast<int64_t>(floats * sizeof(float)), place_bytes = static_cast<int64_t>(slots.size() * sizeof(PageRef));
  absl::Status status = rows.Ensure(backend, 2 * row_bytes);
  if (status.ok()) status = places.Ensure(backend, place_bytes);
  if (!status.ok()) return status;
  std::copy(keys.begin(), keys.end(), rows.host<float>());
  std::copy(values.begin(), values.end(), rows.host<float>() + floats);
  std::copy(slots.begin(), slots.end(), places.host<PageRef>());
  rows.Upload(backend, 0, 2 * row_bytes, stream);
  places.Upload(backend, 0, place_bytes, stream);
  AppendKvArgs args;
  args.k = MakeTensor(rows.device<float>(), DType::kF32, list.entries(), 1, shape.head_dim);
  args.v = MakeTensor(rows.device<float>() + floats, DType::kF32, list.entries(), 1, shape.head_dim);
  args.slots = MakeTensor(places.device<PageRef>(), DType::kBytes, list.entries(), 1);
  args.arena = arena->data();
  backend.AppendKv(args, stream);
  if (status = stream.Synchronize(); !status.ok()) return status;  // the buffers go

  sequence.device_bytes += reservation.bytes_taken();
  sequence.peak_device_bytes = std::max(sequence.peak_device_bytes, sequence.device_bytes);
  for (const PageRef& old : list.pages) {
    resident_entries += old.count;
    ReleasePage(sequence, old);
  }
  list.pages = std::move(pages);
  ++sequence.version;
  reservation.Keep();
  return absl::OkStatus();
}

}  // namespace loupe
