#include "engine/batch.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace loupe {
namespace {

bool WantsToken(const BatchItem& item) {
  const EngineSequence& s = *item.sequence;
  return s.num_computed() + item.rows() == s.num_known() && s.num_output() < s.request().max_tokens;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepBatch>> StepBatch::Create(Backend& backend, int max_rows, int max_sequences, int vocab_size) {
  std::unique_ptr<StepBatch> batch(new StepBatch());
  batch->max_rows_ = max_rows;
  batch->max_sequences_ = max_sequences;
  batch->vocab_size_ = vocab_size;
  const auto take = [&](int64_t count, std::unique_ptr<DeviceBuffer>* out) {
    auto buffer = backend.Allocate(count * 4);
    if (buffer.ok()) *out = *std::move(buffer);
    return buffer.status();
  };
  if (absl::Status s = take(max_rows, &batch->ids_); !s.ok()) return s;
  if (absl::Status s = take(max_rows, &batch->target_rows_); !s.ok()) return s;
  if (absl::Status s = take(max_sequences, &batch->logit_rows_); !s.ok()) return s;
  if (absl::Status s = take(int64_t{max_sequences} * vocab_size, &batch->logits_); !s.ok()) return s;
  return batch;
}

void StepBatch::FillKvItems(const std::vector<BatchItem>& items, std::vector<KvStepItem>* kv_items) {
  kv_items->clear();
  for (const BatchItem& item : items) {
    const bool ends_prefill = item.prompt_rows > 0 && item.prompt_rows == item.sequence->prompt_rows();
    kv_items->push_back({item.sequence->kv(), item.prompt_rows, item.decode_rows, ends_prefill});
  }
}

void StepBatch::Build(const std::vector<BatchItem>& items) {
  auto* ids = static_cast<int32_t*>(ids_->data());
  auto* logit_rows = static_cast<int32_t*>(logit_rows_->data());
  sampled_.clear();
  int row = 0;
  const auto add = [&](const BatchItem& item, int rows) {
    if (rows == 0) return;
    LOUPE_CHECK_LE(row + rows, max_rows_) << "rows of a step";
    for (int i = 0; i < rows; ++i) ids[row++] = item.sequence->token(item.sequence->num_computed() + i);
    if (!WantsToken(item)) return;
    LOUPE_CHECK(static_cast<int>(sampled_.size()) < max_sequences_) << sampled_.size() << " samples want logits";
    logit_rows[sampled_.size()] = row - 1;
    sampled_.push_back(item.sequence);
  };
  for (const BatchItem& item : items) {
    LOUPE_CHECK(item.prompt_rows == 0 || item.decode_rows == 0) << "a sample has rows of both phases in one step";
    add(item, item.prompt_rows);
  }
  prompt_rows_ = row;
  logit_prompt_rows_ = static_cast<int>(sampled_.size());
  for (const BatchItem& item : items) add(item, item.decode_rows);
  num_rows_ = row;
}

namespace {

// Prompt rows of the item whose next token is known from the prompt.
int TargetRows(const BatchItem& item) {
  return std::min(item.prompt_rows, item.sequence->num_prompt() - 1 - item.sequence->num_computed());
}

}  // namespace

void StepBatch::BuildTargets(const std::vector<BatchItem>& items, const KvCache& cache) {
  targets_.clear();
  auto* rows = static_cast<int32_t*>(target_rows_->data());
  int32_t row = 0;
  for (const BatchItem& item : items) {
    const EngineSequence& s = *item.sequence;
    for (int i = 0; i < TargetRows(item) && cache.WantsSurprisal(s.kv()); ++i) {
      rows[targets_.size()] = row + i;
      targets_.push_back(s.token(s.num_computed() + i + 1));
    }
    row += item.prompt_rows;
  }
  surprisal_.resize(targets_.size());
}

void StepBatch::GiveSurprisal(const std::vector<BatchItem>& items, KvCache& cache) const {
  size_t at = 0;
  for (const BatchItem& item : items) {
    if (item.prompt_rows == 0 || !cache.WantsSurprisal(item.sequence->kv())) continue;
    const float none = 0;  // nothing precedes the first token
    if (item.sequence->num_computed() == 0) cache.AddSurprisal(item.sequence->kv(), {&none, 1});
    const size_t count = static_cast<size_t>(TargetRows(item));
    cache.AddSurprisal(item.sequence->kv(), {surprisal_.data() + at, count});
    at += count;
  }
}

Tensor StepBatch::target_rows() const {
  return targets_.empty() ? Tensor{} : MakeTensor(target_rows_->data(), DType::kI32, static_cast<int64_t>(targets_.size()));
}

Tensor StepBatch::logit_block() const {
  Tensor t = MakeTensor(logits_->data(), DType::kF32, max_sequences_, vocab_size_);
  t.rank = 2;
  return t;
}

Tensor StepBatch::ids() const { return MakeTensor(ids_->data(), DType::kI32, num_rows_); }

Tensor StepBatch::logit_rows() const {
  return sampled_.empty() ? Tensor{} : MakeTensor(logit_rows_->data(), DType::kI32, static_cast<int64_t>(sampled_.size()));
}

Tensor StepBatch::logits() const {
  Tensor t = MakeTensor(logits_->data(), DType::kF32, static_cast<int64_t>(sampled_.size()), vocab_size_);
  t.rank = 2;
  return t;
}

}  // namespace loupe
