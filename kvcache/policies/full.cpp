#include "absl/strings/str_cat.h"
#include "kvcache/policies/primitives.h"

namespace loupe {
namespace {

class Full final : public Policy {
 public:
  std::string_view name() const override { return "full"; }
  bool keeps_everything() const override { return true; }
  void AfterPrefill(const SequenceView&, std::vector<ListAction>*) const override {}
  void AfterDecode(const SequenceView&, std::vector<ListAction>*) const override {}
};

absl::StatusOr<std::unique_ptr<Policy>> Make(const KvOptions& options, const PolicyContext& context) {
  const KvBudget& budget = options.budget;
  auto plan = PlanBudget(options, context, DecodeForm::kAppend, 0);
  if (!plan.ok()) return plan.status();
  if (!plan->drops) return std::unique_ptr<Policy>(new Full);
  const char* kind = budget.kind == KvBudget::Kind::kRatio ? "ratio" : budget.kind == KvBudget::Kind::kTokens ? "tokens" : "bytes";
  return absl::InvalidArgumentError(absl::StrCat("kv.budget.", kind, ": is ", budget.value, ", which would drop entries of the prompt's ",
                                                 context.num_prompt, ", but policy full keeps everything; choose another policy"));
}

}  // namespace

const Policy& FullPolicy() {
  static const Full policy;
  return policy;
}

PolicyRow FullRow() { return {"full", "keeps everything", "nothing", false, {}, Make}; }

}  // namespace loupe
