// Chooses the next token of one sample from its logits. Owned by the sample, used by the step thread.
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
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"

namespace loupe {

// Working memory of a draw. One per step thread, shared by all its samplers.
struct SamplerScratch {
  struct Candidate {
    float logit = 0;
    int32_t id = 0;
  };
  std::vector<Candidate> candidates;
  std::vector<double> weights;                   // of the candidates
  std::vector<double> block_sums;
  std::vector<std::pair<int32_t, float>> saved;  // (id, logit before bias, penalties and mask)
};

struct SampledToken {
  int32_t id = -1;
  TokenLogprobs logprobs;  // filled if asked for, without the tokens' bytes
};

// A number in [0, 1) with 53 random bits, a function of its arguments.
double UniformAt(uint64_t seed, uint64_t index);

class Sampler {
 public:
  // `end_ids` end an answer: masked before min_tokens, or always with ignore_eos. All ids of `params` are in range.
  Sampler(const SamplingParams& params, uint64_t seed, std::span<const int32_t> prompt, std::span<const int32_t> end_ids);

  // `logits` [V] are changed on the way and restored. Log-probabilities are those of the logits as the model gave them.
  // INTERNAL if no logit is finite; OUT_OF_RANGE if bias and mask leave no token.
  absl::Status Sample(std::span<float> logits, int num_generated, SamplerScratch* scratch, SampledToken* token) const;
  // `token` is part of the output from now on.
  void Accept(int32_t token);

 private:
  struct Seen {
    bool in_prompt = false;
    int in_output = 0;
  };
  using Candidate = SamplerScratch::Candidate;

  bool Changes(int num_generated) const;
  void ChangeLogits(std::span<float> logits, int num_generated, SamplerScratch* scratch) const;
  void FillTop(std::span<const float> logits, SamplerScratch* scratch, double* log_sum, SampledToken* token) const;
  int32_t Draw(std::span<const float> logits, float best, int num_generated, SamplerScratch* scratch) const;
  int32_t DrawFromAll(std::span<const float> logits, float best, double u, SamplerScratch* scratch) const;
  int32_t DrawFromBest(std::span<const float> logits, float best, double u, SamplerScratch* scratch) const;

  float temperature_, top_p_, min_p_;
  int top_k_;
  float repetition_penalty_, frequency_penalty_, presence_penalty_;
  int min_tokens_, logprobs_;
  bool ignore_eos_;
  uint64_t seed_;
  std::vector<std::pair<int32_t, float>> logit_bias_;
  std::vector<int32_t> end_ids_, stop_ids_;
  bool has_penalties_;
  std::unordered_map<int32_t, Seen> seen_;  // kept only if there are penalties
};

}  // namespace loupe
