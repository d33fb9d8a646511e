#include "kvcache/calibration/polykv_fit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/check.h"

namespace loupe {
namespace {

constexpr double kNothing = 1e-15;  // nats: less than anything that is measured

// Mean cost of one list with one pattern at each budget of the tables; text plus weighted needles.
double MeanCost(const FitInput& input, const FitOptions& options, int pattern, int budget, int list) {
  double cost = 0;
  for (const PatternTable& t : input.text) cost += t.at(pattern, budget, list) / static_cast<double>(input.text.size());
  for (const PatternTable& t : input.needles) {
    cost += options.needle_weight * t.at(pattern, budget, list) / static_cast<double>(input.needles.size());
  }
  return cost;
}

// A cost over budgets, of which a few are measured: a power law between two of them, and a straight line from the last
// one to `full`, where it is nothing. Never rises.
class Curve {
 public:
  Curve(const std::vector<int>& budgets, std::vector<double> costs, int full)
      : budgets_(budgets), costs_(std::move(costs)), full_(full) {
    for (size_t i = 0; i < costs_.size(); ++i) {
      costs_[i] = std::max(costs_[i], kNothing);
      if (i > 0) costs_[i] = std::min(costs_[i], costs_[i - 1]);
    }
  }
  double At(double entries) const {
    if (entries >= full_) return 0;
    if (entries >= budgets_.back()) return costs_.back() * (full_ - entries) / (full_ - budgets_.back());
    size_t high = 1;
    while (high + 1 < budgets_.size() && budgets_[high] < entries) ++high;
    const double a = std::log(budgets_[high - 1]), b = std::log(budgets_[high]), x = std::log(std::max(entries, 1.0));
    const double from = std::log(costs_[high - 1]), to = std::log(costs_[high]);
    return std::exp(from + (x - a) / (b - a) * (to - from));
  }

