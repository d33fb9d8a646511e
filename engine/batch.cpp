#include "engine/batch.h"

#include <algorithm>
#include <cstring>
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
  batch->backend_ = &backend;
  absl::Status s = batch->ids_.Ensure(backend, int64_t{max_rows} * 4);
  for (MirroredBuffer* b : {&batch->target_rows_, &batch->targets_, &batch->surprisal_}) {
    if (s.ok()) s = b->Ensure(backend, int64_t{max_rows} * 4);
  }
  if (s.ok()) s = batch->known_rows_.Ensure(backend, max_rows * int64_t{sizeof(SampleRow)});
  if (s.ok()) s = batch->known_changes_.Ensure(backend, max_rows * int64_t{sizeof(LogitChange)});
  if (s.ok()) s = batch->known_.Ensure(backend, max_rows * int64_t{sizeof(SampledRow)});
  if (s.ok()) s = batch->logit_rows_.Ensure(backend, int64_t{max_sequences} * 4);
  if (s.ok()) s = batch->choice_rows_.Ensure(backend, max_sequences * int64_t{sizeof(SampleRow)});
  if (s.ok()) s = batch->choices_.Ensure(backend, max_sequences * int64_t{sizeof(SampledRow)});
  if (s.ok()) s = batch->masks_.Ensure(backend, max_sequences * batch->mask_words() * 4);
  if (!s.ok()) return s;
  batch->block_rows_ = std::max(max_sequences, std::min(kMinBlockRows, max_rows));
  auto logits = backend.Allocate(int64_t{batch->block_rows_} * vocab_size * 4);
  if (!logits.ok()) return logits.status();
  batch->logits_ = *std::move(logits);
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
  auto* ids = ids_.host<int32_t>();
  auto* logit_rows = logit_rows_.host<int32_t>();
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
  num_targets_ = 0;
  wants_surprisal_ = false;
  surprisal_at_.clear();
  scores_.clear();
  int32_t row = 0;
  for (const BatchItem& item : items) {
    const EngineSequence& s = *item.sequence;
    const bool surprisal = item.prompt_rows > 0 && cache.WantsSurprisal(s.kv());
    surprisal_at_.push_back(num_targets_);
    wants_surprisal_ |= surprisal;
    for (int i = 0; i < TargetRows(item); ++i) {
      const int position = s.num_computed() + i;
      const bool score = s.WantsScore(position);
      if (!surprisal && !score) continue;
      const int at = num_targets_++;
      target_rows_.host<int32_t>()[at] = row + i;
      targets_.host<int32_t>()[at] = s.token(position + 1);
      SampleRow& known = known_rows_.host<SampleRow>()[at];
      known = DescribeKnown(s.token(position + 1), score ? s.request().request.sampling.prompt_logprobs : -1,
                            &known_changes_.host<LogitChange>()[at]);
      known.logits = at % block_rows_;
      known.first_change = at;
      if (score) scores_.push_back({item.sequence, position, at});
    }
    row += item.prompt_rows;
  }
}

void StepBatch::GiveSurprisal(const std::vector<BatchItem>& items, KvCache& cache, Stream& stream) const {
  if (!wants_surprisal_) return;
  surprisal_.Download(*backend_, 0, int64_t{num_targets_} * 4, stream);
  stream.Synchronize().IgnoreError();  // a device that has failed says so at the end of the step
  for (size_t i = 0; i < items.size(); ++i) {
    const BatchItem& item = items[i];
    if (item.prompt_rows == 0 || !cache.WantsSurprisal(item.sequence->kv())) continue;
    const float none = 0;  // nothing precedes the first token
    if (item.sequence->num_computed() == 0) cache.AddSurprisal(item.sequence->kv(), {&none, 1});
    cache.AddSurprisal(item.sequence->kv(), {surprisal_.host<float>() + surprisal_at_[i], static_cast<size_t>(TargetRows(item))});
  }
}

void StepBatch::FetchScores(Stream& stream) const {
  if (!scores_.empty()) known_.Download(*backend_, 0, num_targets_ * int64_t{sizeof(SampledRow)}, stream);
}

PromptTargets StepBatch::targets(int vocab_size) const {
  if (num_targets_ == 0) return {};
  PromptTargets targets;
  targets.rows = MakeTensor(target_rows_.device<int32_t>(), DType::kI32, num_targets_);
  targets.ids = MakeTensor(targets_.device<int32_t>(), DType::kI32, num_targets_);
  targets.block = MakeTensor(logits_->data(), DType::kF32, block_rows_, vocab_size_);
  targets.block.rank = 2;
  if (wants_surprisal_) targets.surprisal = MakeTensor(surprisal_.device<float>(), DType::kF32, num_targets_);
  if (scores_.empty()) return targets;
  targets.choices = MakeTensor(known_rows_.device<char>(), DType::kBytes, num_targets_);
  targets.changes = MakeTensor(known_changes_.device<char>(), DType::kBytes, num_targets_ * int64_t{sizeof(LogitChange)});
  targets.chosen = MakeTensor(known_.device<char>(), DType::kBytes, num_targets_);
  targets.vocab_size = vocab_size;
  return targets;
}

