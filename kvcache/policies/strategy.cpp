#include "kvcache/policies/strategy.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

absl::Status Refuse(const std::string& field, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", why));
}

absl::Status CheckPattern(const StrategyPattern& pattern, const std::string& field) {
  const PolicyRow* row = FindPolicy(pattern.policy);
  if (row == nullptr || row->make_scorer == nullptr || row->baseline) {
    std::string names;
    for (const PolicyRow& known : AllPolicies()) {
      if (known.make_scorer != nullptr && !known.baseline)
        absl::StrAppend(&names, names.empty() ? "" : ", ", known.name);
    }
    return Refuse(field + ".policy",
                  absl::StrCat("is ", pattern.policy, ", must be a primitive that ranks entries: ", names));
  }
  KvOptions options;
  options.params = pattern.params;
  const auto complete = WithDefaults(*row, options);
  return complete.ok() ? absl::OkStatus() : Refuse(field, std::string(complete.status().message()));
}

absl::Status CheckPhase(const StrategyPhase& phase, const Strategy& strategy, int mean, const std::string& field) {
  const size_t lists = static_cast<size_t>(strategy.num_lists());
  if (phase.patterns.size() != lists || phase.entries.size() != lists) {
    return Refuse(field, absl::StrCat("has ", phase.patterns.size(), " patterns and ", phase.entries.size(),
                                      " entries, the model has ", lists, " lists"));
  }
  int64_t sum = 0;
  for (size_t i = 0; i < lists; ++i) {
    const int pattern = phase.patterns[i], entries = phase.entries[i];
    if (pattern < 0 || pattern >= static_cast<int>(strategy.patterns.size())) {
      return Refuse(field + ".patterns", absl::StrCat("has ", pattern, " for list ", i, ", must be from 0 to ",
                                                      strategy.patterns.size() - 1));
    }
    if (entries < 1)
      return Refuse(field + ".entries", absl::StrCat("has ", entries, " for list ", i, ", must be at least 1"));
    sum += entries;
  }
  if (sum != int64_t{mean} * strategy.num_lists()) {
    return Refuse(field + ".entries", absl::StrCat("sum to ", sum, ", must be ", int64_t{mean} * strategy.num_lists(),
                                                   ", ", lists, " lists of ", mean, " in the mean"));
  }
  return absl::OkStatus();
}

// One view has one window of query rows and one sample of rows.
absl::Status CheckTogether(const Strategy& strategy) {
  std::map<std::string, double> seen;
  for (const StrategyPattern& pattern : strategy.patterns) {
    KvOptions options;
    options.params = pattern.params;
    const KvOptions complete = WithDefaults(*FindPolicy(pattern.policy), options).value();
    for (const char* name : {"window", "stride", "tail"}) {
      const auto it = complete.params.find(name);
      if (it == complete.params.end()) continue;
      const double value = std::get<double>(it->second);
      const double first = seen.emplace(name, value).first->second;
      if (first != value) {
        return Refuse("patterns",
                      absl::StrCat("have ", name, " ", first, " and ", value, "; all of a strategy share one"));
      }
    }
  }
  return absl::OkStatus();
}

// The share of each list when the budget is scaled by `scale`.
int Scaled(double wanted, double scale, int least, int most) {
  return static_cast<int>(
      std::clamp(std::floor(wanted * scale), static_cast<double>(least), static_cast<double>(most)));
}

// The largest scale whose cost, which never falls, is at most `limit`.
template <class Cost>
double LargestScale(const Cost& cost, double limit) {
  double low = 0, high = 1;
  while (high < 1e9 && cost(high) <= limit) low = high, high *= 2;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (cost(middle) <= limit ? low : high) = middle;
  }
  return low;
}

}  // namespace

absl::Status CheckStrategy(const Strategy& s) {
  if (s.num_layers < 1 || s.num_kv_heads < 1 || s.num_lists() > (1 << 20)) {
    return Refuse("model", absl::StrCat(s.num_layers, " layers of ", s.num_kv_heads, " kv heads cannot be"));
  }
  if (s.patterns.empty()) return Refuse("patterns", "is empty, must have one pattern at least");
  for (size_t i = 0; i < s.patterns.size(); ++i) {
    if (absl::Status status = CheckPattern(s.patterns[i], absl::StrCat("patterns[", i, "]")); !status.ok())
      return status;
  }
  if (absl::Status status = CheckTogether(s); !status.ok()) return status;
  if (s.budgets.empty()) return Refuse("budgets", "is empty, must have one mean at least");
  int before = 0;
  for (size_t i = 0; i < s.budgets.size(); ++i) {
    const StrategyBudget& budget = s.budgets[i];
    const std::string field = absl::StrCat("budgets[", i, "]");
    if (budget.mean <= before || budget.mean > (1 << 24)) {
      return Refuse(field + ".mean",
                    absl::StrCat("is ", budget.mean, ", must be above ", before, " and at most ", 1 << 24));
    }
    before = budget.mean;
    if (absl::Status status = CheckPhase(budget.prefill, s, budget.mean, field + ".prefill"); !status.ok())
      return status;
    if (absl::Status status = CheckPhase(budget.decode, s, budget.mean, field + ".decode"); !status.ok()) return status;
  }
  return absl::OkStatus();
}

