// Numbers about the cache, and the audit that recounts them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {
namespace {

KvFormatUse& UseOf(const PageFormat& format, KvSequenceReport* report) {
  for (KvFormatUse& use : report->formats) {
    if (use.format == format) return use;
  }
  report->formats.push_back({format, 0, 0});
  return report->formats.back();
}

}  // namespace

KvSequenceReport KvCache::Impl::Report(const Sequence& sequence) const {
  KvSequenceReport report;
  report.num_tokens = sequence.num_tokens;
  report.device_bytes = sequence.device_bytes;
  report.peak_device_bytes = sequence.peak_device_bytes;
  report.lists = num_lists();
  report.full_bytes = int64_t{sequence.num_tokens} * num_lists() * dense_entry_bytes();
  report.entries_dropped = sequence.entries_dropped;
  report.entries_merged = sequence.entries_merged;
  report.prompt_tokens = sequence.prompt_tokens;
  report.prompt_device_bytes = sequence.prompt_device_bytes;
  report.prompt_full_bytes = int64_t{sequence.prompt_tokens} * num_lists() * dense_entry_bytes();
  for (int i = 0; i < num_lists(); ++i) {
    const KvList& list = sequence.lists[static_cast<size_t>(i)];
    const int layer_window = window(i / shape.num_kv_heads);
    int hidden = layer_window > 0 ? list.positions.LowerBound(sequence.num_tokens - layer_window + 1) : 0;
    report.entries_kept += list.entries();
    report.table_bytes += static_cast<int64_t>(list.pages.size() * sizeof(PageRef));
    for (const PageRef& page : list.pages) {
      KvFormatUse& use = UseOf(page.page_class().format, &report);
      const int unseen = std::min<int>(hidden, page.count);
      hidden -= unseen;
      use.entries += page.count;
      // A page that is seen at all is read with its log-weights.
      const int64_t log_weights = page.log_weights && unseen < page.count ? int64_t{4} * page.count : 0;
      use.read_bytes_per_token += int64_t{page.count - unseen} * EntryBytes(use.format, shape.head_dim) + log_weights;
    }
  }
  for (const KvFormatUse& use : report.formats) {
    report.read_bytes_per_token += use.read_bytes_per_token;
    const double share = static_cast<double>(use.entries) / static_cast<double>(report.entries_kept) * 8 / shape.head_dim;
    report.key_bits += share * static_cast<double>(CodecBytes(use.format.key, shape.head_dim));
    report.value_bits += share * static_cast<double>(CodecBytes(use.format.value, shape.head_dim));
  }
  return report;
}

KvStats KvCache::Impl::Stats() const {
  KvStats stats;
  stats.capacity_bytes = arena->bytes();
  stats.resident_bytes = pool.bytes_used();
  stats.retired_bytes = pool.bytes_retired();
  stats.slab_bytes = pool.slab_bytes();
  stats.resident_entries = resident_entries;
  stats.pages = pool.pages_used();
  stats.small_pages = pool.small_pages_used();
  stats.num_sequences = static_cast<int>(sequences.size());
  stats.reserve_failures = reserve_failures;
  stats.entries_dropped = entries_dropped;
  stats.entries_expired = entries_expired;
  stats.steps_advanced = steps_advanced;
  stats.encode_faults = encode_faults;
  return stats;
}

