#include "kvcache/policies/spherical_profile.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

absl::Status Refuse(const std::string& field, const std::string& why) { return absl::InvalidArgumentError(absl::StrCat(field, ": ", why)); }

}  // namespace

absl::Status CheckProfile(const SphericalProfile& profile) {
  if (profile.num_layers < 1 || profile.num_kv_heads < 1 || profile.head_dim < 1) {
    return Refuse("model", absl::StrCat("has ", profile.num_layers, " layers, ", profile.num_kv_heads, " kv heads of ", profile.head_dim,
                                        ", must have at least one of each"));
  }
  const size_t lists = static_cast<size_t>(profile.num_lists());
  if (profile.lists.size() != lists || profile.mean_keys.size() != lists * static_cast<size_t>(profile.head_dim)) {
    return Refuse("lists", absl::StrCat("are ", profile.lists.size(), " with ", profile.mean_keys.size(), " numbers of mean keys, must be ",
                                        lists, " with ", profile.head_dim, " each"));
  }
  for (size_t i = 0; i < lists; ++i) {
    const ListCosts& costs = profile.lists[i];
    const auto check = [&](const auto& numbers, const char* name) {
      for (const double cost : numbers) {
        if (!(cost >= 0 && std::isfinite(cost))) return Refuse(absl::StrCat("lists[", i, "].", name), absl::StrCat("has ", cost, " nats"));
      }
      return absl::OkStatus();
    };
    if (absl::Status s = check(costs.key, "key"); !s.ok()) return s;
    if (absl::Status s = check(costs.value, "value"); !s.ok()) return s;
    if (absl::Status s = check(costs.share, "share"); !s.ok()) return s;
  }
  for (const float x : profile.mean_keys) {
    if (!std::isfinite(x)) return Refuse("lists", "has a mean key that is not finite");
  }
  return absl::OkStatus();
}

}  // namespace loupe
