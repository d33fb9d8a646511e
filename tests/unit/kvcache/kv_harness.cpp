#include "tests/unit/kvcache/kv_harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace loupe {
namespace {

uint32_t Mix(uint32_t h, uint32_t x) {
  h ^= x + 0x9e3779b9u + (h << 6) + (h >> 2);
  h *= 0x85ebca6bu;
  return h ^ (h >> 13);
}

}  // namespace

bool RandomSubsetPolicy::Keeps(bool after_prefill, int list_seed, int position, int last) const {
  if (position == last) return true;
  const uint32_t of_list = Mix(seed_, static_cast<uint32_t>(list_seed));
  const uint32_t percent = after_prefill ? of_list % 101 : 70 + of_list % 31;
  return Mix(Mix(of_list, static_cast<uint32_t>(last)), static_cast<uint32_t>(position)) % 100 < percent;
}

void RandomSubsetPolicy::Act(bool after_prefill, std::span<const ListView> lists, std::vector<ListAction>* actions) const {
  for (const ListView& list : lists) {
    if (list.positions.empty()) continue;
    ListAction action{list.layer, list.kv_head, {}};
    for (size_t e = 0; e < list.positions.size(); ++e) {
      if (Keeps(after_prefill, list.layer * 100 + list.kv_head, list.positions[e], list.positions.back())) {
        action.keep.push_back(static_cast<int32_t>(e));
      }
    }
    actions->push_back(std::move(action));
  }
}

void RandomSubsetPolicy::AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const {
  Act(true, sequence.lists, actions);
}

void RandomSubsetPolicy::AfterDecode(const SequenceView& sequence, std::vector<ListAction>* actions) const {
  if (ActsAt(sequence.lists[0].positions.back())) Act(false, sequence.lists, actions);
}

KvHarness::KvHarness(const HarnessOptions& options) : options_(options), random_(options.seed) {
  backend_ = MakeBackend({.device = "cpu", .num_threads = 2, .exact = options.exact, .isa = ""}).value();
  stream_ = backend_->NewStream();
  KvShape shape;
  shape.num_layers = options.layers;
  shape.num_heads = options.groups * options.heads_per_group;
  shape.num_kv_heads = options.groups;
  shape.head_dim = options.head_dim;
  shape.windows = options.windows;
  if (options.sinks) {
    for (int layer = 0; layer < options.layers; ++layer) shape.sinks.push_back(RandomValues(static_cast<size_t>(shape.num_heads)));
  }
  sinks_ = shape.sinks;
  KvConfig config;
  config.device_bytes = options.arena_bytes;
  config.max_sequences = options.max_sequences;
  cache_ = KvCache::Create(config, shape, *backend_).value();
}

// Multiples of 1/8 in [-2, 2]: exact in every 2-byte format, so that storing them costs no accuracy.
std::vector<float> KvHarness::RandomValues(size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(static_cast<int>(random_() % 33) - 16) / 8;
  return values;
}

SeqId KvHarness::Open(const RandomSubsetPolicy* policy) {
  const SeqId id = policy ? cache_->Open(*policy).value() : cache_->Open().value();
  ModelSequence& model = model_[id.value];
  model.policy = policy;
  model.lists.resize(static_cast<size_t>(options_.layers * options_.groups));
  return id;
}

absl::StatusOr<SeqId> KvHarness::Fork(SeqId parent) {
  auto id = cache_->Fork(parent);
  if (id.ok()) model_[id->value] = model_.at(parent.value);
  return id;
}

void KvHarness::Close(SeqId seq) {
  cache_->Close(seq);
  model_.erase(seq.value);
}

std::vector<KvHarness::Row> KvHarness::RowsOf(const std::vector<KvStepItem>& items) const {
  std::vector<Row> rows;
  for (size_t i = 0; i < items.size(); ++i) {
    const int begin = model_.at(items[i].seq.value).num_tokens;
    for (int r = 0; r < items[i].num_prompt_rows; ++r) rows.push_back({static_cast<int>(i), begin + r});
  }
  for (size_t i = 0; i < items.size(); ++i) {
    const int begin = model_.at(items[i].seq.value).num_tokens + items[i].num_prompt_rows;
    for (int r = 0; r < items[i].num_decode_rows; ++r) rows.push_back({static_cast<int>(i), begin + r});
  }
  return rows;
}

