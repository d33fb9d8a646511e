#include "kvcache/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kernels/spherical.h"
#include "kvcache/kv_cache_impl.h"

namespace loupe {
namespace {

absl::Status CheckShape(const KvConfig& config, const KvShape& shape, const PageClass& landing_class) {
  if (shape.num_layers <= 0 || shape.num_kv_heads <= 0 || shape.head_dim <= 0 || shape.num_heads <= 0 ||
      shape.num_heads % shape.num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrFormat("a KV cache of %d layers, %d query heads, %d kv heads of %d dimensions cannot be",
                                                      shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim));
  }
  const int64_t page_bytes = MakePageLayout(landing_class, shape.head_dim).bytes;
  if (page_bytes > kSlabBytes) {
    return absl::InvalidArgumentError(absl::StrFormat("a page of 64 entries of %d dimensions has %d bytes, a slab has %d",
                                                      shape.head_dim, page_bytes, kSlabBytes));
  }
  if (config.max_sequences <= 0 || config.max_step_rows <= 0) {
    return absl::InvalidArgumentError(absl::StrFormat("max_sequences is %d and max_step_rows is %d; both are at least 1",
                                                      config.max_sequences, config.max_step_rows));
  }
  const size_t layers = static_cast<size_t>(shape.num_layers);
  if ((!shape.windows.empty() && shape.windows.size() != layers) || (!shape.sinks.empty() && shape.sinks.size() != layers)) {
    return absl::InvalidArgumentError(absl::StrFormat("%d windows and %d sinks for %d layers; give one a layer or none",
                                                      shape.windows.size(), shape.sinks.size(), shape.num_layers));
  }
  for (int window : shape.windows) {
    if (window < 0) return absl::InvalidArgumentError(absl::StrFormat("a window of %d positions cannot be", window));
  }
  for (const std::vector<float>& sinks : shape.sinks) {
    if (sinks.size() == static_cast<size_t>(shape.num_heads)) continue;
    return absl::InvalidArgumentError(absl::StrFormat("a layer has %d sinks for %d query heads", sinks.size(), shape.num_heads));
  }
  return absl::OkStatus();
}

// An eighth of the arena, rounded up: few sequences at a time have a short tail. Two slabs are too few to share.
int MaxSmallSlabs(int num_slabs) { return num_slabs <= 2 ? 0 : (num_slabs + 7) / 8; }

}  // namespace

KvBatch::KvBatch() : state_(std::make_unique<State>()) {}
KvBatch::~KvBatch() {
  LOUPE_CHECK(!state_ || !state_->in_flight) << "a reserved batch is destroyed; commit or abandon it first";
}
KvBatch::KvBatch(KvBatch&&) noexcept = default;
KvBatch& KvBatch::operator=(KvBatch&& other) noexcept {
  LOUPE_CHECK(!state_ || !state_->in_flight) << "a reserved batch is overwritten; commit or abandon it first";
  num_rows = other.num_rows;
  prompt_rows = other.prompt_rows;
  num_items = other.num_items;
  positions = other.positions;
  state_ = std::move(other.state_);
  return *this;
}

bool KvBatch::recordable() const {
  const auto set = [](const Tensor& pages) { return pages.defined(); };
  return prompt_rows == 0 && !state_->wants_mass && !state_->wants_probability && !state_->wants_rows &&
         std::none_of(state_->extra_pages.begin(), state_->extra_pages.end(), set);
}
bool KvBatch::only_advances() const { return state_->advances && state_->num_tails == 0 && state_->copies.empty(); }
// Positions lie first in the row buffer; the table of pages has a buffer of its own. A step with coded pages reads them with
// other kernels.
std::pair<const void*, const void*> KvBatch::place() const {
  return {state_->row_buffer.device<char>() + (state_->coded ? 1 : 0), state_->page_buffer.device<char>()};
}

KvCache::Impl::Impl(const KvConfig& kv_config, const KvShape& kv_shape, Backend& kv_backend, std::unique_ptr<SlabArena> slab_arena)
    : config(kv_config), shape(kv_shape), backend(kv_backend),
      landing_class{kv_backend.Info().dense_format, false, false},
      arena(std::move(slab_arena)), pool(arena.get(), kv_shape.head_dim, MaxSmallSlabs(arena->num_slabs())) {
  if (shape.scale == 0) shape.scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
}

