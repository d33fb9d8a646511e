#include "engine/sample/sampler.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

uint64_t Mix(uint64_t x) {  // the finaliser of SplitMix64 (Steele, Lea, Flood 2014)
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

absl::Status NoFiniteLogit(const SampledRow& row, int vocab_size) {
  return absl::InternalError(absl::StrCat("none of ", vocab_size, " logits is a finite number (largest: ", row.best,
                                          "); the model's weights or this build are broken"));
}

TokenLogprobs LogprobsOf(const SampledRow& row) {
  TokenLogprobs logprobs;
  logprobs.chosen = {row.id, row.logprob, {}};
  for (int i = 0; i < row.num_top; ++i) logprobs.top.push_back({row.top_ids[i], row.top_logprobs[i], {}});
  return logprobs;
}

}  // namespace

SampleRow DescribeKnown(int32_t id, int num_top, LogitChange* change) {
  constexpr float kAboveAll = 1e30f;
  *change = {id, kAboveAll, 1, 0, 0};
  SampleRow row;
  row.temperature = 0;
  row.num_changes = 1;
  row.num_top = num_top;
  return row;
}

absl::StatusOr<TokenLogprobs> ReadKnown(const SampledRow& row, int32_t id, int vocab_size) {
  if (row.id == kNoFiniteLogit) return NoFiniteLogit(row, vocab_size);
  TokenLogprobs logprobs = LogprobsOf(row);
  // Only a logit of -inf, or none at all, stays below the others.
  if (row.id != id) logprobs.chosen = {id, kMinusInfinity, {}};
  return logprobs;
}

double UniformAt(uint64_t seed, uint64_t index) {
  // Neighbouring seeds must not give shifted copies of one series, hence two rounds.
  const uint64_t key = Mix(seed + 0x9e3779b97f4a7c15u);
  const uint64_t bits = Mix(Mix(key + (index + 1) * 0x9e3779b97f4a7c15u) ^ key);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

Sampler::Sampler(const SamplingParams& params, uint64_t seed, std::span<const int32_t> prompt, std::span<const int32_t> end_ids)
    : repetition_penalty_(params.repetition_penalty),
      frequency_penalty_(params.frequency_penalty),
      presence_penalty_(params.presence_penalty),
      min_tokens_(params.min_tokens),
      ignore_eos_(params.ignore_eos),
      seed_(seed),
      end_ids_(end_ids.begin(), end_ids.end()),
      stop_ids_(params.stop_token_ids),
      has_penalties_(params.repetition_penalty != 1 || params.frequency_penalty != 0 || params.presence_penalty != 0) {
  row_.temperature = params.temperature;
  row_.top_p = params.top_p;
  row_.min_p = params.min_p;
  row_.top_k = params.top_k;
  row_.num_top = params.logprobs;
  for (const auto& [id, bias] : params.logit_bias) ChangeOf(id).bias += bias;
  if (repetition_penalty_ == 1) return;
  for (const int32_t id : prompt) ChangeOf(id).repetition = repetition_penalty_;
}

LogitChange& Sampler::ChangeOf(int32_t id) {
  const auto [at, fresh] = place_.try_emplace(id, static_cast<int>(changes_.size()));
  if (fresh) changes_.emplace_back().id = id;
  return changes_[static_cast<size_t>(at->second)];
}

void Sampler::Accept(int32_t token) {
  if (!has_penalties_) return;
  LogitChange& change = ChangeOf(token);
  change.repetition = repetition_penalty_;
  change.frequency = frequency_penalty_ * static_cast<float>(++in_output_[token]);
  change.presence = presence_penalty_;
}

SampleRow Sampler::Describe(int num_generated, std::vector<LogitChange>* changes) const {
  SampleRow row = row_;
  row.u = UniformAt(seed_, static_cast<uint64_t>(num_generated));
  const size_t first = changes->size();
  changes->insert(changes->end(), changes_.begin(), changes_.end());
  const auto mask = [&](int32_t id) {
    const auto found = place_.find(id);
    const auto new_ones = changes->begin() + static_cast<std::ptrdiff_t>(first + changes_.size());
    const auto at = found != place_.end() ? changes->begin() + static_cast<std::ptrdiff_t>(first) + found->second
                                          : std::find_if(new_ones, changes->end(), [id](const LogitChange& c) { return c.id == id; });
    (at == changes->end() ? changes->emplace_back() : *at) = {id, kMinusInfinity, 1, 0, 0};
  };
  const bool too_early = num_generated < min_tokens_;
  if (ignore_eos_ || too_early) std::for_each(end_ids_.begin(), end_ids_.end(), mask);
  if (too_early) std::for_each(stop_ids_.begin(), stop_ids_.end(), mask);
  row.first_change = static_cast<int32_t>(first);
  row.num_changes = static_cast<int32_t>(changes->size() - first);
  return row;
}

absl::Status Sampler::Read(const SampledRow& row, int vocab_size, SampledToken* token) const {
  if (row.id == kNoFiniteLogit) return NoFiniteLogit(row, vocab_size);
  if (row.id == kNoTokenLeft) {
    return absl::OutOfRangeError(absl::StrCat("logit_bias, min_tokens, ignore_eos and what the answer may be leave none of ", vocab_size,
                                              " tokens to choose from; relax them"));
  }
  token->id = row.id;
  token->logprobs = row_.num_top < 0 ? TokenLogprobs{} : LogprobsOf(row);
  return absl::OkStatus();
}

}  // namespace loupe
