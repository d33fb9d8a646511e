#include "engine/kv_chooser.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

// What auto takes when a budget is asked for and the operator has no policy: the plain primitive that lost least where all
// of them were measured.
constexpr char kPolicyForBudgets[] = "h2o";

bool DropsNothing(const KvBudget& budget) {
  return budget.kind == KvBudget::Kind::kNone || (budget.kind == KvBudget::Kind::kRatio && budget.value >= 1);
}

bool AsksForBits(const KvOptions& options) {
  const auto fewer = [](int bits) { return bits != 0 && bits != 16; };
  return fewer(options.bits.key) || fewer(options.bits.value);
}

std::string ShortPrompt(int tokens) { return absl::StrCat("auto: full, the prompt has ", tokens, " tokens, below ", kShortPrompt); }

std::shared_ptr<const Policy> Full() { return {std::shared_ptr<const Policy>(), &FullPolicy()}; }

}  // namespace

absl::StatusOr<KvChoice> KvChooser::Make(const KvOptions& options, int prompt_tokens, std::string reason) const {
  PolicyContext context = cache_.policy_context(prompt_tokens);
  context.allow_baselines = defaults_.allow_baselines;
  context.strategies = defaults_.artifacts.strategies;
  context.profiles = defaults_.artifacts.profiles;
  auto policy = MakePolicy(options, context);
  if (!policy.ok()) return policy.status();
  return KvChoice{*std::move(policy), std::move(reason), false};
}

absl::StatusOr<KvChoice> KvChooser::ChooseAuto(const KvOptions& options, int prompt_tokens) const {
  if (!options.params.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("kv.params: has ", options.params.size(),
                                                   " parameters, but policy auto has none; name the policy that they are for"));
  }
  if (!options.strategy.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("kv.strategy: is ", options.strategy, ", but policy auto takes none; name the policy"));
  }
  const bool has_default = defaults_.kv && defaults_.kv->policy != "auto" && defaults_.kv->policy != "full";
  KvOptions wanted = options;
  if (has_default) {
    wanted.policy = defaults_.kv->policy;
    wanted.params = defaults_.kv->params;
    wanted.strategy = defaults_.kv->strategy;
    if (options.bits.key == 0 && options.bits.value == 0) wanted.bits = defaults_.kv->bits;
  }
  if (!DropsNothing(options.budget)) {
    if (has_default) {
      return Make(wanted, prompt_tokens, absl::StrCat("auto: a budget is asked for; ", wanted.policy, " is the server's policy"));
    }
    wanted.policy = kPolicyForBudgets;
    return Make(wanted, prompt_tokens,
                absl::StrCat("auto: a budget is asked for; ", wanted.policy, " loses least of the policies without calibration"));
  }
  wanted.policy = "full";
  wanted.bits = options.bits;
  wanted.params.clear();
  wanted.strategy.clear();
  if (AsksForBits(options)) return Make(wanted, prompt_tokens, "auto: bits are asked for and no budget; full keeps everything in them");
  if (options.budget.kind != KvBudget::Kind::kNone) return Make(wanted, prompt_tokens, "auto: ratio 1 keeps everything");
  if (!has_default) return Make(wanted, prompt_tokens, "auto: no budget is asked for and the server has no other policy (--kv)");
  // Checks what the request protects, whatever will be chosen.
  if (auto full = Make(wanted, prompt_tokens, ""); !full.ok()) return full;
  wanted = *defaults_.kv;
  wanted.protect = options.protect;
  auto choice = Make(wanted, prompt_tokens, "");
  if (!choice.ok()) return KvChoice{Full(), absl::StrCat("auto: full, since ", std::string(choice.status().message())), false};
  choice->may_be_full = true;
  return choice;
}

absl::StatusOr<KvChoice> KvChooser::Choose(const Request& request) const {
  const int prompt_tokens = static_cast<int>(request.prompt.size());
  if (request.kv) {
    const KvProtect& protect = request.kv->protect;
    if (!protect.messages.empty() || !protect.roles.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("kv.protect.", protect.messages.empty() ? "roles" : "messages",
                                                     ": only messages of a chat (HTTP or gRPC) can be protected; give ranges of tokens"));
    }
    return request.kv->policy == "auto" ? ChooseAuto(*request.kv, prompt_tokens) : Make(*request.kv, prompt_tokens, "requested");
  }
  if (!defaults_.kv) return ChooseAuto(KvOptions{}, prompt_tokens);
  if (defaults_.kv->policy == "auto" && prompt_tokens < kShortPrompt) return KvChoice{Full(), ShortPrompt(prompt_tokens), false};
  auto choice = defaults_.kv->policy == "auto" ? ChooseAuto(*defaults_.kv, prompt_tokens)
                                               : Make(*defaults_.kv, prompt_tokens, "the server's default (--kv)");
  if (choice.ok()) return choice;
  // The client did not ask for it and shall not be refused because of it.
  return KvChoice{Full(), absl::StrCat("the server's default does not fit this prompt: ", std::string(choice.status().message())), false};
}

absl::Status KvChooser::CheckDefaults() const {
  if (!defaults_.kv) return absl::OkStatus();
  if (!defaults_.kv->protect.messages.empty() || !defaults_.kv->protect.roles.empty()) {
    return absl::InvalidArgumentError("kv.protect: messages and roles belong to a request, not to the server's default");
  }
  if (defaults_.kv->policy == "auto") return ChooseAuto(*defaults_.kv, 1 << 20).status();
  // Only a prompt knows whether it can be held; a long one shows what is wrong with the object itself.
  return Make(*defaults_.kv, 1 << 20, "").status();
}

void KvChooser::Decide(int64_t needed, int64_t free, int prompt_tokens, KvChoice* choice) {
  if (!choice->may_be_full) return;
  choice->may_be_full = false;
  const std::string policy(choice->policy->name());
  if (prompt_tokens < kShortPrompt) {
    choice->policy = Full();
    choice->reason = ShortPrompt(prompt_tokens);
  } else if (needed <= free / 2) {
    choice->policy = Full();
    choice->reason = absl::StrCat("auto: full takes ", needed, " of ", free, " free bytes, at most half");
  } else {
    choice->reason = absl::StrCat("auto: ", policy, ", since full would take ", needed, " of ", free, " free bytes, more than half");
  }
}

}  // namespace loupe