absl::Status KvCache::Impl::LoadConstants() {
  auto counter = backend.Allocate(sizeof faults_on_host);
  if (!counter.ok()) return counter.status();
  faults = *std::move(counter);
  if (shape.sinks.empty()) return absl::OkStatus();
  auto buffer = backend.Allocate(int64_t{shape.num_layers} * shape.num_heads * 4);
  if (!buffer.ok()) return buffer.status();
  sinks = *std::move(buffer);
  std::vector<float> values;
  for (const std::vector<float>& layer : shape.sinks) values.insert(values.end(), layer.begin(), layer.end());
  const std::unique_ptr<Stream> stream = backend.NewStream();
  backend.Copy(sinks->data(), values.data(), static_cast<int64_t>(values.size() * sizeof(float)), *stream);
  return stream->Synchronize();
}

absl::Status KvCache::Impl::SetMeanKeys(std::span<const float> values) {
  LOUPE_CHECK_EQ(static_cast<int64_t>(values.size()), int64_t{num_lists()} * shape.head_dim) << "mean keys of another shape";
  LOUPE_CHECK(sequences.empty()) << "mean keys come before the first sequence";
  auto buffer = backend.Allocate(static_cast<int64_t>(values.size_bytes()));
  if (!buffer.ok()) return buffer.status();
  mean_keys = *std::move(buffer);
  const std::unique_ptr<Stream> stream = backend.NewStream();
  backend.Copy(mean_keys->data(), values.data(), static_cast<int64_t>(values.size_bytes()), *stream);
  return stream->Synchronize();
}

Sequence& KvCache::Impl::Get(SeqId seq) const {
  Sequence& sequence = Find(seq);
  Settle(sequence);
  return sequence;
}

Sequence& KvCache::Impl::Find(SeqId seq) const {
  const auto found = sequences.find(seq.value);
  LOUPE_CHECK(found != sequences.end()) << "sequence " << seq.value << " is not open";
  return *found->second;
}

absl::StatusOr<SeqId> KvCache::Impl::Open(const Policy& policy) {
  if (static_cast<int>(sequences.size()) >= config.max_sequences) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d sequences are open, the limit is %d; close one first", sequences.size(), config.max_sequences));
  }
  auto sequence = std::make_unique<Sequence>();
  sequence->id = next_id++;
  sequence->policy = &policy;
  sequence->lists.resize(static_cast<size_t>(num_lists()));
  Land(sequence.get(), /*prompt=*/true);
  if (!policy.keeps_everything()) sequence->signals = policy.signals();
  if (sequence->signals.columns.stride > 0) sequence->columns.resize(static_cast<size_t>(num_lists() * heads_per_group()));
  if (sequence->signals.output_norms) sequence->output_norms.resize(static_cast<size_t>(shape.num_layers));
  if (sequence->signals.entries) {
    sequence->keys.resize(static_cast<size_t>(shape.num_layers));
    sequence->values.resize(static_cast<size_t>(shape.num_layers));
  }
  sequence->window.rows = sequence->signals.window_query_rows;
  sequence->window.values.resize(static_cast<size_t>(sequence->window.rows) * static_cast<size_t>(shape.num_layers) *
                                 static_cast<size_t>(shape.num_heads) * static_cast<size_t>(shape.head_dim));
  const SeqId id{sequence->id};
  sequences.emplace(id.value, std::move(sequence));
  return id;
}

absl::StatusOr<SeqId> KvCache::Impl::Fork(SeqId parent) {
  Sequence& original = Get(parent);
  LOUPE_CHECK(!original.in_flight) << "sequence " << parent.value << " is part of a reserved step";
  absl::StatusOr<SeqId> id = Open(*original.policy);
  if (!id.ok()) return id;
  original.may_share = true;
  ++original.version;
  Sequence& copy = Get(*id);
  copy = original;
  copy.id = id->value;
  copy.peak_device_bytes = copy.device_bytes;
  copy.entries_dropped = original.entries_dropped;
  for (const KvList& list : copy.lists) {
    for (const PageRef& ref : list.pages) pool.Share(ref.unit);
  }
  return id;
}

void KvCache::Impl::Land(Sequence* sequence, bool prompt) const {
  sequence->landing = sequence->policy->landing_format(prompt).value_or(landing_class.format);
  const bool coded = IsCoded(sequence->landing.key) || IsCoded(sequence->landing.value);
  LOUPE_CHECK(!coded || shape.head_dim % spherical::kDimStep == 0) << "a head of " << shape.head_dim << " dimensions is not coded";
  sequence->coded |= coded;
}

