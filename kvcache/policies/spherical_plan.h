// Which bits or which share each list gets: the allocation of policy spherical. Every list has options, each with its bytes
// and what it loses in nats; one price for a byte over all lists says which option each takes (rate-distortion retention),
// and what the budget leaves is spent where it gains most. Pure arithmetic, deterministic, any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kvcache/policies/budget.h"
#include "kvcache/policies/registry.h"
#include "kvcache/policies/spherical_profile.h"

namespace loupe {

// What a list may hold beside its protected entries: `kept` of the others, in one format.
struct SphericalOption {
  PageFormat format;
  int kept = 0;
  int64_t bytes = 0;  // of all pages of the list, protected entries included; or entries, where the budget counts those
  double cost = 0;    // nats
};
using ListOptions = std::vector<SphericalOption>;

// The index of each list's option. The sum of bytes is at most `bytes`; the caller has seen to it that the cheapest fit.
// Along the lower convex hulls the choice is that of one price: no other choice of as many bytes costs less. Ties go to the
// lower list.
std::vector<int> ChooseOptions(std::span<const ListOptions> lists, int64_t bytes);

enum class Retention : uint8_t {
  kJoint,  // a list keeps everything at its bits, or its best share at 4
  kDrop,   // a share only; everything at equal bits if there is room for more
  kBits,   // everything at its bits only
};

// What a request asks of the formats.
struct SphericalLimits {
  Retention retention = Retention::kJoint;
  int key = 0, value = 0;  // explicit bits; 0: free
  int floor = 0;           // no fewer bits than these
};

// What a list of so many entries may hold. `protected_entries` of them stay in `landing`; `entries_count` as sizes.
struct PlanShape {
  const PolicyContext* context = nullptr;
  int entries = 0;
  int protected_entries = 0;
  PageFormat landing;
  bool in_entries = false;  // sizes are entries, not bytes
};

// All options of a list that `limits` allow, in a fixed order.
ListOptions OptionsOf(const ListCosts& costs, const PlanShape& shape, const SphericalLimits& limits);

// Without a profile: the same for all lists, by the order in which formats lost more on the model they were measured on:
// everything at the most bits that fit, and below that the largest share at 4 bits. Empty: nothing fits.
ListOptions UniformOptions(const PlanShape& shape, const SphericalLimits& limits);

// Whether `limits` allow these bits.
bool Allowed(const SphericalLimits& limits, int key, int value);
PageFormat FormatOf(int key, int value, const PageFormat& dense);

// What a list of these costs loses at a share of its entries at 4 bits: log-log between measured shares.
double CostOfShare(const ListCosts& costs, double share);
// With everything kept at these bits; keys and values add up.
double CostOfBits(const ListCosts& costs, int key, int value);

}  // namespace loupe
