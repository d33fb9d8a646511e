// The arithmetic of evaluation: divergence of two rows of logits, percentiles, bootstrap intervals. Double precision,
// pure, any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace loupe {

// What one teacher-forced prediction says of a policy beside the full cache.
struct RowComparison {
  double kl = 0;          // KL(full || policy) in nats over the whole vocabulary
  bool same_top = false;  // both prefer the same token
  double nll_full = 0;    // of the token that follows, in nats
  double nll = 0;
};
RowComparison CompareRows(std::span<const float> full, std::span<const float> policy, int32_t next);

// -log softmax(logits)[token].
double NegativeLogProbability(std::span<const float> logits, int32_t token);
int32_t ArgMax(std::span<const float> logits);

double Mean(std::span<const double> values);
// Nearest rank; `share` in [0, 1]. 0 of nothing.
double PercentileOf(std::vector<double> values, double share);

struct Interval {
  double low = 0;
  double high = 0;
};
// The 95 % interval of a ratio of sums, by resampling contexts (percentile bootstrap, Efron 1979): each context brings
// a sum and a weight, and the statistic is the sum of sums over the sum of weights. The same seed gives the same
// resamples, so differences of two policies over the same contexts are paired. One context gives a point.
Interval BootstrapRatio(std::span<const double> sums, std::span<const double> weights, int resamples = 10000,
                        uint64_t seed = 1);

}  // namespace loupe