void KvCache::Impl::ReleasePage(Sequence& sequence, const PageRef& ref) {
  sequence.device_bytes -= pool.PageBytes(ref.page_class());
  if (pool.Release(ref.unit)) resident_entries -= ref.count;
}

void KvCache::Impl::Close(SeqId seq) {
  Sequence& sequence = Get(seq);
  LOUPE_CHECK(!sequence.in_flight) << "sequence " << seq.value << " is part of a reserved step";
  for (const KvList& list : sequence.lists) {
    for (const PageRef& ref : list.pages) ReleasePage(sequence, ref);
  }
  sequences.erase(seq.value);
  if (in_flight.empty()) pool.DrainRetired();
}

// ---- the public face

KvCache::KvCache() = default;
KvCache::~KvCache() = default;

absl::StatusOr<std::unique_ptr<KvCache>> KvCache::Create(const KvConfig& config, const KvShape& shape, Backend& backend) {
  if (const absl::Status status = CheckShape(config, shape, {backend.Info().dense_format, false, false}); !status.ok()) return status;
  auto arena = SlabArena::Create(config.device_bytes, backend);
  if (!arena.ok()) return arena.status();
  std::unique_ptr<KvCache> cache(new KvCache);
  cache->impl_ = std::make_unique<Impl>(config, shape, backend, *std::move(arena));
  if (const absl::Status status = cache->impl_->LoadConstants(); !status.ok()) return status;
  return cache;
}

absl::StatusOr<SeqId> KvCache::Open(const Policy& policy) { return impl_->Open(policy); }
absl::StatusOr<SeqId> KvCache::Fork(SeqId parent) { return impl_->Fork(parent); }
absl::StatusOr<SeqId> KvCache::Fork(SeqId parent, const Policy& policy, Stream& stream) { return impl_->Fork(parent, policy, stream); }
void KvCache::Close(SeqId seq) { impl_->Close(seq); }
int KvCache::num_tokens(SeqId seq) const { return impl_->Find(seq).num_tokens; }

absl::Status KvCache::Reserve(std::span<const KvStepItem> items, KvBatch* batch) { return impl_->Reserve(items, batch); }
void KvCache::Begin(KvBatch& batch, Stream& stream) { impl_->Begin(batch.state_.get(), stream); }
void KvCache::SetRun(KvBatch& batch, bool run) {
  LOUPE_CHECK(batch.recordable() && (batch.state_->begun || batch.only_advances())) << "a step that cannot be recorded";
  if (batch.only_advances()) batch.state_->begun = run;
  std::fill(batch.state_->appended.begin(), batch.state_->appended.end(), run ? 1 : 0);
}
void KvCache::Append(KvBatch& batch, int layer, const Tensor& k, const Tensor& v, Stream& stream, const Rotation& rotation) {
  impl_->Append(batch.state_.get(), layer, k, v, stream, rotation);
}
void KvCache::Attend(KvBatch& batch, int layer, const Tensor& q, const Tensor& out, Stream& stream) {
  impl_->Attend(batch.state_.get(), layer, q, out, stream);
}
void KvCache::SetExtraPages(KvBatch& batch, int layer, const Tensor& pages, const Tensor& counts) {
  LOUPE_CHECK(batch.state_->in_flight && layer >= 0 && layer < impl_->shape.num_layers) << "extra pages for layer " << layer;
  batch.state_->extra_pages[static_cast<size_t>(layer)] = pages;
  batch.state_->extra_counts[static_cast<size_t>(layer)] = counts;
}
void KvCache::Commit(KvBatch& batch, Stream& stream) { impl_->Commit(batch.state_.get(), stream); }
void KvCache::Abandon(KvBatch& batch) { impl_->Abandon(batch.state_.get()); }

absl::Status KvCache::Repack(SeqId seq, std::span<const ListAction> actions, Stream& stream) {
  Sequence& sequence = impl_->Get(seq);
  LOUPE_CHECK(!sequence.in_flight) << "sequence " << seq.value << " is part of a reserved step";
  if (impl_->in_flight.empty()) impl_->pool.DrainRetired();
  return impl_->Repack(sequence, actions, stream);
}

absl::Status KvCache::Rewrite(SeqId seq, int layer, int kv_head, std::span<const float> keys, std::span<const float> values,
                              Stream& stream) {
  Sequence& sequence = impl_->Get(seq);
  LOUPE_CHECK(!sequence.in_flight) << "sequence " << seq.value << " is part of a reserved step";
  if (impl_->in_flight.empty()) impl_->pool.DrainRetired();
  return impl_->Rewrite(sequence, layer * impl_->shape.num_kv_heads + kv_head, keys, values, stream);
}

