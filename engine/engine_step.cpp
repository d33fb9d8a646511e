// One step of the engine: plan, reserve, compute, sample, tell.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/engine_core.h"
#include "kernels/check.h"
#include "spdlog/spdlog.h"

namespace loupe {
namespace {

// Tokens that must fit beside what is known before a sample is let in, so that it does not have to leave at once. Twice as
// many after every preemption, so that a sample leaves a number of times that is logarithmic in its length.
constexpr int kHeadroomTokens = 32;
constexpr int kMostDoublings = 12;

int HeadroomTokens(const EngineSequence& sequence) {
  if (sequence.num_preemptions() == 0) return kHeadroomTokens;
  const int left = sequence.request().max_tokens - sequence.num_output();
  return std::min(left, kHeadroomTokens << std::min(sequence.num_preemptions(), kMostDoublings));
}

// Bytes of keys and values that attention reads for a row that sees `num_tokens` positions.
int64_t KvReadBytes(const KvCache& cache, int64_t num_tokens) {
  const KvShape& shape = cache.shape();
  const int64_t entry_bytes = cache.dense_entry_bytes() * shape.num_kv_heads;
  if (shape.windows.empty()) return shape.num_layers * num_tokens * entry_bytes;
  int64_t entries = 0;
  for (const int window : shape.windows) entries += window > 0 ? std::min<int64_t>(window, num_tokens) : num_tokens;
  return entries * entry_bytes;
}

}  // namespace

EngineCore::Outcome EngineCore::Step() {
  const SteadyTime begin = parts_.clock->Now();
  const bool stopped = Collect();
  if (!running_.empty() || !waiting_.empty()) {
    Apply(Plan());
    if (ReserveStep()) {
      if (const absl::Status status = Compute(); status.ok()) {
        AfterCommit();
        SampleAll();
        Report(SecondsBetween(begin, step_end_));
      } else {
        FailDevice(status);
      }
    }
    RemoveRetired();
  }
  PublishStats();
  Tell();
  if (stopped) return Outcome::kStopped;
  return running_.empty() && waiting_.empty() ? Outcome::kIdle : Outcome::kWorked;
}

// What the sample holds. A full one by its bound, so that held and needed bytes add up to what was promised.
int64_t EngineCore::HeldBytes(const EngineSequence& sequence) const {
  if (sequence.kv().value < 0) return 0;
  return sequence.policy().MaxBytes(0) < 0 ? cache_->BytesForTokens(sequence.num_computed()) : cache_->device_bytes(sequence.kv());
}

// What it will ask for until its known tokens and the headroom are in: with a policy that drops entries the whole prompt
// first, then what the policy leaves, whichever is more.
int64_t EngineCore::NeededBytes(const EngineSequence& sequence) const {
  const int tokens = std::min(sequence.num_known() + HeadroomTokens(sequence), limits_.max_context);
  int64_t most = cache_->BytesForTokens(tokens);
  const Policy& policy = sequence.policy();
  if (const int64_t dropped = policy.MaxBytes(tokens - sequence.num_prompt()); dropped >= 0) {
    most = std::min(most, dropped);
    const int64_t whole = policy.MaxPromptBytes();
    if (sequence.prompt_rows() > 0) most = std::max(most, whole >= 0 ? whole : cache_->BytesForTokens(sequence.num_prompt()));
  }
  return std::max<int64_t>(0, most - HeldBytes(sequence));
}

StepPlan EngineCore::Plan() const {
  std::vector<RunningView> running;
  for (const SequencePtr& s : running_) {
    running.push_back({s->rank(), s->prompt_rows(), s->decode_rows(), HeldBytes(*s), NeededBytes(*s)});
  }
  std::vector<WaitingView> waiting;
  for (const SequencePtr& s : waiting_) {
    // No step admits more than can run.
    if (waiting.size() == static_cast<size_t>(limits_.max_sequences)) break;
    waiting.push_back({s->rank(), s->num_prompt(), NeededBytes(*s)});
  }
  return PlanStep(running, waiting, {limits_.max_sequences, limits_.max_step_rows, cache_->bytes_free()});
}

void EngineCore::Apply(const StepPlan& plan) {
  // Indexes hold only until the first sample moves.
  std::vector<EngineSequence*> by_index;
  for (const SequencePtr& s : running_) by_index.push_back(s.get());
  for (int i = 0; i < plan.num_admissions; ++i) by_index.push_back(waiting_[static_cast<size_t>(i)].get());
  const size_t num_running = running_.size();
  std::vector<EngineSequence*> preempted;
  for (const int index : plan.preemptions) preempted.push_back(by_index[static_cast<size_t>(index)]);
  for (EngineSequence* sequence : preempted) Preempt(*sequence, Preemption::Cause::kPriority);
  for (size_t i = num_running; i < by_index.size(); ++i) StartSequence(*by_index[i]);
  items_.clear();
  for (const RowGrant& grant : plan.grants) {
    EngineSequence* sequence = by_index[static_cast<size_t>(grant.index)];
    if (sequence->kv().value >= 0) items_.push_back({sequence, grant.prompt_rows, grant.decode_rows});
  }
}

bool EngineCore::StartSequence(EngineSequence& sequence) {
  const auto at = std::find_if(waiting_.begin(), waiting_.end(), [&](const SequencePtr& s) { return s.get() == &sequence; });
  LOUPE_CHECK(at != waiting_.end()) << "a sample starts that does not wait";
  auto opened = cache_->Open(sequence.policy());
  if (!opened.ok()) {
    // It stays where it is: a later step tries again.
    spdlog::error("request '{}': {}", sequence.request().request.id, std::string(opened.status().message()));
    return false;
  }
  sequence.Start(*opened, parts_.clock->Now());
  RequestState& state = sequence.request();
  if (!state.started) {
    state.started = true;
    queue_.OnStarted(state.request.id);
    state.stream->Push(Started{sequence.num_prompt(), 0});
    if (state.request.sampling.prompt_logprobs >= 0) {
      state.prompt_scores.resize(state.request.prompt.size(), {{-1, 0, {}}, {}});
      const int32_t first = state.request.prompt[0];
      state.prompt_scores[0].chosen = {first, 0, std::string(parts_.tokenizer->TokenBytes(first))};
    }
  }
  running_.push_back(std::move(*at));
  waiting_.erase(at);
  return true;
}

void EngineCore::Preempt(EngineSequence& sequence, Preemption::Cause cause) {
  const auto at = std::find_if(running_.begin(), running_.end(), [&](const SequencePtr& s) { return s.get() == &sequence; });
  LOUPE_CHECK(at != running_.end()) << "a sample is preempted that does not run";
  const int64_t free_before = cache_->bytes_free();
  cache_->Close(sequence.kv());
  if (parts_.observer) {
    parts_.observer->OnPreempted({cause, sequence.request().request.id, sequence.index(), sequence.rank().priority, sequence.num_computed(),
                                  cache_->bytes_free() - free_before});
  }
  sequence.Preempt();
  ++counters_.preemptions;
  std::erase_if(items_, [&](const BatchItem& item) { return item.sequence == &sequence; });
  SequencePtr moved = std::move(*at);
  running_.erase(at);
  Enqueue(std::move(moved));
}

EngineSequence* EngineCore::LowestRunning() const {
  const auto lowest = std::max_element(running_.begin(), running_.end(), [](const SequencePtr& a, const SequencePtr& b) {
    return a->rank().Before(b->rank());
  });
  return lowest == running_.end() ? nullptr : lowest->get();
}

// Takes the pages of the step. If they are not there, the sample of the lowest rank leaves; the first always goes on.
bool EngineCore::ReserveStep() {
  while (!items_.empty()) {
    StepBatch::FillKvItems(items_, &kv_items_);
    const absl::Status status = cache_->Reserve(kv_items_, &kv_batch_);
    if (status.ok()) return true;
    EngineSequence* lowest = LowestRunning();
    if (!absl::IsResourceExhausted(status)) {
      GiveUp(*items_.back().sequence, status);
    } else if (running_.size() > 1) {
      Preempt(*lowest, Preemption::Cause::kMemory);
    } else if (items_[0].rows() > 1) {
      BatchItem& item = items_[0];
      (item.prompt_rows > 0 ? item.prompt_rows : item.decode_rows) /= 2;
    } else {
      GiveUp(*lowest, status);
    }
  }
  return false;
}

// The sample cannot go on even alone. What it has said stands.
void EngineCore::GiveUp(EngineSequence& sequence, const absl::Status& status) {
  std::erase_if(items_, [&](const BatchItem& item) { return item.sequence == &sequence; });
  const bool full = absl::IsResourceExhausted(status) && sequence.num_output() > 0;
  spdlog::error("request '{}' sample {} ends after {} tokens: {}", sequence.request().request.id, sequence.index(),
                sequence.num_output(), std::string(status.message()));
  std::vector<SequencePtr> siblings = std::exchange(sequence.request().siblings, {});
  if (full) {
    Finish(sequence, {FinishReason::kLength, "context"});
  } else {
    Finish(sequence, {FinishReason::kError, ""}, status);
  }
  for (SequencePtr& sibling : siblings) Enqueue(std::move(sibling));
  RemoveRetired();
}

absl::Status EngineCore::Compute() {
  batch_->Build(items_);
  DecoderStep step;
  step.ids = batch_->ids();
  step.cache = cache_.get();
  step.batch = &kv_batch_;
  step.logit_rows = batch_->logit_rows();
  step.logit_prompt_rows = batch_->logit_prompt_rows();
  if (step.logit_rows.defined()) step.logits = batch_->logits();
  batch_->BuildTargets(items_, *cache_);
  step.targets = batch_->targets(vocab_size_);
  if (absl::Status s = batch_->BuildChoices(limits_.max_sequences - num_running()); !s.ok()) {
    cache_->Abandon(kv_batch_);
    return s;
  }
  batch_->Upload(*stream_);
  parts_.model->Forward(step, *stream_);
  batch_->Choose(vocab_size_, *stream_);  // ids that the tokenizer does not know are cut off
  batch_->FetchScores(*stream_);
  batch_->GiveSurprisal(items_, *cache_, *stream_);
  cache_->Commit(kv_batch_, *stream_);
  MakeRoomForPolicies();
  const absl::Status status = stream_->Synchronize();
  step_end_ = parts_.clock->Now();
  return status;
}

// The device is gone for good: what is in flight ends with the reason, and nothing new is let in.
void EngineCore::FailDevice(const absl::Status& status) {
  spdlog::critical("{}", std::string(status.message()));
  queue_.Fail(status);
  for (auto* list : {&running_, &waiting_}) {
    for (const SequencePtr& sequence : *list) {
      const std::vector<SequencePtr> siblings = std::exchange(sequence->request().siblings, {});
      Finish(*sequence, {FinishReason::kError, ""}, status);
      for (const SequencePtr& sibling : siblings) Finish(*sibling, {FinishReason::kError, ""}, status);
    }
  }
}

void EngineCore::TakeScores() {
  for (const StepBatch::Score& score : batch_->scores()) {
    EngineSequence& sequence = *score.sequence;
    if (sequence.phase() == SequencePhase::kRetiring || sequence.phase() == SequencePhase::kWaiting) continue;
    absl::Status status = sequence.TakeScore(score.position, batch_->scored(score), vocab_size_, *parts_.tokenizer);
    if (!status.ok()) EndWithSiblings(sequence, {FinishReason::kError, ""}, status);
  }
}

// What a policy said and found no room for gets it from those of lower rank, before the next step, so that a sample's tokens
// do not depend on who else is there.
void EngineCore::MakeRoomForPolicies() {
  const std::vector<BatchItem> items = items_;
  for (const BatchItem& item : items) {
    EngineSequence& sequence = *item.sequence;
    while (sequence.kv().value >= 0 && cache_->waits_for_room(sequence.kv())) {
      if (cache_->Retry(sequence.kv(), *stream_).ok()) break;
      EngineSequence* lowest = LowestRunning();
      if (lowest == &sequence && running_.size() == 1) break;  // alone: it goes on as it is
      Preempt(*lowest, Preemption::Cause::kMemory);
    }
  }
}

// Whoever has a key or value that cannot be stored ends, and nobody else.
void EngineCore::EndFaulty() {
  for (const SeqId seq : cache_->TakeFaults(*stream_)) {
    for (const SequencePtr& sequence : running_) {
      if (sequence->kv() != seq || sequence->phase() == SequencePhase::kRetiring) continue;
      absl::Status status = absl::InternalError(
          absl::StrCat("the model computed a key or value that is not a finite number within the first ", cache_->num_tokens(seq),
                       " tokens; the cache cannot store it with fewer than 16 bits"));
      spdlog::error("request '{}' sample {}: {}", sequence->request().request.id, sequence->index(), std::string(status.message()));
      EndWithSiblings(*sequence, {FinishReason::kError, ""}, status);
    }
  }
}

void EngineCore::AfterCommit() {
  EndFaulty();
  TakeScores();
  report_ = {};
  report_.num_sequences = static_cast<int>(items_.size());
  const KvShape& shape = cache_->shape();
  for (const BatchItem& item : items_) {
    EngineSequence& sequence = *item.sequence;
    if (sequence.phase() == SequencePhase::kRetiring) continue;  // its scores were broken
    const int again = sequence.Advance(item.rows());
    counters_.recomputed_tokens += again;
    if (item.prompt_rows > 0) counters_.prompt_tokens += item.prompt_rows - again;
    report_.num_rows += item.rows();
    report_.prompt_rows += item.prompt_rows;
    // The rows of a chunk share one pass over the sample's pages.
    const bool full = sequence.policy().keeps_everything();
    report_.kv_read_bytes += full ? KvReadBytes(*cache_, sequence.num_computed()) : cache_->Report(sequence.kv()).read_bytes_per_token;
    report_.kv_write_bytes += int64_t{item.rows()} * shape.num_layers * shape.num_kv_heads * cache_->landing_entry_bytes(sequence.kv());
    if (sequence.prompt_rows() > 0) continue;
    if (auto scores = std::exchange(sequence.request().prompt_scores, {}); !scores.empty()) {
      outbox_.push_back({sequence.request().stream, PromptScored{std::move(scores)}});
    }
    if (!sequence.prefill_reported()) sequence.OnPrefillEnd(cache_->Report(sequence.kv()), step_end_);
    if (sequence.request().max_tokens == 0) EndWithSiblings(sequence, {FinishReason::kLength, ""});
  }
}

void EngineCore::SampleAll() {
  const SampledRow* next = batch_->choices();
  const std::vector<EngineSequence*>& sampled = batch_->sampled();
  for (size_t i = 0; i < sampled.size(); ++i) {
    const SampledRow& own = *next++;
    const std::span<const SampledRow> others(next, static_cast<size_t>(batch_->num_siblings(i)));
    next += others.size();
    if (sampled[i]->phase() == SequencePhase::kRetiring || sampled[i]->phase() == SequencePhase::kWaiting) continue;
    if (!sampled[i]->request().siblings.empty()) ForkSiblings(*sampled[i], others);
    TakeToken(*sampled[i], own);
  }
}

// The other samples of the request go on from the same prompt pages and the same logits. Those that find no place are
// computed on their own, with the same result.
void EngineCore::ForkSiblings(EngineSequence& parent, std::span<const SampledRow> choices) {
  std::vector<SequencePtr> siblings = std::exchange(parent.request().siblings, {});
  for (size_t i = 0; i < siblings.size(); ++i) {
    absl::StatusOr<SeqId> forked = absl::ResourceExhaustedError("no place");
    if (i < choices.size()) forked = cache_->Fork(parent.kv());
    if (!forked.ok()) {
      Enqueue(std::move(siblings[i]));
      continue;
    }
    EngineSequence& sequence = *siblings[i];
    running_.push_back(std::move(siblings[i]));
    sequence.StartForked(*forked, step_end_);
    sequence.OnPrefillEnd(cache_->Report(*forked), step_end_);
    TakeToken(sequence, choices[i]);
  }
}

void EngineCore::FinishBroken(EngineSequence& sequence, absl::Status error) {
  spdlog::error("request '{}' sample {}: {}", sequence.request().request.id, sequence.index(), std::string(error.message()));
  Finish(sequence, {FinishReason::kError, ""}, std::move(error));
}

// The token that was drawn, and those behind it that the grammar leaves no choice of.
void EngineCore::TakeToken(EngineSequence& sequence, const SampledRow& choice) {
  SampledToken token;
  absl::Status status = sequence.grammar_status();
  if (status.ok()) status = sequence.sampler().Read(choice, vocab_size_, &token);
  if (!status.ok()) return FinishBroken(sequence, std::move(status));
  Delta delta;
  delta.index = sequence.index();
  const bool ends_answer = parts_.tokenizer->IsEndOfGeneration(token.id);
  const int before = sequence.num_output();
  std::optional<End> end = sequence.Accept(std::move(token), ends_answer, *parts_.tokenizer, &delta);
  if (!end) {
    for (const int32_t id : sequence.ForcedTokens(*parts_.tokenizer)) {
      if (!end) end = sequence.Accept({id, {}}, /*ends_answer=*/false, *parts_.tokenizer, &delta);
    }
  }
  for (int count = before + 1; count <= sequence.num_output(); ++count) {
    ++counters_.generated_tokens;
    const double seconds = sequence.OnToken(step_end_);
    if (parts_.observer && count == 1) parts_.observer->OnFirstToken(seconds);
    if (parts_.observer && count > 1) parts_.observer->OnNextToken(seconds);
  }
  if (!delta.logprobs.empty() || !delta.token_ids.empty()) outbox_.push_back({sequence.request().stream, std::move(delta)});
  if (!sequence.grammar_status().ok()) return FinishBroken(sequence, sequence.grammar_status());
  if (end) Finish(sequence, *end);
}

void EngineCore::Report(double seconds) {
  ++counters_.steps;
  report_.phase = report_.prompt_rows == 0                  ? StepPhase::kDecode
                  : report_.prompt_rows == report_.num_rows ? StepPhase::kPrefill
                                                            : StepPhase::kMixed;
  report_.seconds = seconds;
  report_.weight_read_bytes = parts_.model->weight_bytes_per_step();
  if (parts_.observer) parts_.observer->OnStep(report_);
}

}  // namespace loupe