 private:
  const std::vector<int>& budgets_;
  std::vector<double> costs_;
  int full_;
};

// The budget of the tables that is nearest by ratio.
int NearestBudget(const std::vector<int>& budgets, double entries) {
  int best = 0;
  for (size_t i = 1; i < budgets.size(); ++i) {
    const auto away = [&](size_t k) { return std::abs(std::log(budgets[k] / std::max(entries, 1.0))); };
    if (away(i) < away(static_cast<size_t>(best))) best = static_cast<int>(i);
  }
  return best;
}

// Lists that are decided together.
std::vector<std::vector<int>> Units(const FitInput& input, bool per_head) {
  std::vector<std::vector<int>> units;
  for (int list = 0; list < input.num_layers * input.num_kv_heads; ++list) {
    if (per_head || list % input.num_kv_heads == 0) units.emplace_back();
    units.back().push_back(list);
  }
  return units;
}

// A unit departs from the default pattern only for one that is better by more than a standard error of the paired
// difference over prompts, and that does not lose half a point of the needles' cosine.
bool MayDepart(const FitInput& input, const std::vector<int>& unit, int pattern, int fallback, int budget) {
  double sum = 0, squares = 0, loss = 0;
  const double n = static_cast<double>(input.text.size());
  for (const PatternTable& t : input.text) {
    double difference = 0;
    for (const int list : unit) difference += t.at(pattern, budget, list) - t.at(fallback, budget, list);
    sum += difference / n, squares += difference * difference / n;
  }
  for (const int list : unit) {
    if (input.needle_cosine.lists == 0) break;
    loss += (input.needle_cosine.at(fallback, budget, list) - input.needle_cosine.at(pattern, budget, list)) /
            static_cast<double>(unit.size());
  }
  const double error = n > 1 ? std::sqrt(std::max(0.0, squares - sum * sum) / (n - 1)) : 0;
  return sum + error < 0 && loss <= 0.005;
}

// What a unit does at each budget of the tables.
struct Envelope {
  std::vector<int> patterns;
  std::vector<double> costs;
};

Envelope MakeEnvelope(const FitInput& input, const std::vector<int>& unit, int fallback, const FitOptions& options) {
  Envelope envelope;
  for (int b = 0; b < static_cast<int>(input.budgets.size()); ++b) {
    int best = fallback;
    double least = 0;
    for (const int list : unit) least += MeanCost(input, options, fallback, b, list);
    for (int pattern = 0; pattern < input.text[0].patterns && options.vary != FitVary::kBudget; ++pattern) {
      if (pattern == fallback || !MayDepart(input, unit, pattern, fallback, b)) continue;
      double cost = 0;
      for (const int list : unit) cost += MeanCost(input, options, pattern, b, list);
      if (cost < least) best = pattern, least = cost;
    }
    envelope.patterns.push_back(best);
    envelope.costs.push_back(least);
  }
  return envelope;
}

struct Point {
  double entries, cost;
};

// The lower convex hull of a curve from `least` to `most` entries, in steps of an eighth of a doubling.
std::vector<Point> Hull(const Curve& curve, double least, double most) {
  std::vector<Point> hull;
  for (double entries = least;; entries = std::min(most, entries * std::exp2(0.125))) {
    const Point next{entries, curve.At(entries)};
    while (hull.size() > 1) {
      const Point &a = hull[hull.size() - 2], &b = hull.back();
      if ((b.cost - a.cost) * (next.entries - a.entries) <= (next.cost - a.cost) * (b.entries - a.entries)) break;
      hull.pop_back();
    }
    hull.push_back(next);
    if (entries >= most) return hull;
  }
}

// At a price an entry, the best point of each hull; of equals the one with fewer entries.
std::vector<double> EntriesAt(const std::vector<std::vector<Point>>& hulls, double price) {
  std::vector<double> entries;
  for (const std::vector<Point>& hull : hulls) {
    const Point* best = &hull[0];
    for (const Point& p : hull) {
      if (p.cost + price * p.entries < best->cost + price * best->entries) best = &p;
    }
    entries.push_back(best->entries);
  }
  return entries;
}

// Bisects the price until the entries sum to `total`; at the price where several sums are equally good, in between.
std::vector<double> Solve(const std::vector<std::vector<Point>>& hulls, double total) {
  const auto sum = [](const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0); };
  double low = 1e-30, high = 1e30;  // at `low` too many, at `high` too few
  for (int i = 0; i < 300; ++i) {
    const double middle = std::sqrt(low * high);
    (sum(EntriesAt(hulls, middle)) > total ? low : high) = middle;
  }
  std::vector<double> more = EntriesAt(hulls, low), fewer = EntriesAt(hulls, high);
  const double gap = sum(more) - sum(fewer);
  const double share = gap > 0 ? std::clamp((total - sum(fewer)) / gap, 0.0, 1.0) : 0;
  for (size_t i = 0; i < fewer.size(); ++i) fewer[i] += share * (more[i] - fewer[i]);
  return fewer;
}

std::vector<bool> Pinned(const FitInput& input, const std::vector<std::vector<int>>& units, double share) {
  std::vector<bool> pinned(units.size(), false);
  if (input.needle_kl.empty()) return pinned;
  std::vector<double> loss(units.size(), 0.0);
  for (size_t u = 0; u < units.size(); ++u) {
    for (const int list : units[u]) loss[u] += input.needle_kl[static_cast<size_t>(list)];
  }
  std::vector<size_t> order(units.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return loss[a] > loss[b]; });
  double left = share * std::accumulate(loss.begin(), loss.end(), 0.0);
  for (size_t i = 0; i < units.size() / 5 && left > 0; ++i) {
    pinned[order[i]] = true;
    left -= loss[order[i]];
  }
  return pinned;
}

// The pattern of the paper's rule.
int PreferredPattern(const FitInput& input, const std::vector<int>& unit, int budget, int fallback,
                     const FitOptions& options) {
  int best = fallback;
  double best_value = std::numeric_limits<double>::infinity();
  for (int pattern = 0; pattern < input.cosine.patterns; ++pattern) {
    if (pattern != fallback && !MayDepart(input, unit, pattern, fallback, budget)) continue;
    double value = 0;
    for (const int list : unit) value -= input.cosine.at(pattern, budget, list);
    if (options.prefer_by_nll)
      value = input.nll[static_cast<size_t>(unit[0] / input.num_kv_heads)][static_cast<size_t>(pattern)];
    if (value < best_value) best = pattern, best_value = value;  // NaN, not measured, is never below
  }
  return best;
}

