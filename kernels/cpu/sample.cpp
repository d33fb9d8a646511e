// Choosing tokens: a loop or two over the vocabulary a row, in vector code; rows are shared among the threads.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_ops.h"

namespace loupe {
namespace {

struct Candidate {
  float logit = 0;
  int32_t id = 0;
};

// Working memory of a draw. One a thread, which keeps it.
struct SampleScratch {
  std::vector<Candidate> candidates;
  std::vector<double> weights;  // of the candidates
  std::vector<double> block_sums;
  std::vector<std::pair<int32_t, float>> saved;  // (id, logit before the changes)
};

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// Long enough that compilers leave the inner loops alone and make vector code of them, whatever the vector length.
constexpr int kLanes = 64;
constexpr int kBlock = 1024;

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

int32_t DrawFromAll(std::span<const float> logits, float best, const SampleRow& row, SampleScratch* scratch) {
  const float threshold = row.min_p > 0 ? best + row.temperature * std::log(row.min_p) : kMinusInfinity;
  const Weighting weight{best, 1.0f / row.temperature, std::min(threshold, best)};
  double left = row.u * SumWeights(logits, weight, &scratch->block_sums);
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

int32_t DrawFromBest(std::span<const float> logits, float best, const SampleRow& row, SampleScratch* scratch) {
  const Weighting weight{best, 1.0f / row.temperature, kMinusInfinity};
  std::vector<Candidate>& candidates = scratch->candidates;
  std::vector<double>& weights = scratch->weights;
  const double p = static_cast<double>(row.top_p);
  const bool has_top_k = row.top_k > 0 && static_cast<size_t>(row.top_k) < logits.size();
  double total = has_top_k ? 0 : SumWeights(logits, weight, &scratch->block_sums);
  size_t kept = 0;
  double mass = 0;
  // Few tokens hold nearly all of the mass: look at some, and at eight times as many if that was not enough.
  for (size_t count = has_top_k ? static_cast<size_t>(row.top_k) : 64;; count *= 8) {
    SelectBest(logits, count, &candidates);
    const double found = WeighCandidates(candidates, weight, &weights);
    if (has_top_k) total = found;
    mass = 0;
    for (kept = 0; kept < candidates.size() && (kept == 0 || mass < p * total); ++kept) mass += weights[kept];
    if (has_top_k || mass >= p * total || candidates.size() < count || count >= logits.size()) break;
  }
  while (kept > 1 && weights[kept - 1] < static_cast<double>(row.min_p) * weights[0]) mass -= weights[--kept];
  double left = row.u * mass;
  for (size_t i = 0; i + 1 < kept; ++i) {
    if (left < weights[i]) return candidates[i].id;
    left -= weights[i];
  }
  // Weights that vanish at this temperature do not count as kept.
  while (kept > 1 && weights[kept - 1] <= 0) --kept;
  return candidates[kept - 1].id;
}

int32_t Draw(std::span<const float> logits, float best, const SampleRow& row, SampleScratch* scratch) {
  const bool all = (row.top_k <= 0 || static_cast<size_t>(row.top_k) >= logits.size()) && row.top_p >= 1;
  return all ? DrawFromAll(logits, best, row, scratch) : DrawFromBest(logits, best, row, scratch);
}

void Change(std::span<float> logits, std::span<const LogitChange> changes, SampleScratch* scratch) {
  scratch->saved.clear();
  for (const LogitChange& c : changes) {
    float& x = logits[static_cast<size_t>(c.id)];
    scratch->saved.emplace_back(c.id, x);
    x += c.bias;
    x = x > 0 ? x / c.repetition : x * c.repetition;
    x -= c.frequency;
    x -= c.presence;
  }
}

// What the logits say before anything is changed: the part of *out that rows with the same logits share. Returns the
// logarithm of the sum of all exponentials, if asked for.
double Look(std::span<const float> logits, int num_top, SampleScratch* scratch, SampledRow* out) {
  *out = {};
  out->best = MaxOf(logits);
  if (num_top < 0) return 0;
  const double log_sum =
      static_cast<double>(out->best) + std::log(SumWeights(logits, {out->best, 1.0f, kMinusInfinity}, &scratch->block_sums));
  SelectBest(logits, static_cast<size_t>(num_top), &scratch->candidates);
  for (const Candidate& c : scratch->candidates) {
    out->top_ids[out->num_top] = c.id;
    out->top_logprobs[out->num_top++] = static_cast<float>(static_cast<double>(c.logit) - log_sum);
  }
  return log_sum;
}

void ApplyMask(std::span<float> logits, const uint32_t* mask) {
  for (size_t begin = 0; begin < logits.size(); begin += 32) {
    const uint32_t word = mask[begin / 32];
    if (word == ~0u) continue;
    const size_t count = std::min<size_t>(32, logits.size() - begin);
    for (size_t j = 0; j < count; ++j) logits[begin + j] = word >> j & 1 ? logits[begin + j] : kMinusInfinity;
  }
}

void Choose(std::span<float> logits, const SampleRow& row, std::span<const LogitChange> changes, double log_sum,
            SampleScratch* scratch, SampledRow* out) {
  Change(logits, changes, scratch);
  const float best = changes.empty() && row.mask < 0 ? out->best : MaxOf(logits);
  out->id = !std::isfinite(out->best) ? kNoFiniteLogit
            : !std::isfinite(best)    ? kNoTokenLeft
            : row.temperature < kGreedyBelow ? ArgMax(logits)
                                             : Draw(logits, best, row, scratch);
  for (const auto& [id, logit] : scratch->saved) logits[static_cast<size_t>(id)] = logit;
  if (out->id >= 0 && row.num_top >= 0) {
    out->logprob = static_cast<float>(static_cast<double>(logits[static_cast<size_t>(out->id)]) - log_sum);
  }
}

}  // namespace

void SampleCpu(const SampleArgs& args, CpuContext context) {
  const auto* rows = args.rows.as<SampleRow>();
  const auto* changes = args.changes.as<LogitChange>();
  auto* out = args.out.as<SampledRow>();
  const int64_t count = args.rows.rows();
  const auto continues = [&](int64_t i) { return i > 0 && i < count && rows[i].logits == rows[i - 1].logits; };
  context.pool.Run([&](int thread) {
    thread_local SampleScratch scratch;
    auto [begin, end] = context.pool.Share(count, thread);
    // Rows that share their logits stay together.
    while (begin < end && continues(begin)) ++begin;
    while (begin < end && continues(end)) ++end;
    double log_sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      const SampleRow& row = rows[i];
      const std::span<float> logits(args.logits.row<float>(row.logits), static_cast<size_t>(args.logits.row_elements()));
      if (continues(i)) {
        out[i] = out[i - 1];
        out[i].logprob = 0;
      } else {
        log_sum = Look(logits, row.num_top, &scratch, out + i);
        if (row.mask >= 0) ApplyMask(logits, args.masks.row<uint32_t>(row.mask));
      }
      Choose(logits, row, {changes + row.first_change, static_cast<size_t>(row.num_changes)}, log_sum, &scratch, out + i);
    }
  });
}

}  // namespace loupe