std::vector<std::vector<const KvHarness::Entry*>> KvHarness::Seen(SeqId seq, int layer, int position) const {
  const int window = options_.windows.empty() ? 0 : options_.windows[static_cast<size_t>(layer)];
  std::vector<std::vector<const Entry*>> seen(static_cast<size_t>(options_.groups));
  for (size_t g = 0; g < seen.size(); ++g) {
    for (const Entry& e : model_.at(seq.value).lists[static_cast<size_t>(layer * options_.groups) + g]) {
      if (e.position <= position && (window == 0 || e.position > position - window)) seen[g].push_back(&e);
    }
  }
  return seen;
}

std::vector<double> KvHarness::Softmax(int layer, const float* q, const std::vector<std::vector<const Entry*>>& seen) const {
  const int dim = options_.head_dim, group_heads = options_.heads_per_group;
  std::vector<double> out(static_cast<size_t>(options_.groups * group_heads * dim), 0.0);
  for (int h = 0; h < options_.groups * group_heads; ++h) {
    const auto& entries = seen[static_cast<size_t>(h / group_heads)];
    double denominator = options_.sinks ? std::exp(double{sinks_[static_cast<size_t>(layer)][static_cast<size_t>(h)]}) : 0;
    std::vector<double> sum(static_cast<size_t>(dim), 0.0);
    for (const Entry* e : entries) {
      double dot = 0;
      for (int d = 0; d < dim; ++d) dot += double{q[h * dim + d]} * double{e->k[static_cast<size_t>(d)]};
      const double weight = std::exp(dot * static_cast<double>(cache_->shape().scale));
      denominator += weight;
      for (size_t d = 0; d < sum.size(); ++d) sum[d] += weight * double{e->v[d]};
    }
    for (size_t d = 0; d < sum.size(); ++d) out[static_cast<size_t>(h * dim) + d] = entries.empty() ? 0 : sum[d] / denominator;
  }
  return out;
}

std::vector<double> KvHarness::Oracle(SeqId seq, int layer, const float* q, int position) const {
  return Softmax(layer, q, Seen(seq, layer, position));
}

std::vector<double> KvHarness::OracleWithZeroEntry(SeqId seq, int layer, const float* q, int position,
                                                   const std::vector<SeqId>& extra) const {
  const std::vector<float> zero(static_cast<size_t>(options_.head_dim), 0.f);
  const Entry entry{position, zero, zero};
  auto seen = Seen(seq, layer, position);
  for (size_t g = 0; g < seen.size(); ++g) {
    seen[g].push_back(&entry);
    for (SeqId other : extra) {
      for (const Entry& e : model_.at(other.value).lists[static_cast<size_t>(layer * options_.groups) + g]) seen[g].push_back(&e);
    }
  }
  return Softmax(layer, q, seen);
}

