#include "engine/engine_core.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace loupe {
namespace {

// Tokens that an admitted sequence may grow by before its bytes are counted anew: keeps preemption rare.
constexpr int kHeadroomTokens = 64;

double Since(SteadyTime then, SteadyTime now) { return std::chrono::duration<double>(now - then).count(); }

}  // namespace

EngineCore::EngineCore(const EngineParts& parts, const EngineLimits& limits)
    : parts_(parts), limits_(limits), stream_(parts.backend->NewStream()) {
  for (int32_t id = 0; id < parts_.tokenizer->vocab_size(); ++id) {
    if (parts_.tokenizer->IsEndOfGeneration(id)) endings_.push_back(id);
  }
  stats_.weight_bytes = parts_.model->weight_bytes();
  stats_.kv = parts_.cache->Stats();
}

EngineCore::~EngineCore() { CancelAll("shutdown"); }

absl::StatusOr<std::unique_ptr<EngineCore>> EngineCore::Create(const EngineParts& parts, const EngineLimits& limits) {
  auto core = std::unique_ptr<EngineCore>(new EngineCore(parts, limits));
  auto logits = parts.backend->Allocate(int64_t{4} * limits.max_sequences * parts.model->vocab_size());
  if (!logits.ok()) return logits.status();
  core->logits_ = *std::move(logits);
  return core;
}

void EngineCore::Insert(std::vector<SequencePtr>& list, SequencePtr sequence) {
  const auto at = std::upper_bound(list.begin(), list.end(), sequence,
                                   [](const SequencePtr& a, const SequencePtr& b) { return Precedes(*a, *b); });
  list.insert(at, std::move(sequence));
}

void EngineCore::Add(std::unique_ptr<Job> job_in) {
  std::shared_ptr<Job> job = std::move(job_in);
  job->order = next_order_++;
  job->unfinished = job->request.n;
  const SamplingParams& sampling = job->request.sampling;
  for (int i = 0; i < job->request.n; ++i) {
    auto sequence = std::make_unique<Sequence>(
        job, i, Sampler(sampling, *sampling.seed + static_cast<uint64_t>(i), job->request.prompt, endings_),
        StreamDecoder(*parts_.tokenizer, sampling.stop, sampling.include_stop_str_in_output));
    if (i == 0) {
      Insert(waiting_, std::move(sequence));
    } else {
      job->siblings.push_back(std::move(sequence));
    }
  }
}

