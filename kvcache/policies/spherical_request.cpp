#include "kvcache/policies/spherical_request.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/check.h"
#include "kernels/spherical.h"
#include "kvcache/page_format.h"

namespace loupe {
namespace {

// Without a profile, below this share of the full cache's bytes protected entries are stored in 8 bits.
constexpr double kDenseProtectionFrom = 0.13;
// With one, that counts so many times what all other entries lose in 8 bits: sinks in codes make the loss five times as large.
constexpr double kProtectedCost = 4;

absl::Status Refuse(const std::string& field, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("kv.", field, ": ", why));
}

absl::StatusOr<std::shared_ptr<const SphericalProfile>> ChooseProfile(const KvOptions& options, const PolicyContext& context) {
  std::vector<std::string> names;
  for (const auto& profile : context.profiles) {
    if (options.strategy.empty() || profile->name == options.strategy) return profile;
    names.push_back(profile->name);
  }
  if (options.strategy.empty()) return std::shared_ptr<const SphericalProfile>();
  return Refuse("strategy", absl::StrCat("is ", options.strategy, ", must be a profile that is loaded: ",
                                         names.empty() ? "there is none" : absl::StrJoin(names, ", ")));
}

SphericalLimits LimitsOf(const KvOptions& options) {
  const std::string& word = WordParam(options, "retention");
  SphericalLimits limits;
  limits.retention = word == "drop" ? Retention::kDrop : word == "bits" ? Retention::kBits : Retention::kJoint;
  limits.key = options.bits.key, limits.value = options.bits.value, limits.floor = options.floor.bits;
  // Without a budget in bytes nothing chooses bits.
  const bool counts_bytes = options.budget.kind == KvBudget::Kind::kRatio || options.budget.kind == KvBudget::Kind::kBytes;
  if (!counts_bytes) {
    if (limits.key == 0) limits.key = std::max(4, limits.floor);
    if (limits.value == 0) limits.value = std::max(4, limits.floor);
  }
  return limits;
}

// What the lists may cost together, by the budget's own measure; -1: no limit.
int64_t SizeOfBudget(const KvOptions& options, const PolicyContext& context) {
  const int64_t lists = context.num_lists();
  switch (options.budget.kind) {
    case KvBudget::Kind::kRatio:
      return static_cast<int64_t>(options.budget.value * static_cast<double>(lists * context.entry_bytes) * context.num_prompt);
    case KvBudget::Kind::kTokens: return static_cast<int64_t>(options.budget.value) * lists;
    case KvBudget::Kind::kBytes: return static_cast<int64_t>(options.budget.value);
    default: return -1;
  }
}

const char* BudgetField(const KvOptions& options) {
  switch (options.budget.kind) {
    case KvBudget::Kind::kRatio: return "budget.ratio";
    case KvBudget::Kind::kTokens: return "budget.tokens";
    default: return "budget.bytes";
  }
}

absl::Status CheckModel(const KvOptions& options, const PolicyContext& context) {
  if (context.head_dim % spherical::kDimStep != 0 || context.head_dim > 4 * spherical::kDimStep) {
    return Refuse("policy", absl::StrCat("spherical codes heads of 64, 128, 192 or 256 dimensions, but model ", context.model, " has ",
                                         context.head_dim, "; choose another policy"));
  }
  if (!context.windows.empty() && options.budget.kind != KvBudget::Kind::kNone) {
    return Refuse("budget", "the model has layers with sliding windows, which stay dense: spherical takes no budget there; leave it out");
  }
  return absl::OkStatus();
}

// All lists alike: the first option of which every list can have one.
absl::Status PlanUniform(const PlanShape& shape, const SphericalLimits& limits, int64_t size, SphericalPlan* plan) {
  const int64_t lists = shape.context->num_lists();
  for (const SphericalOption& option : UniformOptions(shape, limits)) {
    if (size >= 0 && option.bytes * lists > size) continue;
    plan->lists.assign(static_cast<size_t>(lists), option);
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError("");
}

absl::Status PlanByProfile(const SphericalProfile& profile, const PlanShape& shape, const SphericalLimits& limits, int64_t size,
                           SphericalPlan* plan) {
  std::vector<ListOptions> options;
  int64_t least = 0;
  for (const ListCosts& costs : profile.lists) {
    options.push_back(OptionsOf(costs, shape, limits));
    const auto smaller = [](const SphericalOption& a, const SphericalOption& b) { return a.bytes < b.bytes; };
    least += std::min_element(options.back().begin(), options.back().end(), smaller)->bytes;
  }
  if (least > size) return absl::ResourceExhaustedError("");
  const std::vector<int> chosen = ChooseOptions(options, size);
  for (size_t i = 0; i < chosen.size(); ++i) plan->lists.push_back(options[i][static_cast<size_t>(chosen[i])]);
  return absl::OkStatus();
}

// The least that a request's protection and limits leave, with the numbers.
absl::Status TooSmall(const KvOptions& options, const PlanShape& shape, const SphericalLimits& limits, int64_t size, int64_t growth) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const SphericalOption& option : UniformOptions(shape, limits)) least = std::min(least, option.bytes);
  const int64_t lists = shape.context->num_lists();
  const char* unit = shape.in_entries ? " entries" : " bytes";
  return Refuse(BudgetField(options),
                absl::StrCat("is ", options.budget.value, ", which is ", size, unit, " for ", lists, " lists, but at least ",
                             least * lists + growth,
                             unit, " are needed: ", shape.protected_entries, " protected entries a list, outliers included",
                             limits.retention == Retention::kBits ? ", and retention bits drops nothing" : "",
                             growth > 0 ? ", and room for the tokens between two refreshes" : "",
                             "; raise the budget or protect less"));
}