void KvHarness::RunLayer(KvBatch& batch, int layer, const std::vector<KvStepItem>& items, const std::vector<Row>& rows) {
  const int groups = options_.groups, dim = options_.head_dim, heads = groups * options_.heads_per_group;
  const size_t kv_width = static_cast<size_t>(groups * dim), q_width = static_cast<size_t>(heads * dim);
  std::vector<float> k = RandomValues(rows.size() * kv_width), v = RandomValues(rows.size() * kv_width);
  std::vector<float> q = RandomValues(rows.size() * q_width), out(rows.size() * q_width, NAN);
  for (size_t r = 0; r < rows.size(); ++r) {
    ModelSequence& model = model_.at(items[static_cast<size_t>(rows[r].item)].seq.value);
    for (int g = 0; g < groups; ++g) {
      const auto at = static_cast<std::ptrdiff_t>(r * kv_width) + g * dim;
      model.lists[static_cast<size_t>(layer * groups + g)].push_back(
          {rows[r].position, {k.begin() + at, k.begin() + at + dim}, {v.begin() + at, v.begin() + at + dim}});
    }
  }
  const auto count = static_cast<int64_t>(rows.size());
  cache_->Append(batch, layer, MakeTensor(k.data(), DType::kF32, count, groups, dim), MakeTensor(v.data(), DType::kF32, count, groups, dim),
                 *stream_);
  cache_->Attend(batch, layer, MakeTensor(q.data(), DType::kF32, count, heads, dim),
                 MakeTensor(out.data(), DType::kF32, count, heads, dim), *stream_);
  ASSERT_TRUE(stream_->Synchronize().ok());
  // Inputs are exact, |v| <= 2. The f32 path errs by a few 1e-6, the fast one rounds weights to 8 bits.
  const double bound = options_.exact ? 2e-5 : 2e-2;
  for (size_t r = 0; r < rows.size(); ++r) {
    const SeqId seq = items[static_cast<size_t>(rows[r].item)].seq;
    const std::vector<double> expected = Oracle(seq, layer, q.data() + r * q_width, rows[r].position);
    ++rows_checked_;
    for (size_t i = 0; i < q_width; ++i) {
      const double got = double{out[r * q_width + i]};
      ASSERT_TRUE(std::abs(got - expected[i]) <= bound)
          << "layer " << layer << " row " << r << " position " << rows[r].position << " of sequence " << seq.value << " element " << i
          << ": " << got << " against " << expected[i] << ", seed " << options_.seed;
    }
  }
}

void KvHarness::ForgetRows(const std::vector<KvStepItem>& items) {
  for (const KvStepItem& item : items) {
    ModelSequence& model = model_.at(item.seq.value);
    for (auto& list : model.lists) {
      while (!list.empty() && list.back().position >= model.num_tokens) list.pop_back();
    }
  }
}

absl::Status KvHarness::Step(const std::vector<KvStepItem>& items, StepEnd end) {
  const bool comparable = cache_->Stats().retired_bytes == 0;
  const std::string before = cache_->DebugDump();
  const absl::Status status = cache_->Reserve(items, &batch_);
  if (!status.ok()) {
    if (comparable) {
      EXPECT_EQ(before, cache_->DebugDump()) << "a refused step changed something, seed " << options_.seed;
    }
    return status;
  }
  const std::vector<Row> rows = RowsOf(items);
  EXPECT_EQ(static_cast<size_t>(batch_.num_rows), rows.size());
  cache_->Audit();
  if (end != StepEnd::kAbandonAtOnce) {
    cache_->Begin(batch_, *stream_);
    for (size_t r = 0; r < rows.size(); ++r) EXPECT_EQ(batch_.positions.as<int32_t>()[r], rows[r].position);
    const int layers = end == StepEnd::kCommit ? options_.layers : 1;
    for (int layer = 0; layer < layers; ++layer) RunLayer(batch_, layer, items, rows);
  }
  if (end != StepEnd::kCommit) {
    cache_->Abandon(batch_);
    if (end == StepEnd::kAbandonAtOnce && comparable) {
      EXPECT_EQ(before, cache_->DebugDump()) << "seed " << options_.seed;
    }
    ForgetRows(items);
    return absl::OkStatus();
  }
  cache_->Commit(batch_, *stream_);
  for (const KvStepItem& item : items) FollowPolicy(item);
  return absl::OkStatus();
}

std::vector<KvHarness::Entry> KvHarness::Thinned(const ModelSequence& model, int list, bool after_prefill) const {
  const int list_seed = list / options_.groups * 100 + list % options_.groups;
  std::vector<Entry> kept;
  for (const Entry& e : model.lists[static_cast<size_t>(list)]) {
    if (model.policy->Keeps(after_prefill, list_seed, e.position, model.num_tokens - 1)) kept.push_back(e);
  }
  return kept;
}

// The model keeps entries that left a window for ever; the cache frees them by whole pages.
bool KvHarness::HoldsExactly(SeqId seq, int list, const std::vector<Entry>& entries) const {
  const int layer = list / options_.groups;
  const int window = options_.windows.empty() ? 0 : options_.windows[static_cast<size_t>(layer)];
  const std::vector<int32_t> held = cache_->ListPositions(seq, layer, list % options_.groups);
  if (held.size() > entries.size()) return false;
  const size_t missing = entries.size() - held.size();
  for (size_t e = 0; e < held.size(); ++e) {
    if (held[e] != entries[missing + e].position) return false;
  }
  const int oldest_needed = window > 0 ? model_.at(seq.value).num_tokens - window + 1 : 0;
  if (missing > 0 && entries[missing - 1].position >= oldest_needed) return false;
  return std::count_if(held.begin(), held.end(), [&](int32_t p) { return p < oldest_needed; }) < kPageEntries;
}

