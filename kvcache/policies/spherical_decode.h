// The decode form of policy spherical: a sequence that has outgrown its budget gives up pages of codes, or bits of them,
// where that loses least a byte by one price over all lists (rate-distortion retention by page). Pure, deterministic, any
// thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvcache/policies/spherical_plan.h"

namespace loupe {

// What a list shall hold, by entry in list order.
struct HeldList {
  std::vector<std::optional<PageFormat>> formats;  // nothing: the entry goes
  std::vector<bool> open;                          // may lose bits or go; the others stay as they are
  std::vector<float> scores;                       // attention that the entry gets; empty where nothing is open
};

// What the pages of all lists cost, in bytes or, with shape.in_entries, in entries.
int64_t SizeOf(std::span<const HeldList> lists, const PlanShape& shape);

// Lets open entries lose bits or go, page by page, until all lists cost `size` at most, or nothing is open any more.
// `costs` [lists] as a profile has them, or empty: all lists alike.
void FitPages(std::span<const ListCosts> costs, const PlanShape& shape, const SphericalLimits& limits, int64_t size,
              std::vector<HeldList>* lists);

}  // namespace loupe