// What a plan is expected to lose, in nats.
double CostOf(const SphericalPlan& plan, const SphericalProfile& profile, const PageFormat& dense) {
  double cost = 0;
  for (const SphericalOption& option : plan.lists) cost += option.cost;
  if (plan.coding.landing == dense) return cost;
  for (const ListCosts& costs : profile.lists) cost += kProtectedCost * CostOfBits(costs, 8, 8);
  return cost;
}

// Of all lists between two refreshes.
int64_t GrowthOf(const SphericalPlan& plan, const PolicyContext& context) {
  if (!plan.evicts) return 0;
  return context.num_lists() * kCodeInterval * (plan.in_entries ? 1 : EntryBytes(plan.coding.landing, context.head_dim));
}

// Protected entries are dense or, where nobody asks otherwise, in 8 bits if the plan loses less so.
absl::Status ChooseLanding(const SphericalProfile* profile, const SphericalLimits& limits, int64_t size, bool is_free, PlanShape shape,
                           SphericalPlan* plan) {
  const auto make = [&](const PageFormat& landing, SphericalPlan* out) {
    *out = *plan;
    out->coding.landing = shape.landing = landing;
    out->growth = GrowthOf(*out, *shape.context);
    const int64_t left = size < 0 ? size : std::max<int64_t>(0, size - out->growth);
    return profile != nullptr && size >= 0 ? PlanByProfile(*profile, shape, limits, left, out) : PlanUniform(shape, limits, left, out);
  };
  SphericalPlan dense, coded;
  const absl::Status status = make(plan->coding.landing, &dense);
  const PolicyContext& context = *shape.context;
  const double full = static_cast<double>(context.num_lists() * context.entry_bytes) * std::max(1, context.num_prompt);
  const bool other = is_free && make({Codec::kS8, Codec::kS8}, &coded).ok() &&
                     (!status.ok() || (profile != nullptr ? CostOf(coded, *profile, context.dense) < CostOf(dense, *profile, context.dense)
                                                          : static_cast<double>(size) < kDenseProtectionFrom * full));
  if (!status.ok() && !other) return status;
  *plan = other ? std::move(coded) : std::move(dense);
  return absl::OkStatus();
}

// A budget that holds for generated tokens, too, leaves room for those that come between two refreshes.
absl::Status PlanDecode(const KvOptions& options, const PolicyContext& context, int64_t size, SphericalPlan* plan) {
  if (WordParam(options, "decode") != "evict" || size < 0) return absl::OkStatus();
  if (WordParam(options, "retention") == "bits") {
    return Refuse("params.decode", "is evict, but with retention bits nothing is dropped; choose append or another retention");
  }
  plan->evicts = true, plan->in_entries = options.budget.kind == KvBudget::Kind::kTokens, plan->bytes = size;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SphericalPlan> PlanSpherical(const KvOptions& options, const PolicyContext& context) {
  if (absl::Status s = CheckModel(options, context); !s.ok()) return s;
  auto profile = ChooseProfile(options, context);
  if (!profile.ok()) return profile.status();
  PolicyContext smallest = context;  // no list can be smaller than a page of it
  smallest.format = {Codec::kS2, Codec::kS2};
  auto protection = PlanProtection(options, smallest);
  if (!protection.ok()) return protection.status();
  auto coding = ReadLanding(options, context);
  if (!coding.ok()) return coding.status();
  const bool in_bytes = options.budget.kind == KvBudget::Kind::kRatio || options.budget.kind == KvBudget::Kind::kBytes;
  const int64_t size = SizeOfBudget(options, context);
  const double full = static_cast<double>(context.num_lists() * context.entry_bytes) * std::max(1, context.num_prompt);

  SphericalPlan plan;
  plan.entries = context.num_prompt, plan.protected_entries = protection->Count(context.num_prompt);
  plan.outliers = static_cast<int>(std::ceil(NumberParam(options, "outliers") * (plan.entries - plan.protected_entries)));
  plan.protected_entries += plan.outliers;
  plan.protection = *std::move(protection), plan.coding = *coding;
  const PlanShape shape{&context, plan.entries, plan.protected_entries, coding->landing,
                        options.budget.kind == KvBudget::Kind::kTokens};
  const SphericalLimits limits = LimitsOf(options);
  if (in_bytes && static_cast<double>(size) >= full && limits.key % 16 == 0 && limits.value % 16 == 0) {
    const SphericalOption all{context.dense, plan.entries - plan.protected_entries, 0, 0};
    plan.lists.assign(static_cast<size_t>(context.num_lists()), all);
    return plan;
  }
  LOUPE_CHECK(*profile == nullptr || (*profile)->num_lists() == context.num_lists()) << "a profile of another model came this far";
  if (absl::Status s = PlanDecode(options, context, size, &plan); !s.ok()) return s;
  const bool is_free = in_bytes && !coding->while_prefilling && WordParam(options, "protected_bits") == "auto";
  if (!ChooseLanding(profile->get(), limits, size, is_free, shape, &plan).ok()) {
    return TooSmall(options, shape, limits, size, GrowthOf(plan, context));
  }
  plan.limits = limits, plan.profile = *std::move(profile);
  return plan;
}

}  // namespace loupe
