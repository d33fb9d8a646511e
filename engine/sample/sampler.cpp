#include "engine/sample/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

using Candidate = SamplerScratch::Candidate;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kGreedyBelow = 1e-5f;  // temperatures below it cannot be told from 0
// Long enough that compilers leave the inner loops alone and make vector code of them, whatever the vector length.
constexpr int kLanes = 64;
constexpr int kBlock = 1024;

uint64_t Mix(uint64_t x) {  // the finaliser of SplitMix64 (Steele, Lea, Flood 2014)
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

bool Better(const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

// exp(x) for x <= 0 within 2e-7 relative; 0 below -87, and for NaN. Written so that loops over it become vector code.
inline float ExpOfNegative(float x) {
  const float c = x > -87.0f ? x : -87.0f;
  const float shifted = c * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the nearest integer
  const float n = shifted - 12582912.0f;
  const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;  // c - n ln 2, in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float scale = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return x > -87.0f ? p * scale : 0.0f;
}

// The largest value; -inf if there is none (NaN is never larger).
float MaxOf(std::span<const float> x) {
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, kMinusInfinity);
  size_t i = 0;
  for (; i + kLanes <= x.size(); i += kLanes) {
    const float* values = x.data() + i;
    for (size_t j = 0; j < kLanes; ++j) lanes[j] = values[j] > lanes[j] ? values[j] : lanes[j];
  }
  float best = kMinusInfinity;
  for (const float lane : lanes) best = std::max(best, lane);
  for (; i < x.size(); ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// Position of the largest value in one pass: blocks by their maximum, then a look into the winner.
int32_t ArgMax(std::span<const float> x) {
  float best = kMinusInfinity;
  size_t best_block = 0;
  for (size_t begin = 0; begin < x.size(); begin += kBlock) {
    const float block = MaxOf(x.subspan(begin, std::min<size_t>(kBlock, x.size() - begin)));
    if (block > best) best = block, best_block = begin;
  }
  size_t i = best_block;
  while (x[i] != best) ++i;
  return static_cast<int32_t>(i);
}

// How a logit becomes an unnormalised probability.
struct Weighting {
  float best;       // largest logit
  float inverse_t;  // 1 / temperature
  float threshold;  // logits below it have weight 0

  float operator()(float logit) const {
    const float value = ExpOfNegative((logit - best) * inverse_t);
    return logit >= threshold ? value : 0.0f;
  }
};

// Sums of weights over blocks of kBlock ids, and the total. The order of additions is fixed.
double SumWeights(std::span<const float> logits, const Weighting& weight, std::vector<double>* block_sums) {
  block_sums->clear();
  double total = 0;
  for (size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const std::span<const float> block = logits.subspan(begin, std::min<size_t>(kBlock, logits.size() - begin));
    float lanes[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= block.size(); i += kLanes) {
      const float* x = block.data() + i;
      for (size_t j = 0; j < kLanes; ++j) lanes[j] += weight(x[j]);
    }
    for (; i < block.size(); ++i) lanes[i % kLanes] += weight(block[i]);
    double sum = 0;
    for (const float lane : lanes) sum += static_cast<double>(lane);
    block_sums->push_back(sum);
    total += sum;
  }
  return total;
}

// The `count` best candidates, best first; fewer if fewer are above -inf. Close to one pass when count is far below V.
void SelectBest(std::span<const float> logits, size_t count, std::vector<Candidate>* out) {
  out->clear();
  if (count == 0) return;
  const size_t limit = 2 * count + kLanes;
  float threshold = kMinusInfinity;
  for (size_t i = 0; i < logits.size(); ++i) {
    // Ids ascend, so one that only equals the worst that is kept would lose the tie.
    if (!(logits[i] > threshold)) continue;
    out->push_back({logits[i], static_cast<int32_t>(i)});
    if (out->size() < limit) continue;
    std::nth_element(out->begin(), out->begin() + static_cast<std::ptrdiff_t>(count) - 1, out->end(), Better);
    out->resize(count);
    threshold = out->back().logit;
  }
  const size_t kept = std::min(count, out->size());
  std::partial_sort(out->begin(), out->begin() + static_cast<std::ptrdiff_t>(kept), out->end(), Better);
  out->resize(kept);
}

double WeighCandidates(const std::vector<Candidate>& candidates, const Weighting& weight, std::vector<double>* weights) {
  weights->clear();
  double total = 0;
  for (const Candidate& c : candidates) {
    weights->push_back(static_cast<double>(weight(c.logit)));
    total += weights->back();
  }
  return total;
}

}  // namespace

double UniformAt(uint64_t seed, uint64_t index) {
  // Neighbouring seeds must not give shifted copies of one series, hence two rounds.
  const uint64_t key = Mix(seed + 0x9e3779b97f4a7c15u);
  const uint64_t bits = Mix(Mix(key + (index + 1) * 0x9e3779b97f4a7c15u) ^ key);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

Sampler::Sampler(const SamplingParams& params, uint64_t seed, std::span<const int32_t> prompt, std::span<const int32_t> end_ids)
    : temperature_(params.temperature),
      top_p_(params.top_p),
      min_p_(params.min_p),
      top_k_(params.top_k),
      repetition_penalty_(params.repetition_penalty),
      frequency_penalty_(params.frequency_penalty),
      presence_penalty_(params.presence_penalty),
      min_tokens_(params.min_tokens),
      logprobs_(params.logprobs),
      ignore_eos_(params.ignore_eos),
      seed_(seed),
      logit_bias_(params.logit_bias),
      end_ids_(end_ids.begin(), end_ids.end()),
      stop_ids_(params.stop_token_ids),
      has_penalties_(params.repetition_penalty != 1 || params.frequency_penalty != 0 || params.presence_penalty != 0) {
  if (has_penalties_ && repetition_penalty_ != 1) {
    for (const int32_t id : prompt) seen_[id].in_prompt = true;
  }
}

void Sampler::Accept(int32_t token) {
  if (has_penalties_) ++seen_[token].in_output;
}

bool Sampler::Changes(int num_generated) const {
  return !logit_bias_.empty() || !seen_.empty() || ignore_eos_ || num_generated < min_tokens_;
}

void Sampler::ChangeLogits(std::span<float> logits, int num_generated, SamplerScratch* scratch) const {
  const auto change = [&](int32_t id, auto&& rule) {
    float& logit = logits[static_cast<size_t>(id)];
    scratch->saved.emplace_back(id, logit);
    logit = rule(logit);
  };
  for (const auto& [id, bias] : logit_bias_) change(id, [b = bias](float x) { return x + b; });
  for (const auto& [id, seen] : seen_) {
    change(id, [this, s = seen](float x) {
      x = x > 0 ? x / repetition_penalty_ : x * repetition_penalty_;
      return x - frequency_penalty_ * static_cast<float>(s.in_output) - (s.in_output > 0 ? presence_penalty_ : 0.0f);
    });
  }
  const bool too_early = num_generated < min_tokens_;
  const auto mask = [](float) { return kMinusInfinity; };
  if (ignore_eos_ || too_early) {
    for (const int32_t id : end_ids_) change(id, mask);
  }
  if (too_early) {
    for (const int32_t id : stop_ids_) change(id, mask);
  }
}

void Sampler::FillTop(std::span<const float> logits, SamplerScratch* scratch, double* log_sum, SampledToken* token) const {
  const float best = MaxOf(logits);
  const double total = SumWeights(logits, {best, 1.0f, kMinusInfinity}, &scratch->block_sums);
  *log_sum = static_cast<double>(best) + std::log(total);
  SelectBest(logits, static_cast<size_t>(logprobs_), &scratch->candidates);
  for (const Candidate& c : scratch->candidates) {
    token->logprobs.top.push_back({c.id, static_cast<float>(static_cast<double>(c.logit) - *log_sum), {}});
  }
}

absl::Status Sampler::Sample(std::span<float> logits, int num_generated, SamplerScratch* scratch, SampledToken* token) const {
  token->logprobs = {};
  double log_sum = 0;
  if (logprobs_ >= 0) FillTop(logits, scratch, &log_sum, token);
  scratch->saved.clear();
  if (Changes(num_generated)) ChangeLogits(logits, num_generated, scratch);

  const bool greedy = temperature_ < kGreedyBelow;
  const float best = MaxOf(logits);
  const bool finite = std::isfinite(best);
  if (finite) token->id = greedy ? ArgMax(logits) : Draw(logits, best, num_generated, scratch);

  // Backwards, so that an id that was changed twice gets its first value.
  for (size_t i = scratch->saved.size(); i-- > 0;) {
    logits[static_cast<size_t>(scratch->saved[i].first)] = scratch->saved[i].second;
  }
  if (!finite) {
    const float raw_best = MaxOf(logits);
    if (std::isfinite(raw_best)) {
      return absl::OutOfRangeError(absl::StrCat("logit_bias, min_tokens and ignore_eos leave none of ", logits.size(),
                                                " tokens to choose from; relax them"));
    }
    return absl::InternalError(absl::StrCat("none of ", logits.size(), " logits is a finite number (largest: ", raw_best,
                                            "); the model's weights or this build are broken"));
  }
  if (logprobs_ >= 0) {
    token->logprobs.chosen.id = token->id;
    token->logprobs.chosen.logprob = static_cast<float>(static_cast<double>(logits[static_cast<size_t>(token->id)]) - log_sum);
  }
  return absl::OkStatus();
}

int32_t Sampler::Draw(std::span<const float> logits, float best, int num_generated, SamplerScratch* scratch) const {
  const double u = UniformAt(seed_, static_cast<uint64_t>(num_generated));
  const bool all = (top_k_ <= 0 || static_cast<size_t>(top_k_) >= logits.size()) && top_p_ >= 1;
  return all ? DrawFromAll(logits, best, u, scratch) : DrawFromBest(logits, best, u, scratch);
}

int32_t Sampler::DrawFromAll(std::span<const float> logits, float best, double u, SamplerScratch* scratch) const {
  const float threshold = min_p_ > 0 ? best + temperature_ * std::log(min_p_) : kMinusInfinity;
  const Weighting weight{best, 1.0f / temperature_, std::min(threshold, best)};
  double left = u * SumWeights(logits, weight, &scratch->block_sums);
  size_t block = 0;
  while (block + 1 < scratch->block_sums.size() && left >= scratch->block_sums[block]) left -= scratch->block_sums[block++];
  int32_t last = -1;  // rounding may leave a rest behind: then the last token with a weight is meant
  for (size_t i = block * kBlock; i < logits.size(); ++i) {
    const double w = static_cast<double>(weight(logits[i]));
    if (w <= 0) continue;
    last = static_cast<int32_t>(i);
    if (left < w) return last;
    left -= w;
    if ((i + 1) % kBlock == 0 && last >= 0) return last;
  }
  for (size_t i = logits.size(); last < 0 && i-- > 0;) {
    if (weight(logits[i]) > 0) last = static_cast<int32_t>(i);
  }
  return last;
}

int32_t Sampler::DrawFromBest(std::span<const float> logits, float best, double u, SamplerScratch* scratch) const {
  const Weighting weight{best, 1.0f / temperature_, kMinusInfinity};
  std::vector<Candidate>& candidates = scratch->candidates;
  std::vector<double>& weights = scratch->weights;
  const double p = static_cast<double>(top_p_);
  const bool has_top_k = top_k_ > 0 && static_cast<size_t>(top_k_) < logits.size();
  double total = has_top_k ? 0 : SumWeights(logits, weight, &scratch->block_sums);
  size_t kept = 0;
  double mass = 0;
  // Few tokens hold nearly all of the mass: look at some, and at eight times as many if that was not enough.
  for (size_t count = has_top_k ? static_cast<size_t>(top_k_) : 64;; count *= 8) {
    SelectBest(logits, count, &candidates);
    const double found = WeighCandidates(candidates, weight, &weights);
    if (has_top_k) total = found;
    mass = 0;
    for (kept = 0; kept < candidates.size() && (kept == 0 || mass < p * total); ++kept) mass += weights[kept];
    if (has_top_k || mass >= p * total || candidates.size() < count || count >= logits.size()) break;
  }
  while (kept > 1 && weights[kept - 1] < static_cast<double>(min_p_) * weights[0]) mass -= weights[--kept];
  double left = u * mass;
  for (size_t i = 0; i + 1 < kept; ++i) {
    if (left < weights[i]) return candidates[i].id;
    left -= weights[i];
  }
  // Weights that vanish at this temperature do not count as kept.
  while (kept > 1 && weights[kept - 1] <= 0) --kept;
  return candidates[kept - 1].id;
}

}  // namespace loupe
