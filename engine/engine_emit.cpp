// What a computed row leads to: a token, text on its way to the client, or the end of a sample.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/engine_core.h"

namespace loupe {
namespace {

double Between(SteadyTime from, SteadyTime to) { return std::chrono::duration<double>(to - from).count(); }

}  // namespace

// Samples from the row that completes the sequence's tokens. True if the sample ended (and Finished was sent).
bool EngineCore::TakeToken(Sequence& sequence, std::span<float> logits) {
  const SamplingParams& sampling = sequence.job->request.sampling;
  if (sampling.max_tokens == 0) {
    Finish(sequence, FinishReason::kLength, "");
    return true;
  }
  SampledToken sampled;
  const absl::Status status = sequence.sampler.Sample(logits, static_cast<int>(sequence.output.size()), &sampler_scratch_, &sampled);
  if (!status.ok()) {
    Finish(sequence, FinishReason::kError, "", status);
    return true;
  }
  sequence.sampler.Accept(sampled.id);
  sequence.output.push_back(sampled.id);
  ++stats_.generated_tokens;

  const SteadyTime now = parts_.clock->Now();
  if (sequence.output.size() == 1) {
    sequence.first_token = now;
    if (parts_.observer != nullptr) parts_.observer->OnFirstToken(Between(sequence.job->request.arrival, now));
  } else if (parts_.observer != nullptr) {
    parts_.observer->OnNextToken(Between(sequence.last_token, now));
  }
  sequence.last_token = now;

  Delta delta;
  delta.index = sequence.index;
  delta.token_ids.push_back(sampled.id);
  if (sampling.logprobs >= 0) {
    const auto set_bytes = [&](TokenAlternative& token) { token.bytes = std::string(parts_.tokenizer->TokenBytes(token.id)); };
    set_bytes(sampled.logprobs.chosen);
    for (TokenAlternative& token : sampled.logprobs.top) set_bytes(token);
    delta.logprobs.push_back(std::move(sampled.logprobs));
  }
  FinishReason reason = FinishReason::kStop;
  std::string why;
  const bool end = CheckEnd(sequence, sampled.id, &delta, &reason, &why);
  SendDelta(sequence, std::move(delta));
  if (end) Finish(sequence, reason, why);
  return end;
}

// Adds the token's text to the delta and says whether the sample ends with it.
bool EngineCore::CheckEnd(Sequence& sequence, int32_t token, Delta* delta, FinishReason* reason, std::string* why) {
  const SamplingParams& sampling = sequence.job->request.sampling;
  const int generated = static_cast<int>(sequence.output.size());
  const bool may_stop = generated > sampling.min_tokens;
  if (!sampling.ignore_eos && parts_.tokenizer->IsEndOfGeneration(token)) {
    delta->text += sequence.decoder.Flush();
    return true;
  }
  const auto& stop_ids = sampling.stop_token_ids;
  if (may_stop && std::find(stop_ids.begin(), stop_ids.end(), token) != stop_ids.end()) {
    if (sampling.include_stop_str_in_output) delta->text += sequence.decoder.Push(token, false);
    delta->text += sequence.decoder.Flush();
    *why = absl::StrCat(token);
    return true;
  }
  delta->text += sequence.decoder.Push(token, may_stop);
  if (sequence.decoder.stopped()) {
    *why = sequence.decoder.matched();
    return true;
  }
  const bool context_full = sequence.total() >= limits_.max_context;
  if (!context_full && generated != sampling.max_tokens) return false;
  delta->text += sequence.decoder.Flush();
  *reason = FinishReason::kLength;
  if (context_full && generated != sampling.max_tokens) *why = "context";
  return true;
}

void EngineCore::SendDelta(Sequence& sequence, Delta delta) { sequence.job->stream->Push(std::move(delta)); }

// The first sample's prompt is in the cache: the others share its pages and start from the same logits. Those that find
// no place compute the prompt on their own later.
void EngineCore::ForkSiblings(Sequence& first, std::span<const float> logits) {
  const std::shared_ptr<Job> job = first.job;
  std::vector<SequencePtr> siblings = std::move(job->siblings);
  job->siblings.clear();
  std::vector<float> scratch;
  for (SequencePtr& sibling : siblings) {
    const bool place = static_cast<int>(running_.size()) < limits_.max_sequences;
    auto forked = place ? parts_.cache->Fork(first.cache_id) : absl::StatusOr<SeqId>(absl::ResourceExhaustedError("no place"));
    if (!forked.ok()) {
      Insert(waiting_, std::move(sibling));
      continue;
    }
    sibling->cache_id = *forked;
    sibling->computed = sibling->ever_computed = sibling->prompt_size();
    sibling->prompt_bytes_ratio = first.prompt_bytes_ratio;
    sibling->admitted_once = true;
    sibling->admitted = first.admitted;
    scratch.assign(logits.begin(), logits.end());
    if (TakeToken(*sibling, scratch)) {
      parts_.cache->Close(sibling->cache_id);
    } else {
      running_.push_back(std::move(sibling));
    }
  }
}

KvReport EngineCore::MakeKvReport(const Sequence& sequence) const {
  KvReport report;
  report.policy = "full";
  report.reason = sequence.job->kv_reason;
  const KvShape& shape = parts_.cache->shape();
  report.lists = int64_t{shape.num_layers} * shape.num_kv_heads;
  if (sequence.cache_id.value < 0) return report;
  const KvSequenceReport kv = parts_.cache->Report(sequence.cache_id);
  report.device_bytes = kv.device_bytes;
  report.full_bytes = kv.full_bytes;
  report.bytes_ratio = sequence.prompt_bytes_ratio;
  if (kv.full_bytes > 0) report.peak_bytes_ratio = static_cast<double>(kv.peak_device_bytes) / static_cast<double>(kv.full_bytes);
  report.entries_kept = kv.entries_kept;
  report.entries_dropped = kv.entries_dropped;
  report.entries_by_format = {{"dense", kv.entries_kept}};
  report.read_bytes_per_token = kv.read_bytes_per_token;
  report.full_read_bytes_per_token = kv.full_bytes;
  return report;
}

void EngineCore::Finish(Sequence& sequence, FinishReason reason, const std::string& why, absl::Status error) {
  const SteadyTime now = parts_.clock->Now();
  Job& job = *sequence.job;
  Finished finished;
  finished.index = sequence.index;
  finished.reason = reason;
  finished.stop_reason = why;
  finished.error = std::move(error);
  finished.usage.prompt_tokens = sequence.prompt_size();
  finished.usage.completion_tokens = static_cast<int>(sequence.output.size());
  finished.usage.kv = MakeKvReport(sequence);
  Timings& timings = finished.timings;
  const SteadyTime arrival = job.request.arrival;
  const SteadyTime admitted = sequence.admitted_once ? sequence.admitted : now;
  const SteadyTime first = sequence.output.empty() ? now : sequence.first_token;
  timings.queue = Between(arrival, admitted);
  timings.prefill = Between(admitted, first);
  timings.decode = Between(first, now);
  timings.first_token = sequence.output.empty() ? 0 : Between(arrival, first);
  timings.total = Between(arrival, now);
  if (parts_.observer != nullptr) parts_.observer->OnFinished(finished);
  // The id is free for reuse before the client can know that its request ended.
  if (--job.unfinished == 0 && parts_.on_ended) parts_.on_ended(job.request.id);
  job.stream->Push(std::move(finished));
}

// Ends a sample that is in the middle of something: sends the text that was held back, gives up its pages, and ends the
// samples that waited for its prompt.
void EngineCore::FinishJobPart(Sequence& sequence, FinishReason reason, const std::string& why, absl::Status error) {
  std::string held = sequence.decoder.Flush();
  if (!held.empty() && reason != FinishReason::kError) {
    Delta delta;
    delta.index = sequence.index;
    delta.text = std::move(held);
    SendDelta(sequence, std::move(delta));
  }
  Finish(sequence, reason, why, error);
  if (sequence.cache_id.value >= 0) {
    parts_.cache->Close(sequence.cache_id);
    sequence.cache_id = SeqId{};
  }
  const std::vector<SequencePtr> siblings = std::move(sequence.job->siblings);
  sequence.job->siblings.clear();
  for (const SequencePtr& sibling : siblings) Finish(*sibling, reason, why, error);
}

}  // namespace loupe