// How much of the free budget a unit gets by the paper's rule: a damped signal.
std::vector<double> Sensitivities(const FitInput& input, const std::vector<std::vector<int>>& units,
                                  const FitOptions& options) {
  std::vector<double> signal;
  for (const std::vector<int>& unit : units) {
    double value = 0;
    for (const int list : unit) value += input.entropy[static_cast<size_t>(list)] / static_cast<double>(unit.size());
    if (options.sensitivity_by_nll) {
      value = 0;
      for (const double change : input.nll[static_cast<size_t>(unit[0] / input.num_kv_heads)])
        value = change > value ? change : value;
    }
    signal.push_back(value);
  }
  const double mean = std::accumulate(signal.begin(), signal.end(), 0.0) / static_cast<double>(signal.size());
  for (double& s : signal) s = mean > 0 ? std::clamp(std::sqrt(s / mean), 0.5, 2.0) : 1;
  return signal;
}

}  // namespace

int LeastEntries(int mean) { return std::min(mean, std::max(4 + std::min(64, mean / 4), (mean + 3) / 4)); }

int BestUniformPattern(const FitInput& input, int mean, const FitOptions& options) {
  const int budget = NearestBudget(input.budgets, mean);
  int best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int pattern = 0; pattern < input.text[0].patterns; ++pattern) {
    double cost = 0;
    for (int list = 0; list < input.num_layers * input.num_kv_heads; ++list)
      cost += MeanCost(input, options, pattern, budget, list);
    if (cost < least) best = pattern, least = cost;
  }
  return best;
}

StrategyPhase FitPhase(const FitInput& input, int mean, const FitOptions& options) {
  LOUPE_CHECK(!input.text.empty() && input.budgets.size() > 1 && mean > 0 && mean < input.full)
      << "tables do not cover a mean of " << mean;
  const std::vector<std::vector<int>> units = Units(input, options.per_head);
  const std::vector<bool> pinned = Pinned(input, units, options.pin_share);
  const int fallback = BestUniformPattern(input, mean, options), least = LeastEntries(mean);
  const double total = static_cast<double>(units.size()) * mean;
  std::vector<double> wanted(units.size(), static_cast<double>(mean));
  std::vector<Envelope> envelopes;
  for (const std::vector<int>& unit : units) envelopes.push_back(MakeEnvelope(input, unit, fallback, options));
  if (options.vary != FitVary::kPattern && options.mode == FitMode::kJoint) {
    std::vector<std::vector<Point>> hulls;
    for (size_t u = 0; u < units.size(); ++u) {
      const Curve curve(input.budgets, envelopes[u].costs, input.full);
      hulls.push_back(Hull(curve, pinned[u] ? mean : least, input.full));
    }
    wanted = Solve(hulls, total);
  } else if (options.vary != FitVary::kPattern && mean > 128) {  // with few entries the paper finds budgets unsafe
    const std::vector<double> signal = Sensitivities(input, units, options);
    const double sum = std::accumulate(signal.begin(), signal.end(), 0.0);
    for (size_t u = 0; u < units.size(); ++u) {
      wanted[u] = least + (total - least * static_cast<double>(units.size())) * signal[u] / sum;
      if (pinned[u]) wanted[u] = std::max(wanted[u], static_cast<double>(mean));
    }
  }
  const std::vector<int> entries = ShareEntries(wanted, static_cast<int64_t>(units.size()) * mean, least, input.full);

  StrategyPhase phase;
  for (size_t u = 0; u < units.size(); ++u) {
    const int budget = NearestBudget(input.budgets, entries[u]);
    int pattern = envelopes[u].patterns[static_cast<size_t>(budget)];
    if (options.mode == FitMode::kPaper && options.vary != FitVary::kBudget) {
      pattern = PreferredPattern(input, units[u], NearestBudget(input.budgets, mean), fallback, options);
      if (pinned[u] && options.snap_pattern >= 0) pattern = options.snap_pattern;
    }
    phase.patterns.insert(phase.patterns.end(), units[u].size(), pattern);
    phase.entries.insert(phase.entries.end(), units[u].size(), entries[u]);
  }
  return phase;
}

double ExpectedCost(const FitInput& input, const StrategyPhase& phase, const FitOptions& options) {
  double cost = 0;
  for (size_t list = 0; list < phase.entries.size(); ++list) {
    std::vector<double> costs;
    for (size_t b = 0; b < input.budgets.size(); ++b) {
      costs.push_back(MeanCost(input, options, phase.patterns[list], static_cast<int>(b), static_cast<int>(list)));
    }
    cost += Curve(input.budgets, std::move(costs), input.full).At(phase.entries[list]);
  }
  return cost;
}

}  // namespace loupe