absl::Status StepBatch::BuildChoices(int places) {
  all_changes_.clear();
  num_siblings_.clear();
  num_choices_ = num_masks_ = 0;
  std::vector<std::function<void()>> mask_jobs;
  int32_t mask = -1;  // of a sample and its siblings: all are where the grammar begins
  const auto add = [&](const EngineSequence& s, size_t logits) {
    LOUPE_CHECK(num_choices_ < max_sequences_) << num_choices_ << " tokens are chosen already";
    SampleRow& row = choice_rows_.host<SampleRow>()[num_choices_++];
    row = s.sampler().Describe(s.num_output(), &all_changes_);
    row.logits = static_cast<int32_t>(logits);
    row.mask = mask;
  };
  for (size_t i = 0; i < sampled_.size(); ++i) {
    mask = sampled_[i]->has_grammar() ? num_masks_++ : -1;
    if (mask >= 0) {
      mask_jobs.emplace_back(
          [sequence = sampled_[i], words = masks_.host<uint32_t>() + mask * mask_words()] { sequence->FillMask(words); });
    }
    add(*sampled_[i], i);
    const auto& siblings = sampled_[i]->request().siblings;
    num_siblings_.push_back(std::min(static_cast<int>(siblings.size()), std::max(places, 0)));
    for (int k = 0; k < num_siblings_.back(); ++k) add(*siblings[static_cast<size_t>(k)], i);
    places -= num_siblings_.back();
  }
  const size_t bytes = all_changes_.size() * sizeof(LogitChange);
  if (absl::Status s = changes_.Ensure(*backend_, static_cast<int64_t>(bytes)); !s.ok()) return s;
  if (bytes > 0) std::memcpy(changes_.host<char>(), all_changes_.data(), bytes);
  mask_work_.Begin(std::move(mask_jobs));
  return absl::OkStatus();
}

void StepBatch::Choose(int vocab_size, Stream& stream) {
  if (num_choices_ == 0) return;
  mask_work_.Finish();
  masks_.Upload(*backend_, 0, num_masks_ * mask_words() * 4, stream);
  SampleArgs args;
  args.logits = logits();
  args.logits.shape[1] = vocab_size;
  args.rows = MakeTensor(choice_rows_.device<char>(), DType::kBytes, num_choices_);
  args.changes = MakeTensor(changes_.device<char>(), DType::kBytes, static_cast<int64_t>(all_changes_.size()));
  if (num_masks_ > 0) args.masks = MakeTensor(masks_.device<uint32_t>(), DType::kI32, num_masks_, mask_words());
  args.out = MakeTensor(choices_.device<char>(), DType::kBytes, num_choices_);
  backend_->Sample(args, stream);
  choices_.Download(*backend_, 0, num_choices_ * int64_t{sizeof(SampledRow)}, stream);
}

void StepBatch::Upload(Stream& stream) {
  ids_.Upload(*backend_, 0, int64_t{num_rows_} * 4, stream);
  logit_rows_.Upload(*backend_, 0, static_cast<int64_t>(sampled_.size()) * 4, stream);
  target_rows_.Upload(*backend_, 0, int64_t{num_targets_} * 4, stream);
  targets_.Upload(*backend_, 0, int64_t{num_targets_} * 4, stream);
  if (!scores_.empty()) {
    known_rows_.Upload(*backend_, 0, num_targets_ * int64_t{sizeof(SampleRow)}, stream);
    known_changes_.Upload(*backend_, 0, num_targets_ * int64_t{sizeof(LogitChange)}, stream);
  }
  choice_rows_.Upload(*backend_, 0, num_choices_ * int64_t{sizeof(SampleRow)}, stream);
  changes_.Upload(*backend_, 0, static_cast<int64_t>(all_changes_.size() * sizeof(LogitChange)), stream);
}

Tensor StepBatch::ids() const { return MakeTensor(ids_.device<int32_t>(), DType::kI32, num_rows_); }

Tensor StepBatch::logit_rows() const {
  if (sampled_.empty()) return {};
  return MakeTensor(logit_rows_.device<int32_t>(), DType::kI32, static_cast<int64_t>(sampled_.size()));
}

Tensor StepBatch::logits() const {
  Tensor t = MakeTensor(logits_->data(), DType::kF32, static_cast<int64_t>(sampled_.size()), vocab_size_);
  t.rank = 2;
  return t;
}

}  // namespace loupe
