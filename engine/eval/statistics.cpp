#include "engine/eval/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace loupe {
namespace {

// log of the sum of exponentials.
double LogSumExp(std::span<const float> logits) {
  const double top = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - top);
  return top + std::log(sum);
}

}  // namespace

RowComparison CompareRows(std::span<const float> full, std::span<const float> policy, int32_t next) {
  const double log_full = LogSumExp(full), log_policy = LogSumExp(policy);
  RowComparison result;
  for (size_t i = 0; i < full.size(); ++i) {
    const double p = static_cast<double>(full[i]) - log_full, q = static_cast<double>(policy[i]) - log_policy;
    result.kl += std::exp(p) * (p - q);
  }
  result.kl = std::max(result.kl, 0.0);  // rounding may leave a few 1e-16 below
  result.same_top = ArgMax(full) == ArgMax(policy);
  result.nll_full = log_full - static_cast<double>(full[static_cast<size_t>(next)]);
  result.nll = log_policy - static_cast<double>(policy[static_cast<size_t>(next)]);
  return result;
}

double NegativeLogProbability(std::span<const float> logits, int32_t token) {
  return LogSumExp(logits) - static_cast<double>(logits[static_cast<size_t>(token)]);
}

int32_t ArgMax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double Mean(std::span<const double> values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double PercentileOf(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const double rank = std::ceil(share * static_cast<double>(values.size()));
  const auto at = static_cast<std::ptrdiff_t>(std::clamp(rank - 1, 0.0, static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<size_t>(at)];
}

Interval BootstrapRatio(std::span<const double> sums, std::span<const double> weights, int resamples, uint64_t seed) {
  if (sums.empty()) return {};
  std::mt19937_64 random(seed);
  std::vector<double> ratios;
  ratios.reserve(static_cast<size_t>(resamples));
  for (int i = 0; i < resamples; ++i) {
    double sum = 0, weight = 0;
    for (size_t k = 0; k < sums.size(); ++k) {
      const size_t pick = random() % sums.size();
      sum += sums[pick], weight += weights[pick];
    }
    ratios.push_back(weight != 0 ? sum / weight : 0);
  }
  return {PercentileOf(ratios, 0.025), PercentileOf(ratios, 0.975)};
}

}  // namespace loupe
