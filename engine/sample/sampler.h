// How the next token of one sample is chosen from its logits, which the backend does (kernels/ops.h, SampleRow). Owned by
// the sample, used by the step thread.
//
// Order: logit_bias, penalties (repetition over prompt and output; frequency and presence over the output), mask of ids
// that must not come yet; then the best token (temperature 0, ties: lowest id), or temperature, top_k, top_p over what
// top_k left, min_p against the best token, and a draw. Each filter keeps at least one token.
//
// The draw is a function of (seed, how many tokens this sample has) and the logits alone, so a sample gives the same
// tokens whatever runs beside it, in whichever order, preempted or not.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/request.h"
#include "kernels/ops.h"

namespace loupe {

struct SampledToken {
  int32_t id = -1;
  TokenLogprobs logprobs;  // filled if asked for, without the tokens' bytes
};

// A number in [0, 1) with 53 random bits, a function of its arguments.
double UniformAt(uint64_t seed, uint64_t index);

// What the logits before a known token say of it: as a choice that cannot fall otherwise, so that the numbers are those of
// a chosen token. `row` has no place in the logits yet; *change is its only one.
SampleRow DescribeKnown(int32_t id, int num_top, LogitChange* change);
// INTERNAL as Sampler::Read.
absl::StatusOr<TokenLogprobs> ReadKnown(const SampledRow& row, int32_t id, int vocab_size);

class Sampler {
 public:
  // `end_ids` end an answer: masked before min_tokens, or always with ignore_eos. All ids of `params` are in range.
  Sampler(const SamplingParams& params, uint64_t seed, std::span<const int32_t> prompt, std::span<const int32_t> end_ids);

  // How the backend shall choose the token that follows `num_generated` ones; its changes are appended to *changes.
  SampleRow Describe(int num_generated, std::vector<LogitChange>* changes) const;
  // What it has chosen out of `vocab_size` ids. INTERNAL if no logit is finite; OUT_OF_RANGE if bias and mask leave none.
  absl::Status Read(const SampledRow& row, int vocab_size, SampledToken* token) const;
  // `token` is part of the output from now on.
  void Accept(int32_t token);

 private:
  LogitChange& ChangeOf(int32_t id);

  SampleRow row_;
  float repetition_penalty_, frequency_penalty_, presence_penalty_;
  int min_tokens_;
  bool ignore_eos_;
  uint64_t seed_;
  std::vector<int32_t> end_ids_, stop_ids_;
  bool has_penalties_;
  std::vector<LogitChange> changes_;        // by bias and penalties, as the output is now
  std::unordered_map<int32_t, int> place_;  // of an id in changes_
  std::unordered_map<int32_t, int> in_output_;  // kept only if there are penalties
};

}  // namespace loupe
