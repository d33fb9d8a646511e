#include "kvcache/policies/spherical_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/check.h"
#include "kvcache/page_format.h"

namespace loupe {
namespace {

constexpr int kShareBits = 4;  // of a share's entries, as it was measured
// 8 bits lose a two hundredth of what 4 bits do.
constexpr double kEightBits = 1.0 / 200;
constexpr double kLeastCost = 1e-9;  // of logarithms

double CostAt(const std::array<double, kProfileBits.size()>& costs, int bits) {
  if (bits >= 16) return 0;
  if (bits == 8) return costs.back() * kEightBits;
  const auto at = std::find(kProfileBits.begin(), kProfileBits.end(), bits);
  LOUPE_CHECK(at != kProfileBits.end()) << bits << " bits";
  return costs[static_cast<size_t>(at - kProfileBits.begin())];
}

// Of a list with nothing but entries as they come: its tail is one page.
int64_t PlainBytes(const PolicyContext& context, const PageFormat& dense, int entries) {
  const int tail = entries % kPageEntries;
  return context.RunBytes(dense, entries - tail) + context.RunBytes(dense, tail <= kSmallPageEntries ? tail : kPageEntries);
}

int64_t SizeOf(const PlanShape& shape, const PageFormat& format, int kept) {
  if (shape.in_entries) return shape.protected_entries + kept;
  const bool plain = shape.landing == shape.context->dense && (format == shape.landing || kept == 0);
  if (plain) return PlainBytes(*shape.context, shape.landing, shape.protected_entries + kept);
  if (format == shape.landing) return shape.context->RunBytes(format, shape.protected_entries + kept);
  return shape.context->RunBytes(format, kept) + shape.context->RunBytes(shape.landing, shape.protected_entries);
}

// Shares worth looking at, in entries: whole small pages, less finely where they are many.
std::vector<int> Shares(int others) {
  std::vector<int> counts;
  for (int count = 0; count < others; count += std::max(kSmallPageEntries, count / 16 / kPageEntries * kPageEntries)) {
    counts.push_back(count);
  }
  return counts;
}

// The bits of a share's entries: measured were 4.
std::pair<int, int> ShareBits(const SphericalLimits& limits) {
  const auto bits = [&](int asked) { return asked != 0 ? asked : std::max(kShareBits, limits.floor); };
  return {bits(limits.key), bits(limits.value)};
}

// The corners of a list's lower convex hull, from the fewest bytes on: indexes of options.
std::vector<int> Hull(const ListOptions& options) {
  std::vector<int> order(options.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int i) -> const SphericalOption& { return options[static_cast<size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return at(a).bytes != at(b).bytes ? at(a).bytes < at(b).bytes : at(a).cost < at(b).cost;
  });
  const auto gain = [&](int a, int b) {
    return (at(a).cost - at(b).cost) / static_cast<double>(at(b).bytes - at(a).bytes);
  };
  std::vector<int> hull;
  for (const int i : order) {
    if (!hull.empty() && at(i).cost >= at(hull.back()).cost) continue;
    while (hull.size() > 1 && gain(hull[hull.size() - 2], hull.back()) <= gain(hull.back(), i)) hull.pop_back();
    if (!hull.empty() && at(i).bytes == at(hull.back()).bytes) hull.pop_back();
    hull.push_back(i);
  }
  return hull;
}

// From one corner of a list's hull to the next.
struct Step {
  int list = 0;
  int to = 0;  // option
  int64_t bytes = 0;
  double gain = 0;  // nats a byte
};

// What is left is spent one list at a time, where a byte gains most, on the hull or beside it.
void SpendRest(std::span<const ListOptions> lists, int64_t left, std::vector<int>* chosen) {
  for (;;) {
    Step best;
    for (size_t list = 0; list < lists.size(); ++list) {
      const SphericalOption& now = lists[list][static_cast<size_t>((*chosen)[list])];
      for (size_t i = 0; i < lists[list].size(); ++i) {
        const SphericalOption& other = lists[list][i];
        const int64_t bytes = other.bytes - now.bytes;
        if (bytes > left || other.cost >= now.cost) continue;
        const double gain = bytes <= 0 ? HUGE_VAL : (now.cost - other.cost) / static_cast<double>(bytes);
        if (gain > best.gain) best = {static_cast<int>(list), static_cast<int>(i), bytes, gain};
      }
    }
    if (best.gain == 0) return;
    (*chosen)[static_cast<size_t>(best.list)] = best.to;
    left -= best.bytes;
  }
}

}  // namespace

PageFormat FormatOf(int key, int value, const PageFormat& dense) {
  return {key >= 16 ? dense.key : *CodecOfBits(key), value >= 16 ? dense.value : *CodecOfBits(value)};
}

bool Allowed(const SphericalLimits& limits, int key, int value) {
  return (limits.key == 0 || limits.key == key) && (limits.value == 0 || limits.value == value) && key >= limits.floor &&
         value >= limits.floor;
}

double CostOfBits(const ListCosts& costs, int key, int value) { return CostAt(costs.key, key) + CostAt(costs.value, value); }

double CostOfShare(const ListCosts& costs, double share) {
  double above_share = 1, above = CostOfBits(costs, kShareBits, kShareBits);
  for (size_t i = 0; i < kProfileShares.size(); ++i) {
    const double below_share = kProfileShares[i], below = costs.share[i];
    if (share >= below_share) {
      // At 0 there is no logarithm.
      const bool linear = below_share == 0;
      const double part = linear ? share / above_share : std::log(share / below_share) / std::log(above_share / below_share);
      if (linear) return below + part * (above - below);
      return std::exp(std::log(std::max(below, kLeastCost)) * (1 - part) + std::log(std::max(above, kLeastCost)) * part);
    }
    above_share = below_share, above = below;
  }
  return above;
}

ListOptions OptionsOf(const ListCosts& costs, const PlanShape& shape, const SphericalLimits& limits) {
  const int others = shape.entries - shape.protected_entries;
  const PageFormat& dense = shape.context->dense;
  ListOptions options;
  constexpr int kBits[] = {16, 8, 4, 3, 2};
  for (const int key : kBits) {
    for (const int value : kBits) {
      // One side dense saves little that equal bits do not, and a list either keeps all its bits or chooses.
      const bool equal = key == value;
      if (!Allowed(limits, key, value) || ((key == 16 || value == 16) && !equal && limits.key + limits.value == 0)) continue;
      if (limits.retention == Retention::kDrop && !equal && limits.key + limits.value == 0) continue;
      if (limits.retention == Retention::kDrop && equal && key < kShareBits && limits.key + limits.value == 0) continue;
      const PageFormat format = FormatOf(key, value, dense);
      options.push_back({format, others, SizeOf(shape, format, others), CostOfBits(costs, key, value)});
    }
  }
  if (limits.retention == Retention::kBits) return options;
  const auto [key, value] = ShareBits(limits);
  const PageFormat format = FormatOf(key, value, dense);
  const double bits_cost = std::max(0.0, CostOfBits(costs, key, value) - CostOfBits(costs, kShareBits, kShareBits));
  for (const int kept : Shares(others)) {
    const double share = static_cast<double>(kept) / others;
    options.push_back({format, kept, SizeOf(shape, format, kept), CostOfShare(costs, share) + bits_cost * share});
  }
  return options;
}

ListOptions UniformOptions(const PlanShape& shape, const SphericalLimits& limits) {
  // In the order of what they lose on the default model (docs/quality.md), least first.
  constexpr std::pair<int, int> kLadder[] = {{16, 16}, {8, 8}, {8, 4}, {4, 4}, {4, 3}, {4, 2}, {3, 2}, {2, 2}};
  const int others = shape.entries - shape.protected_entries;
  ListOptions options;
  double cost = 0;
  const auto add = [&](const PageFormat& format, int kept) {
    options.push_back({format, kept, SizeOf(shape, format, kept), cost});
    cost += 1;
  };
  const auto [share_key, share_value] = ShareBits(limits);
  if (limits.retention != Retention::kDrop) {
    for (const auto& [key, value] : kLadder) {
      if (Allowed(limits, key, value)) add(FormatOf(key, value, shape.context->dense), others);
    }
    // Bits that are in no row of the ladder.
    if (options.empty()) add(FormatOf(share_key, share_value, shape.context->dense), others);
  }
  if (limits.retention == Retention::kBits) return options;
  const PageFormat format = FormatOf(share_key, share_value, shape.context->dense);
  if (limits.retention == Retention::kDrop) add(format, others);
  std::vector<int> shares = Shares(others);
  std::reverse(shares.begin(), shares.end());
  for (const int kept : shares) add(format, kept);
  return options;
}

std::vector<int> ChooseOptions(std::span<const ListOptions> lists, int64_t bytes) {
  std::vector<int> chosen;
  std::vector<Step> steps;
  int64_t left = bytes;
  for (size_t list = 0; list < lists.size(); ++list) {
    const std::vector<int> hull = Hull(lists[list]);
    const auto option = [&](size_t i) -> const SphericalOption& { return lists[list][static_cast<size_t>(hull[i])]; };
    chosen.push_back(hull[0]);
    left -= option(0).bytes;
    for (size_t i = 1; i < hull.size(); ++i) {
      const int64_t more = option(i).bytes - option(i - 1).bytes;
      steps.push_back({static_cast<int>(list), hull[i], more, (option(i - 1).cost - option(i).cost) / static_cast<double>(more)});
    }
  }
  LOUPE_CHECK(left >= 0) << "the cheapest options exceed " << bytes << " bytes by " << -left;
  // The price falls from step to step; within a list steps come in order, since a hull's gains fall.
  std::stable_sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.gain > b.gain; });
  for (const Step& step : steps) {
    if (step.bytes > left) break;
    chosen[static_cast<size_t>(step.list)] = step.to;
    left -= step.bytes;
  }
  SpendRest(lists, left, &chosen);
  return chosen;
}

}  // namespace loupe