StrategyShares SharesAt(std::span<const StrategyBudget> budgets, bool decode, double mean) {
  const auto phase = [decode](const StrategyBudget& b) -> const StrategyPhase& {
    return decode ? b.decode : b.prefill;
  };
  size_t above = 0;
  while (above < budgets.size() && budgets[above].mean < mean) ++above;
  const StrategyBudget& high = budgets[std::min(above, budgets.size() - 1)];
  const StrategyBudget& low = budgets[above == 0 ? 0 : above - 1];
  StrategyShares shares;
  shares.patterns = phase(mean * mean >= static_cast<double>(low.mean) * high.mean ? high : low).patterns;
  const double share = high.mean > low.mean ? (mean - low.mean) / (high.mean - low.mean) : 0;
  const double scale = high.mean > low.mean ? 1 : mean / low.mean;
  for (size_t i = 0; i < shares.patterns.size(); ++i) {
    const double from = phase(low).entries[i], to = phase(high).entries[i];
    shares.entries.push_back(scale * (from + share * (to - from)));
  }
  return shares;
}

std::vector<int> ShareEntries(std::span<const double> wanted, int64_t total, int least, int most) {
  const auto sum_at = [&](double scale) {
    double sum = 0;
    for (const double w : wanted) sum += std::clamp(w * scale, static_cast<double>(least), static_cast<double>(most));
    return sum;
  };
  const double scale = LargestScale(sum_at, static_cast<double>(total) * (1 + 1e-12));
  std::vector<int> shares;
  std::vector<double> fractions;
  int64_t left = total;
  for (const double w : wanted) {
    // Rounding errors of the scale must not cost an entry.
    const double real = std::clamp(w * scale, static_cast<double>(least), static_cast<double>(most)) + 1e-6;
    shares.push_back(static_cast<int>(std::floor(real)));
    fractions.push_back(real - std::floor(real));
    left -= shares.back();
  }
  std::vector<size_t> order(shares.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return fractions[a] > fractions[b] + 1e-9; });
  for (size_t i = order.size(); left < 0 && i-- > 0;) {
    if (shares[order[i]] > least) --shares[order[i]], ++left;
  }
  for (bool moved = true; left > 0 && moved;) {
    moved = false;
    for (const size_t i : order) {
      if (left == 0 || shares[i] >= most) continue;
      ++shares[i], --left, moved = true;
    }
  }
  return shares;
}

std::vector<int> ShareBytes(std::span<const double> wanted, int64_t bytes, int least, int most,
                            const PolicyContext& context) {
  // Whole pages, at least what `least` entries take.
  const auto length = [&](int entries) {
    const int pages = context.MaxEntries(static_cast<int64_t>(context.EntryBytesOf(entries)));
    return std::min(most, std::max(pages, context.MaxEntries(context.ListBytes(least))));
  };
  const auto bytes_at = [&](double scale) {
    double sum = 0;
    for (const double w : wanted) sum += static_cast<double>(context.ListBytes(length(Scaled(w, scale, least, most))));
    return sum;
  };
  const double scale = LargestScale(bytes_at, static_cast<double>(bytes));
  std::vector<int> lengths;
  int64_t left = bytes;
  for (const double w : wanted) {
    lengths.push_back(length(Scaled(w, scale, least, most)));
    left -= context.ListBytes(lengths.back());
  }
  // What is left goes to those that came short most; equals get it together or not at all.
  std::vector<size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto missing = [&](size_t i) { return wanted[i] * scale - lengths[i]; };
  std::vector<double> short_by;
  for (size_t i = 0; i < lengths.size(); ++i) short_by.push_back(missing(i));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return short_by[a] != short_by[b] ? short_by[a] > short_by[b] : wanted[a] > wanted[b];
  });
  for (size_t first = 0, end = 0; first < order.size(); first = end) {
    while (end < order.size() && wanted[order[end]] == wanted[order[first]]) ++end;
    const int now = lengths[order[first]];
    const int next = std::min(most, context.MaxEntries(context.ListBytes(now + 1)));
    const int64_t more = static_cast<int64_t>(end - first) * (context.ListBytes(next) - context.ListBytes(now));
    if (next <= now || more > left) continue;
    left -= more;
    for (size_t i = first; i < end; ++i) lengths[order[i]] = next;
  }
  return lengths;
}

}  // namespace loupe
