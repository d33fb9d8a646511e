#include "engine/engine_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace loupe {
namespace {

absl::Status CheckLimits(const CoreLimits& limits, const StepModel& model) {
  const struct {
    const char* what;
    int64_t value, min, max;
  } ranges[] = {{"max_sequences", limits.max_sequences, 1, 1 << 16},
                {"max_step_tokens", limits.max_step_rows, 1, 1 << 20},
                {"max_queue", limits.max_queue, 1, 1 << 24},
                {"max_context", limits.max_context, 1, model.max_context()}};
  for (const auto& r : ranges) {
    if (r.value >= r.min && r.value <= r.max) continue;
    return absl::InvalidArgumentError(absl::StrCat(r.what, " is ", r.value, "; it must lie between ", r.min, " and ", r.max));
  }
  return absl::OkStatus();
}

}  // namespace

EngineCore::EngineCore(const CoreLimits& limits, const CoreParts& parts)
    : limits_(limits), parts_(parts), queue_(limits.max_queue, *parts.clock) {
  limits_.max_sequences = std::min(limits_.max_sequences, limits_.max_step_rows);
  // Ids beyond the tokenizer's have no text and are never chosen.
  vocab_size_ = std::min(parts.model->vocab_size(), parts.tokenizer->vocab_size());
  for (int32_t id = 0; id < vocab_size_; ++id) {
    if (parts.tokenizer->IsEndOfGeneration(id)) end_ids_.push_back(id);
  }
}

EngineCore::~EngineCore() {
  if (!cache_) return;  // Create failed
  queue_.Stop();
  while (Step() != Outcome::kStopped) {
  }
}

absl::StatusOr<std::unique_ptr<EngineCore>> EngineCore::Create(const CoreLimits& limits, const CoreParts& parts) {
  if (absl::Status s = CheckLimits(limits, *parts.model); !s.ok()) return s;
  std::unique_ptr<EngineCore> core(new EngineCore(limits, parts));
  const CoreLimits& effective = core->limits_;
  auto batch =
      StepBatch::Create(*parts.backend, effective.max_step_rows, effective.max_sequences, parts.model->vocab_size());
  if (!batch.ok()) return batch.status();
  KvConfig config;
  config.device_bytes = effective.kv_device_bytes;
  config.max_sequences = effective.max_sequences;
  config.max_step_rows = effective.max_step_rows;
  auto cache = KvCache::Create(config, parts.model->kv_shape(), *parts.backend);
  if (!cache.ok()) return cache.status();
  if (const auto means = parts.kv.artifacts.mean_keys(); !means.empty()) {
    if (absl::Status s = (*cache)->SetMeanKeys(means); !s.ok()) return s;
  }
  core->stream_ = parts.backend->NewStream();
  core->batch_ = *std::move(batch);
  core->cache_ = *std::move(cache);
  core->chooser_ = std::make_unique<KvChooser>(*core->cache_, parts.kv);
  if (absl::Status s = core->chooser_->CheckDefaults(); !s.ok()) return s;
  if (absl::Status s = core->LimitContextToArena(); !s.ok()) return s;
  core->PublishStats();
  return core;
}

// Whatever was accepted must be able to run to its end when it runs alone; so the context is what one sample can hold.
absl::Status EngineCore::LimitContextToArena() {
  const int longest = cache_->LongestSequence();
  if (longest == 0) {
    return absl::InvalidArgumentError(absl::StrCat("the KV cache has ", limits_.kv_device_bytes,
                                                   " bytes; a single token of this model needs ",
                                                   cache_->BytesForTokens(1), "; give it more (--kv-device-bytes)"));
  }
  limits_.max_context = std::min(limits_.max_context, longest);
  return absl::OkStatus();
}

// ---- collecting and ending

// What happened since the last step. True if the queue was stopped; then everything has ended.
bool EngineCore::Collect() {
  RequestQueue::Inbox inbox = queue_.Take();
  for (Submission& submission : inbox.arrived) AddRequest(std::move(submission));
  if (inbox.stop) {
    EndAll({FinishReason::kCancelled, ""});
  } else if (inbox.abort) {
    EndAll({FinishReason::kCancelled, "drain"});
  } else {
    EndExpired();
  }
  RemoveRetired();
  return inbox.stop;
}

void EngineCore::EndExpired() {
  const SteadyTime now = parts_.clock->Now();
  for (auto* list : {&running_, &waiting_}) {
    for (const SequencePtr& sequence : *list) {
      const RequestState& state = sequence->request();
      if (state.stream->cancelled()) {
        EndWithSiblings(*sequence, {FinishReason::kCancelled, ""});
      } else if (state.request.deadline && *state.request.deadline <= now) {
        EndWithSiblings(*sequence, {FinishReason::kDeadline, "deadline"});
      }
    }
  }
}

void EngineCore::EndAll(const End& end) {
  for (auto* list : {&running_, &waiting_}) {
    for (const SequencePtr& sequence : *list) EndWithSiblings(*sequence, end);
  }
}

void EngineCore::EndWithSiblings(EngineSequence& sequence, const End& end, const absl::Status& error) {
  const std::vector<SequencePtr> siblings = std::exchange(sequence.request().siblings, {});
  Finish(sequence, end, error);
  for (const SequencePtr& sibling : siblings) Finish(*sibling, end, error);
}

void EngineCore::Finish(EngineSequence& sequence, const End& end, absl::Status error) {
  sequence.Retire();
  RequestState& state = sequence.request();
  if (std::string text = sequence.FlushText(); !text.empty()) {
    Delta delta;
    delta.index = sequence.index();
    delta.text = std::move(text);
    outbox_.push_back({state.stream, std::move(delta)});
  }
  KvSequenceReport last;
  if (sequence.kv().value >= 0) {
    last = cache_->Report(sequence.kv());
    cache_->Close(sequence.kv());
  }
  Finished finished = sequence.MakeFinished(end, std::move(error), last, parts_.clock->Now());
  if (parts_.observer) parts_.observer->OnFinished(finished);
  outbox_.push_back({state.stream, std::move(finished)});
  LOUPE_CHECK(state.unfinished > 0) << "request '" << state.request.id << "' has ended already";
  if (--state.unfinished == 0) ended_ids_.push_back(state.request.id);
}

void EngineCore::RemoveRetired() {
  const auto retired = [](const SequencePtr& s) { return s->phase() == SequencePhase::kRetiring; };
  std::erase_if(running_, retired);
  std::erase_if(waiting_, retired);
}

void EngineCore::PublishStats() {
  EngineStats stats = counters_;
  stats.requests_running = num_running();
  // Requests that have not started are counted by the queue.
  stats.requests_waiting = static_cast<int>(
      std::count_if(waiting_.begin(), waiting_.end(), [](const SequencePtr& s) { return s->request().started; }));
  stats.weight_bytes = parts_.model->weight_bytes();
  stats.graph_bytes = parts_.model->graph_bytes();
  stats.kv = cache_->Stats();
  queue_.Publish(stats);
}

// Whoever reads the end of a request finds the numbers up to date and the id free.
void EngineCore::Tell() {
  for (const std::string& id : ended_ids_) queue_.OnEnding(id);
  for (Outgoing& out : outbox_) out.stream->Push(std::move(out.event));
  outbox_.clear();
  if (!ended_ids_.empty()) queue_.OnEnded(static_cast<int>(ended_ids_.size()));
  ended_ids_.clear();
}

}  // namespace loupe
