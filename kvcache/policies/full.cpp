#include "kvcache/policies/policy.h"

namespace loupe {
namespace {

class Full final : public Policy {
 public:
  std::string_view name() const override { return "full"; }
  bool keeps_everything() const override { return true; }
  void AfterPrefill(std::span<const ListView>, std::vector<ListAction>*) const override {}
  void AfterDecode(std::span<const ListView>, std::vector<ListAction>*) const override {}
};

}  // namespace

const Policy& FullPolicy() {
  static const Full policy;
  return policy;
}

}  // namespace loupe
