// One sample of a request from admission to its end: its tokens, how far the cache has them, its sampler and its text.
// Owned by the engine core, used by the step thread.
//
// Phases: waiting -> prefill -> decode -> retiring. A preemption leads from prefill or decode back to waiting; then the
// prompt is computed again as prompt rows and what was generated as decode rows, so every bit comes out as before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/grammar/grammar.h"
#include "engine/kv_chooser.h"
#include "engine/request.h"
#include "engine/response_stream.h"
#include "engine/sample/sampler.h"
#include "engine/scheduler.h"
#include "engine/text/stream_decoder.h"
#include "kvcache/kv_cache.h"

namespace loupe {

class EngineSequence;

// What the samples of one request share.
struct RequestState {
  Request request;
  std::shared_ptr<ResponseStream> stream;
  uint64_t seed = 0;         // of sample 0
  KvChoice kv;
  int max_tokens = 0;        // of a sample's output; with the prompt never more than the context
  bool context_bound = false;  // max_tokens is what the context leaves, not what was asked
  bool started = false;
  // While the prompt is computed and its log-probabilities are wanted: one a prompt token, id -1 where it is not known yet.
  // Empty otherwise, also once they have been told.
  std::vector<TokenLogprobs> prompt_scores;
  int unfinished = 0;
  // Samples 1.. of a request with n > 1, until the prompt that they share is in the cache.
  std::vector<std::unique_ptr<EngineSequence>> siblings;
};

enum class SequencePhase : uint8_t { kWaiting, kPrefill, kDecode, kRetiring };

class EngineSequence {
 public:
  EngineSequence(std::shared_ptr<RequestState> state, int index, uint64_t order, const Tokenizer& tokenizer,
                 std::span<const int32_t> end_ids);

  const RequestState& request() const { return *state_; }
  RequestState& request() { return *state_; }
  int index() const { return index_; }
  Rank rank() const { return {state_->request.priority, order_}; }
  SequencePhase phase() const { return phase_; }
  SeqId kv() const { return kv_; }
  const Sampler& sampler() const { return sampler_; }

  int num_prompt() const { return static_cast<int>(state_->request.prompt.size()); }
  int num_output() const { return static_cast<int>(output_.size()); }
  int num_known() const { return num_prompt() + num_output(); }
  int num_computed() const { return computed_; }  // positions in the cache
  int prompt_rows() const { return computed_ < num_prompt() ? num_prompt() - computed_ : 0; }
  // Not beyond the next moment at which the policy acts.
  int decode_rows() const;
  const Policy& policy() const { return *state_->kv.policy; }
  int32_t token(int position) const;

  // ---- phases
  void Start(SeqId kv, SteadyTime now);
  // Rows are in the cache. Returns how many of them had been there before a preemption.
  int Advance(int rows);
  void Preempt();
  int num_preemptions() const { return num_preemptions_; }
  // The prompt's pages come from the sample that computed it.
  void StartForked(SeqId kv, SteadyTime now);
  void Retire();
  void OnPrefillEnd(const KvSequenceReport& report, SteadyTime now);
  bool prefill_reported() const { return prefill_report_.has_value(); }

  // ---- log-probabilities of the prompt
  // The row of `position` shall say how probable the prompt token behind it is.
  bool WantsScore(int position) const;
  // INTERNAL: the logits of that row are broken.
  absl::Status TakeScore(int position, const SampledRow& row, int vocab_size, const Tokenizer& tokenizer);

  // ---- output
  // The token becomes part of the output; its text, and perhaps the end, is in *delta and *end.
  struct End {
    FinishReason reason = FinishReason::kStop;
    std::string stop_reason;
  };
  std::optional<End> Accept(SampledToken token, bool ends_answer, const Tokenizer& tokenizer, Delta* delta);
  // Tokens that must come next, so far as the grammar leaves no choice: they need not be drawn. None if their
  // log-probabilities are wanted. The last one is left out if more text could join it.
  std::vector<int32_t> ForcedTokens(const Tokenizer& tokenizer);
  bool has_grammar() const { return matcher_.has_value(); }
  // Writes what may come next, see GrammarMatcher; may be called from the thread of side work. A failure is kept.
  void FillMask(uint32_t* mask) { grammar_status_.Update(matcher_->FillMask(mask)); }
  // Why the grammar cannot go on.
  const absl::Status& grammar_status() const { return grammar_status_; }
  // Text that was held back. Nothing follows.
  std::string FlushText();
  // Seconds since arrival for the first token, since the last one for others.
  double OnToken(SteadyTime now);

  Finished MakeFinished(const End& end, absl::Status error, const KvSequenceReport& last, SteadyTime now) const;

 private:
  bool IsStopId(int32_t id) const;
  KvReport MakeKvReport(const KvSequenceReport& last) const;

  std::shared_ptr<RequestState> state_;
  int index_;
  uint64_t order_;
  SequencePhase phase_ = SequencePhase::kWaiting;
  SeqId kv_;
  int computed_ = 0;
  int most_computed_ = 0;
  int num_preemptions_ = 0;
  std::vector<int32_t> output_;
  Sampler sampler_;
  StreamDecoder text_;
  std::optional<GrammarMatcher> matcher_;
  absl::Status grammar_status_;
  std::optional<KvSequenceReport> prefill_report_;
  std::optional<SteadyTime> started_, prefill_end_, first_token_, last_token_;
};

}  // namespace loupe