// Ends what nobody waits for any more and what is late.
void EngineCore::Reap() {
  const SteadyTime now = parts_.clock->Now();
  for (auto* list : {&waiting_, &running_}) {
    for (size_t i = 0; i < list->size();) {
      Sequence& sequence = *(*list)[i];
      const Job& job = *sequence.job;
      // The last reference but ours: the reader's end is gone.
      const bool cancelled = job.stream->cancelled() || job.stream.use_count() == 1;
      const bool late = job.request.deadline && now >= *job.request.deadline;
      if (!cancelled && !late) {
        ++i;
        continue;
      }
      FinishJobPart(sequence, cancelled ? FinishReason::kCancelled : FinishReason::kDeadline, cancelled ? "" : "deadline");
      list->erase(list->begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

SequenceView EngineCore::View(const Sequence& sequence) const {
  return {sequence.prompt_left(), sequence.decode_left(), parts_.cache->BytesForTokens(sequence.total() + kHeadroomTokens)};
}

void EngineCore::Plan() {
  running_views_.clear(), waiting_views_.clear();
  for (const SequencePtr& sequence : running_) running_views_.push_back(View(*sequence));
  const int room = limits_.max_sequences - static_cast<int>(running_.size());
  for (const SequencePtr& sequence : waiting_) {
    if (static_cast<int>(waiting_views_.size()) >= room) break;
    waiting_views_.push_back(View(*sequence));
  }
  PlanLimits limits;
  limits.max_step_rows = limits_.max_step_tokens;
  limits.max_sequences = limits_.max_sequences;
  // Page classes round up to slabs: keep one slab for each of the two classes out of the sum.
  limits.capacity_bytes = std::max<int64_t>(stats_.kv.capacity_bytes - 2 * kSlabBytes, 0);
  PlanStep(running_views_, waiting_views_, limits, &plan_);
  if (plan_.num_admitted > 0) {
    Admit(plan_.num_admitted);
    // The order of running sequences changed with those admitted: plan again over all of them.
    running_views_.clear(), waiting_views_.clear();
    for (const SequencePtr& sequence : running_) running_views_.push_back(View(*sequence));
    PlanStep(running_views_, waiting_views_, limits, &plan_);
  }
}

void EngineCore::Admit(int count) {
  const SteadyTime now = parts_.clock->Now();
  for (int i = 0; i < count; ++i) {
    auto opened = parts_.cache->Open(FullPolicy());
    if (!opened.ok()) return;  // a fork took the last place
    SequencePtr sequence = std::move(waiting_.front());
    waiting_.erase(waiting_.begin());
    sequence->cache_id = *opened;
    if (!sequence->admitted_once) {
      sequence->admitted_once = true;
      sequence->admitted = now;
    }
    if (!sequence->job->started) {
      sequence->job->started = true;
      sequence->job->stream->Push(Started{sequence->prompt_size(), 0});
    }
    Insert(running_, std::move(sequence));
  }
}

// Takes the sequence out of the cache; its tokens are computed again later, each in the phase it was first computed in.
void EngineCore::Preempt(size_t index) {
  SequencePtr sequence = std::move(running_[index]);
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
  parts_.cache->Close(sequence->cache_id);
  sequence->cache_id = SeqId{};
  sequence->computed = 0;
  ++stats_.preemptions;
  std::erase_if(plan_.rows, [&](const PlannedRows& rows) { return rows.index == static_cast<int>(index); });
  for (PlannedRows& rows : plan_.rows) {
    if (rows.index > static_cast<int>(index)) --rows.index;
  }
  Insert(waiting_, std::move(sequence));
}

// Reserves pages for the plan. While there is no room the last in precedence makes way; the first never does, so there
// is always progress. If the first alone has no room its answer ends here. False: nothing is left to compute.
bool EngineCore::ReserveOrPreempt() {
  while (!plan_.rows.empty()) {
    items_.clear();
    for (const PlannedRows& rows : plan_.rows) {
      const Sequence& sequence = *running_[rows.index];
      const bool ends = sequence.prompt_left() > 0 && rows.prompt_rows == sequence.prompt_left();
      items_.push_back({sequence.cache_id, rows.prompt_rows, rows.decode_rows, ends});
    }
    const absl::Status reserved = parts_.cache->Reserve(items_, &batch_);
    if (reserved.ok()) return true;
    LOUPE_CHECK(reserved.code() == absl::StatusCode::kResourceExhausted) << reserved.ToString();
    if (running_.size() > 1) {
      Preempt(running_.size() - 1);
      continue;
    }
    Sequence& last = *running_.front();
    if (last.output.empty()) {
      FinishJobPart(last, FinishReason::kError, "", absl::ResourceExhaustedError(absl::StrCat(
          "a prompt of ", last.prompt_size(), " tokens found no room in the KV cache: ", std::string(reserved.message()))));
    } else {
      FinishJobPart(last, FinishReason::kLength, "context");
    }
    running_.clear();
    plan_.rows.clear();
  }
  return false;
}

void EngineCore::BuildRows() {
  ids_.clear(), logit_rows_.clear(), logit_owner_.clear();
  for (const PlannedRows& rows : plan_.rows) {
    const Sequence& sequence = *running_[rows.index];
    for (int i = 0; i < rows.prompt_rows; ++i) ids_.push_back(sequence.token(sequence.computed + i));
    if (rows.prompt_rows > 0 && rows.decode_rows == 0 && sequence.computed + rows.prompt_rows == sequence.total()) {
      logit_rows_.push_back(static_cast<int32_t>(ids_.size()) - 1);
      logit_owner_.push_back(rows.index);
    }
  }
  for (const PlannedRows& rows : plan_.rows) {
    const Sequence& sequence = *running_[rows.index];
    const int from = sequence.computed + rows.prompt_rows;
    for (int i = 0; i < rows.decode_rows; ++i) ids_.push_back(sequence.token(from + i));
    if (rows.decode_rows > 0 && from + rows.decode_rows == sequence.total()) {
      logit_rows_.push_back(static_cast<int32_t>(ids_.size()) - 1);
      logit_owner_.push_back(rows.index);
    }
  }
}

void EngineCore::RunModel() {
  DecoderStep step;
  step.ids = MakeTensor(ids_.data(), DType::kI32, static_cast<int64_t>(ids_.size()));
  step.cache = parts_.cache;
  step.batch = &batch_;
  const auto wanted = static_cast<int64_t>(logit_rows_.size());
  if (wanted > 0) {
    step.logit_rows = MakeTensor(logit_rows_.data(), DType::kI32, wanted);
    step.logits = MakeTensor(logits_->data(), DType::kF32, wanted, parts_.model->vocab_size());
  }
  parts_.model->Forward(step, *stream_);
  parts_.cache->Commit(batch_, *stream_);
  stream_->Synchronize();
}

void EngineCore::AfterModel(double seconds) {
  Report(seconds);
  for (const PlannedRows& rows : plan_.rows) {
    Sequence& sequence = *running_[rows.index];
    const int before = sequence.computed;
    sequence.computed += rows.prompt_rows + rows.decode_rows;
    const int again = std::max(0, std::min(sequence.computed, sequence.ever_computed) - before);
    stats_.recomputed_tokens += again;
    const int new_prompt = std::max(0, std::min(sequence.computed, sequence.prompt_size()) - std::max(before, sequence.ever_computed));
    stats_.prompt_tokens += new_prompt;
    sequence.ever_computed = std::max(sequence.ever_computed, sequence.computed);
    if (rows.prompt_rows > 0 && sequence.computed >= sequence.prompt_size()) {
      const KvSequenceReport kv = parts_.cache->Report(sequence.cache_id);
      if (kv.full_bytes > 0) sequence.prompt_bytes_ratio = static_cast<double>(kv.device_bytes) / static_cast<double>(kv.full_bytes);
    }
  }
  const auto vocab = static_cast<size_t>(parts_.model->vocab_size());
  std::vector<int> ended;
  for (size_t i = 0; i < logit_owner_.size(); ++i) {
    Sequence& sequence = *running_[logit_owner_[i]];
    const std::span<float> logits(static_cast<float*>(logits_->data()) + i * vocab, vocab);
    if (!sequence.job->siblings.empty()) row_copy_.assign(logits.begin(), logits.end());
    const bool end = TakeToken(sequence, logits);
    if (!sequence.job->siblings.empty()) ForkSiblings(sequence, row_copy_);
    if (!end) continue;
    parts_.cache->Close(sequence.cache_id);
    ended.push_back(logit_owner_[i]);
  }
  std::sort(ended.rbegin(), ended.rend());
  for (const int index : ended) running_.erase(running_.begin() + index);
  // Forks joined at the end, so that the indexes above stayed valid.
  std::stable_sort(running_.begin(), running_.end(), [](const SequencePtr& a, const SequencePtr& b) { return Precedes(*a, *b); });
}

void EngineCore::Report(double seconds) {
  ++stats_.steps;
  if (parts_.observer == nullptr) return;
  StepReport report;
  report.num_sequences = static_cast<int>(plan_.rows.size());
  report.num_rows = batch_.num_rows;
  report.prompt_rows = batch_.prompt_rows;
  report.phase = batch_.prompt_rows == 0                 ? StepPhase::kDecode
                 : batch_.prompt_rows == batch_.num_rows ? StepPhase::kPrefill
                                                         : StepPhase::kMixed;
  report.seconds = seconds;
  report.weight_read_bytes = parts_.model->weight_bytes_per_step();
  const KvShape& shape = parts_.cache->shape();
  report.kv_write_bytes = int64_t{4} * shape.num_layers * shape.num_kv_heads * shape.head_dim * batch_.num_rows;
  for (const PlannedRows& rows : plan_.rows) {
    const int64_t once = parts_.cache->Report(running_[rows.index]->cache_id).read_bytes_per_token;
    report.kv_read_bytes += once * std::max(1, rows.decode_rows);
  }
  parts_.observer->OnStep(report);
}

bool EngineCore::Step() {
  Reap();
  if (idle()) return false;
  Plan();
  if (!ReserveOrPreempt()) return !idle();
  BuildRows();
  const SteadyTime start = parts_.clock->Now();
  RunModel();
  AfterModel(Since(start, parts_.clock->Now()));
  return true;
}

void EngineCore::CancelAll(const std::string& reason) {
  for (auto* list : {&running_, &waiting_}) {
    for (const SequencePtr& sequence : *list) FinishJobPart(*sequence, FinishReason::kCancelled, reason);
    list->clear();
  }
}

EngineStats EngineCore::Stats() const {
  EngineStats stats = stats_;
  stats.requests_running = static_cast<int>(running_.size());
  stats.requests_waiting = static_cast<int>(waiting_.size());
  const SteadyTime now = parts_.clock->Now();
  for (const SequencePtr& sequence : waiting_) {
    stats.queue_prompt_tokens += sequence->prompt_size();
    stats.queue_oldest_age_s = std::max(stats.queue_oldest_age_s, Since(sequence->job->request.arrival, now));
  }
  stats.kv = parts_.cache->Stats();
  return stats;
}

}  // namespace loupe