int64_t KvCache::BytesForTokens(int num_tokens) const {
  if (num_tokens <= 0) return 0;
  // A small tail that grows is held together with the page that takes it over: up to 16 entries more.
  const int64_t pages = (int64_t{num_tokens} + kSmallPageEntries + kPageEntries - 1) / kPageEntries;
  return pages * impl_->num_lists() * impl_->pool.PageBytes(impl_->landing_class);
}
int KvCache::LongestSequence() const {
  const int64_t large_slabs = impl_->arena->num_slabs() - impl_->pool.max_small_slabs();
  const int64_t pages = large_slabs * (kSlabBytes / impl_->pool.PageBytes(impl_->landing_class));
  return static_cast<int>(std::min<int64_t>(pages / impl_->num_lists() * kPageEntries, std::numeric_limits<int>::max()));
}
PageFormat KvCache::dense_format() const { return impl_->landing_class.format; }
int64_t KvCache::dense_entry_bytes() const { return impl_->dense_entry_bytes(); }
int64_t KvCache::device_bytes(SeqId seq) const { return impl_->Find(seq).device_bytes; }
PolicyContext KvCache::policy_context(int num_prompt) const {
  PolicyContext context;
  context.num_layers = impl_->shape.num_layers;
  context.num_kv_heads = impl_->shape.num_kv_heads;
  context.heads_per_group = impl_->heads_per_group();
  context.head_dim = impl_->shape.head_dim;
  context.model = impl_->shape.model;
  context.windows = impl_->shape.windows;
  context.max_step_rows = impl_->config.max_step_rows;
  context.dense = context.landing = context.format = impl_->landing_class.format;
  context.entry_bytes = impl_->dense_entry_bytes();
  PageClass page = impl_->landing_class;
  context.page_bytes = impl_->pool.PageBytes(page);
  page.small = true;
  context.small_page_bytes = impl_->pool.PageBytes(page);
  context.num_prompt = num_prompt;
  return context;
}
void KvCache::AddSurprisal(SeqId seq, std::span<const float> surprisal) {
  std::vector<float>& all = impl_->Get(seq).surprisal;
  all.insert(all.end(), surprisal.begin(), surprisal.end());
}
bool KvCache::WantsSurprisal(SeqId seq) const { return impl_->Find(seq).signals.surprisal; }
int64_t KvCache::bytes_free() const { return impl_->pool.BytesFree(impl_->landing_class); }

std::vector<int32_t> KvCache::ListPositions(SeqId seq, int layer, int kv_head) const {
  const PositionPlane& plane = impl_->Get(seq).lists.at(static_cast<size_t>(layer * impl_->shape.num_kv_heads + kv_head)).positions;
  std::vector<int32_t> positions(static_cast<size_t>(plane.size()));
  for (int e = 0; e < plane.size(); ++e) positions[static_cast<size_t>(e)] = plane[e];
  return positions;
}
std::vector<PageRef> KvCache::ListPages(SeqId seq, int layer, int kv_head) const {
  return impl_->Get(seq).lists.at(static_cast<size_t>(layer * impl_->shape.num_kv_heads + kv_head)).pages;
}
bool KvCache::waits_for_room(SeqId seq) const {
  const Sequence& sequence = impl_->Find(seq);
  return sequence.prefill_pending || !sequence.pending.empty();
}
absl::Status KvCache::Retry(SeqId seq, Stream& stream) {
  if (impl_->in_flight.empty()) impl_->pool.DrainRetired();
  return impl_->Retry(impl_->Get(seq), stream);
}
std::vector<SeqId> KvCache::TakeFaults(Stream& stream) { return impl_->TakeFaults(stream); }
absl::Status KvCache::SetMeanKeys(std::span<const float> mean_keys) { return impl_->SetMeanKeys(mean_keys); }
int64_t KvCache::landing_entry_bytes(SeqId seq) const { return EntryBytes(impl_->Find(seq).landing, impl_->shape.head_dim); }
KvSequenceReport KvCache::Report(SeqId seq) const { return impl_->Report(impl_->Get(seq)); }
KvStats KvCache::Stats() const { return impl_->Stats(); }
const KvShape& KvCache::shape() const { return impl_->shape; }
void KvCache::Audit() const { impl_->Audit(); }
std::string KvCache::DebugDump() const { return impl_->Dump(); }

}  // namespace loupe