void KvHarness::FollowPolicy(const KvStepItem& item) {
  ModelSequence& model = model_.at(item.seq.value);
  model.num_tokens += item.num_prompt_rows + item.num_decode_rows;
  if (!model.policy) return;
  model.prefill_pending |= item.ends_prefill;
  const bool after_prefill = model.prefill_pending;
  if (!after_prefill && (item.num_decode_rows == 0 || !RandomSubsetPolicy::ActsAt(model.num_tokens - 1))) return;
  std::vector<std::vector<Entry>> thinned;
  bool applied = true;
  for (int list = 0; list < options_.layers * options_.groups; ++list) {
    thinned.push_back(Thinned(model, list, after_prefill));
    applied &= HoldsExactly(item.seq, list, thinned.back());
  }
  if (applied) {
    model.lists = std::move(thinned);
    model.prefill_pending = false;
    return;
  }
  // All or nothing: then every list must be as it was, which CheckBooks verifies.
  ++failed_repacks_;
}

int64_t KvHarness::ExpectedBytes() const {
  const int64_t large = MakePageLayout(PageClass{options_.format(), false, false}, options_.head_dim).bytes;
  const int64_t small = MakePageLayout(PageClass{options_.format(), true, false}, options_.head_dim).bytes;
  int64_t bytes = 0;
  for (const auto& [id, model] : model_) {
    for (int list = 0; list < options_.layers * options_.groups; ++list) {
      const auto entries = static_cast<int64_t>(cache_->ListPositions(SeqId{id}, list / options_.groups, list % options_.groups).size());
      const int64_t tail = entries % kPageEntries;
      bytes += entries / kPageEntries * large + (tail == 0 ? 0 : tail <= kSmallPageEntries ? small : large);
    }
  }
  return bytes;
}

void KvHarness::CheckBooks() {
  cache_->Audit();
  const KvStats stats = cache_->Stats();
  EXPECT_EQ(stats.num_sequences, num_open());
  const int64_t full_entry_bytes = int64_t{options_.layers} * options_.groups * options_.entry_bytes();
  std::map<uint32_t, PageRef> pages;
  for (const auto& [id, model] : model_) {
    EXPECT_EQ(cache_->num_tokens(SeqId{id}), model.num_tokens);
    const KvSequenceReport report = cache_->Report(SeqId{id});
    int64_t device_bytes = 0, kept = 0;
    for (int list = 0; list < options_.layers * options_.groups; ++list) {
      ASSERT_TRUE(HoldsExactly(SeqId{id}, list, model.lists[static_cast<size_t>(list)]))
          << "list " << list << " of sequence " << id << ", seed " << options_.seed;
      for (const PageRef& ref : cache_->ListPages(SeqId{id}, list / options_.groups, list % options_.groups)) {
        pages[ref.unit] = ref;
        kept += ref.count;
        device_bytes += MakePageLayout(ref.page_class(), options_.head_dim).bytes;
      }
    }
    EXPECT_EQ(report.device_bytes, device_bytes);
    EXPECT_EQ(report.entries_kept, kept);
    EXPECT_EQ(report.full_bytes, model.num_tokens * full_entry_bytes);
  }
  int64_t bytes = 0, entries = 0;
  for (const auto& [unit, ref] : pages) {
    bytes += MakePageLayout(ref.page_class(), options_.head_dim).bytes;
    entries += ref.count;
  }
  EXPECT_EQ(stats.pages, static_cast<int64_t>(pages.size()));
  EXPECT_EQ(stats.resident_bytes, bytes);
  EXPECT_EQ(stats.resident_entries, entries);
  EXPECT_LE(stats.resident_bytes + stats.retired_bytes, stats.slab_bytes);
  EXPECT_LE(stats.slab_bytes, stats.capacity_bytes);
}

}  // namespace loupe
