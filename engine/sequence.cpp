#include "engine/sequence.h"

#include <algorithm>
#include <utility>

#include "engine/clock.h"
#include "kernels/check.h"
#include "kvcache/page_format.h"

namespace loupe {
namespace {

void FillBytes(TokenLogprobs* logprobs, const Tokenizer& tokenizer) {
  const auto fill = [&](TokenAlternative& t) { t.bytes = std::string(tokenizer.TokenBytes(t.id)); };
  fill(logprobs->chosen);
  for (TokenAlternative& t : logprobs->top) fill(t);
}

}  // namespace

EngineSequence::EngineSequence(std::shared_ptr<RequestState> state, int index, uint64_t order, const Tokenizer& tokenizer,
                               std::span<const int32_t> end_ids)
    : state_(std::move(state)),
      index_(index),
      order_(order),
      sampler_(state_->request.sampling, state_->seed + static_cast<uint64_t>(index), state_->request.prompt, end_ids),
      text_(tokenizer, state_->request.sampling.stop, state_->request.sampling.include_stop_str_in_output) {
  if (state_->request.grammar) matcher_.emplace(state_->request.grammar);
}

int32_t EngineSequence::token(int position) const {
  const int num = num_prompt();
  return position < num ? state_->request.prompt[static_cast<size_t>(position)] : output_[static_cast<size_t>(position - num)];
}

int EngineSequence::decode_rows() const {
  const int generated = std::max(computed_, num_prompt()) - num_prompt();
  const int rows = num_output() - generated;
  if (rows > 1) {  // a replay
    const Signals signals = policy().signals();
    if (signals.entry_probability || signals.page_mass) return 1;
  }
  const int interval = policy().decode_interval();
  return interval > 0 ? std::min(rows, interval - generated % interval) : rows;
}

void EngineSequence::Start(SeqId kv, SteadyTime now) {
  LOUPE_CHECK(phase_ == SequencePhase::kWaiting) << "sample " << index_ << " of '" << state_->request.id << "' starts twice";
  phase_ = SequencePhase::kPrefill;
  kv_ = kv;
  if (!started_) started_ = now;
}

void EngineSequence::StartForked(SeqId kv, SteadyTime now) {
  Start(kv, now);
  computed_ = most_computed_ = num_prompt();
  phase_ = SequencePhase::kDecode;
}

int EngineSequence::Advance(int rows) {
  const int again = std::clamp(most_computed_ - computed_, 0, rows);
  computed_ += rows;
  most_computed_ = std::max(most_computed_, computed_);
  if (computed_ >= num_prompt()) phase_ = SequencePhase::kDecode;
  return again;
}

void EngineSequence::Preempt() {
  phase_ = SequencePhase::kWaiting;
  ++num_preemptions_;
  kv_ = {};
  computed_ = 0;
}

void EngineSequence::Retire() {
  LOUPE_CHECK(phase_ != SequencePhase::kRetiring) << "sample " << index_ << " of '" << state_->request.id << "' ends twice";
  phase_ = SequencePhase::kRetiring;
}

void EngineSequence::OnPrefillEnd(const KvSequenceReport& report, SteadyTime now) {
  prefill_report_ = report;
  prefill_end_ = now;
}

bool EngineSequence::IsStopId(int32_t id) const {
  const std::vector<int32_t>& ids = state_->request.sampling.stop_token_ids;
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

std::optional<EngineSequence::End> EngineSequence::Accept(SampledToken token, bool ends_answer, const Tokenizer& tokenizer,
                                                          Delta* delta) {
  const SamplingParams& params = state_->request.sampling;
  // The token that ends an answer is not part of it, unless a stop token was asked to be.
  const bool stop_id = IsStopId(token.id);
  const End stop_end{FinishReason::kStop, std::to_string(token.id)};
  const bool outside = ends_answer || (stop_id && !params.include_stop_str_in_output);
  if (params.logprobs >= 0 && (!outside || params.end_logprobs)) {
    FillBytes(&token.logprobs, tokenizer);
    delta->logprobs.push_back(std::move(token.logprobs));
  }
  if (outside) return ends_answer ? End{FinishReason::kStop, ""} : stop_end;
  output_.push_back(token.id);
  sampler_.Accept(token.id);
  delta->token_ids.push_back(token.id);
  delta->text += text_.Push(token.id, num_output() >= params.min_tokens);
  if (stop_id) return stop_end;
  if (text_.stopped()) return End{FinishReason::kStop, text_.matched()};
  if (matcher_) {
    grammar_status_.Update(matcher_->Accept(tokenizer.TokenBytes(token.id)));
    if (grammar_status_.ok() && matcher_->complete()) return End{FinishReason::kStop, ""};
  }
  if (num_output() < state_->max_tokens) return std::nullopt;
  return End{FinishReason::kLength, state_->context_bound ? "context" : ""};
}

std::vector<int32_t> EngineSequence::ForcedTokens(const Tokenizer& tokenizer) {
  constexpr size_t kMostBytes = 1024;
  if (!matcher_ || state_->request.sampling.logprobs >= 0 || !grammar_status_.ok()) return {};
  const std::string bytes = matcher_->ForcedBytes(kMostBytes);
  if (bytes.empty()) return {};
  std::vector<int32_t> ids = tokenizer.Encode(bytes, /*add_special=*/false, /*parse_special=*/false);
  GrammarMatcher after = *matcher_;
  const bool ends = after.Accept(bytes).ok() && after.complete();
  if (!ids.empty() && !ends) ids.pop_back();
  // Tokenizers may compose characters, or lack some.
  std::string_view rest = bytes;
  size_t kept = 0;
  for (; kept < ids.size() && rest.starts_with(tokenizer.TokenBytes(ids[kept])); ++kept) {
    rest.remove_prefix(tokenizer.TokenBytes(ids[kept]).size());
  }
  ids.resize(kept);
  return ids;
}

bool EngineSequence::WantsScore(int position) const {
  const auto next = static_cast<size_t>(position) + 1;
  return next < state_->prompt_scores.size() && state_->prompt_scores[next].chosen.id < 0;
}

absl::Status EngineSequence::TakeScore(int position, const SampledRow& row, int vocab_size, const Tokenizer& tokenizer) {
  auto score = ReadKnown(row, token(position + 1), vocab_size);
  if (!score.ok()) return score.status();
  FillBytes(&*score, tokenizer);
  state_->prompt_scores[static_cast<size_t>(position) + 1] = *std::move(score);
  return absl::OkStatus();
}

std::string EngineSequence::FlushText() { return text_.stopped() ? std::string() : text_.Flush(); }

double EngineSequence::OnToken(SteadyTime now) {
  const SteadyTime since = last_token_.value_or(state_->request.arrival);
  if (!first_token_) first_token_ = now;
  last_token_ = now;
  return std::max(0.0, SecondsBetween(since, now));
}

KvReport EngineSequence::MakeKvReport(const KvSequenceReport& last) const {
  KvReport report;
  report.policy = std::string(policy().name());
  report.reason = state_->kv.reason;
  report.device_bytes = last.device_bytes;
  report.full_bytes = last.full_bytes;
  report.lists = last.lists;
  report.entries_kept = last.entries_kept;
  report.entries_merged = last.entries_merged;
  report.entries_dropped = last.entries_dropped;
  for (const KvFormatUse& use : last.formats) report.entries_by_format.emplace_back(FormatName(use.format), use.entries);
  if (last.entries_kept > 0) report.key_bits = last.key_bits, report.value_bits = last.value_bits;
  report.read_bytes_per_token = last.read_bytes_per_token;
  report.full_read_bytes_per_token = last.full_bytes;
  // Ratios compare with what the prompt would cost in the model's own type, at the end of the prompt.
  const KvSequenceReport& at_prompt = prefill_report_ ? *prefill_report_ : last;
  if (at_prompt.full_bytes > 0) {
    const double full = static_cast<double>(at_prompt.full_bytes);
    report.prompt_full_bytes = at_prompt.full_bytes;
    report.bytes_ratio = static_cast<double>(at_prompt.device_bytes) / full;
    report.peak_bytes_ratio = static_cast<double>(at_prompt.peak_device_bytes) / full;
  }
  return report;
}

Finished EngineSequence::MakeFinished(const End& end, absl::Status error, const KvSequenceReport& last, SteadyTime now) const {
  Finished finished;
  finished.index = index_;
  finished.reason = end.reason;
  finished.stop_reason = end.stop_reason;
  finished.error = std::move(error);
  finished.usage.prompt_tokens = num_prompt();
  finished.usage.completion_tokens = num_output();
  finished.usage.kv = MakeKvReport(last);
  const SteadyTime arrival = state_->request.arrival;
  Timings& t = finished.timings;
  t.queue = std::max(0.0, SecondsBetween(arrival, started_.value_or(now)));
  if (started_) t.prefill = SecondsBetween(*started_, prefill_end_.value_or(now));
  if (first_token_) {
    t.first_token = std::max(0.0, SecondsBetween(arrival, *first_token_));
    t.decode = SecondsBetween(*first_token_, *last_token_);
  }
  t.total = std::max(0.0, SecondsBetween(arrival, now));
  return finished;
}

}  // namespace loupe