void KvCache::Impl::AuditList(const Sequence& sequence, int list_index,
                              std::unordered_map<uint32_t, std::pair<int, int>>* owners) const {
  const KvList& list = sequence.lists[static_cast<size_t>(list_index)];
  int entries = 0;
  for (size_t i = 0; i < list.pages.size(); ++i) {
    const PageRef& ref = list.pages[i];
    const bool ends_run = i + 1 == list.pages.size() || list.pages[i + 1].page_class().format != ref.page_class().format;
    LOUPE_CHECK(pool.page_class(ref.unit) == ref.page_class()) << "class of page " << i << " in list " << list_index;
    LOUPE_CHECK(ref.count > 0 && ref.count <= ref.page_class().entries()) << "page " << i << " counts " << ref.count;
    LOUPE_CHECK(ends_run || ref.count == ref.page_class().entries()) << "page " << i << " of list " << list_index << " has room";
    LOUPE_CHECK(i + 1 < list.pages.size() || entries == list.before_tail) << entries << " entries before the last page";
    auto& owner = (*owners)[ref.unit];
    LOUPE_CHECK(owner.first == 0 || owner.second == ref.count) << "owners of unit " << ref.unit << " count differently";
    ++owner.first;
    owner.second = ref.count;
    entries += ref.count;
  }
  const std::vector<ListRun> runs = list.Runs();
  for (size_t i = 0; i < runs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) LOUPE_CHECK(runs[i].format != runs[j].format) << "list " << list_index << " has two runs of one format";
    LOUPE_CHECK(!IsCoded(runs[i].format) || window(list_index / shape.num_kv_heads) == 0) << "list " << list_index << " is coded";
  }
  LOUPE_CHECK(list.regular() || sequence.coded || runs.size() > 1) << "list " << list_index << " has gaps";
  LOUPE_CHECK_EQ(entries, list.entries()) << "entries of list " << list_index << " of sequence " << sequence.id;
  for (int e = 0; e < list.entries(); ++e) {
    const bool in_order = e == 0 || !list.positions.ascending() || list.positions[e - 1] < list.positions[e];
    LOUPE_CHECK(list.positions[e] < sequence.num_tokens && in_order)
        << "position " << list.positions[e] << " of entry " << e << " in list " << list_index;
  }
}

void KvCache::Impl::Audit() const {
  pool.Audit();
  std::unordered_map<uint32_t, std::pair<int, int>> owners;  // unit -> (references, entries)
  for (const auto& [id, sequence] : sequences) {
    LOUPE_CHECK_EQ(id, sequence->id);
    Settle(*sequence);
    int64_t bytes = 0;
    for (int list = 0; list < num_lists(); ++list) {
      AuditList(*sequence, list, &owners);
      for (const PageRef& ref : sequence->lists[static_cast<size_t>(list)].pages) bytes += pool.PageBytes(ref.page_class());
    }
    LOUPE_CHECK_EQ(bytes, sequence->device_bytes) << "bytes of sequence " << id;
    LOUPE_CHECK_GE(sequence->peak_device_bytes, bytes) << "peak of sequence " << id;
  }
  for (const KvBatch::State* state : in_flight) {
    for (const PageRef& ref : state->new_pages) {
      LOUPE_CHECK(owners.emplace(ref.unit, std::make_pair(1, 0)).second) << "unit " << ref.unit << " is reserved and in use";
    }
  }
  int64_t entries = 0, bytes = 0, small = 0;
  for (const auto& [unit, owner] : owners) {
    LOUPE_CHECK_EQ(pool.references(unit), owner.first) << "owners of unit " << unit;
    entries += owner.second;
    bytes += pool.PageBytes(pool.page_class(unit));
    small += pool.page_class(unit).small ? 1 : 0;
  }
  LOUPE_CHECK_EQ(static_cast<int64_t>(owners.size()), pool.pages_used()) << "pages in use";
  LOUPE_CHECK_EQ(small, pool.small_pages_used()) << "small pages in use";
  LOUPE_CHECK_EQ(bytes, pool.bytes_used()) << "bytes in use";
  LOUPE_CHECK_EQ(entries, resident_entries) << "entries in use";
}

std::string KvCache::Impl::Dump() const {
  std::string out = absl::StrFormat("entries %d dropped %d expired %d\n", resident_entries, entries_dropped, entries_expired);
  std::vector<int32_t> ids;
  for (const auto& [id, sequence] : sequences) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (int32_t id : ids) {
    Sequence& sequence = *sequences.at(id);
    Settle(sequence);
    out += absl::StrFormat("sequence %d tokens %d bytes %d peak %d in flight %d pending %d\n", id, sequence.num_tokens,
                           sequence.device_bytes, sequence.peak_device_bytes, sequence.in_flight, sequence.prefill_pending);
    for (const KvList& list : sequence.lists) {
      for (const PageRef& ref : list.pages) {
        out += absl::StrFormat(" %d:%d%s%s", ref.unit, ref.count, FormatName(ref.page_class().format), ref.small ? " small" : "");
      }
      out += " |";
      for (int e = 0; e < list.entries(); ++e) out += absl::StrFormat(" %d", list.positions[e]);
      out += "\n";
    }
  }
  return out + pool.Dump();
}

}  // namespace loupe
