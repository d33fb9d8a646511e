#include "kvcache/policies/budget.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

absl::Status Refuse(const std::string& field, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("kv.", field, ": ", why));
}

const char* FieldOf(KvBudget::Kind kind) {
  switch (kind) {
    case KvBudget::Kind::kRatio: return "budget.ratio";
    case KvBudget::Kind::kTokens: return "budget.tokens";
    case KvBudget::Kind::kBytes: return "budget.bytes";
    default: return "budget";
  }
}

// Sets what the budget asks for, in entries and bytes.
absl::Status ReadBudget(const KvBudget& budget, const PolicyContext& context, EvictionBudget* out) {
  const double value = budget.value;
  const int64_t lists = context.num_lists();
  const int64_t least = context.coded() ? context.RunBytes(context.format, 1) : context.small_page_bytes;
  const double full_bytes = static_cast<double>(lists * context.entry_bytes) * context.num_prompt;
  switch (budget.kind) {
    case KvBudget::Kind::kNone:
      return absl::OkStatus();
    case KvBudget::Kind::kRatio:
      if (!(value > 0 && std::isfinite(value))) return Refuse("budget.ratio", absl::StrCat("is ", value, ", must be above 0"));
      if (value >= 1) return absl::OkStatus();
      out->total_bytes = static_cast<int64_t>(value * full_bytes);
      if (out->total_bytes < lists * least) {
        return Refuse("budget.ratio",
                      absl::StrCat("is ", value, ", which is ", out->total_bytes, " bytes of this prompt's ",
                                   static_cast<int64_t>(full_bytes), ", must be at least ", lists * least, ": ", lists,
                                   " lists of one page of 16 entries; raise the ratio or leave it out"));
      }
      break;
    case KvBudget::Kind::kTokens:
      if (!(value >= 1 && value <= (1 << 30) && value == std::floor(value))) {
        return Refuse("budget.tokens", absl::StrCat("is ", value, ", must be a whole number of at least 1"));
      }
      out->entries = static_cast<int>(value);
      break;
    case KvBudget::Kind::kBytes:
      if (!(value >= static_cast<double>(lists * least) && value < 1e18)) {
        return Refuse("budget.bytes", absl::StrCat("is ", value, ", must be at least ", lists * least,
                                                   ": ", lists, " lists of one page of 16 entries"));
      }
      out->total_bytes = static_cast<int64_t>(value);
      break;
  }
  out->drops = true;
  if (out->total_bytes == 0) return absl::OkStatus();
  out->entries = context.MaxEntries(out->total_bytes / lists);
  return absl::OkStatus();
}

absl::Status ReadProtection(const KvProtect& protect, const PolicyContext& context, int wanted, Protection* out) {
  const int prompt = context.num_prompt;
  out->sinks = protect.sinks.value_or(4);
  // Relative to the budget, so that a small one is not spent on the last tokens alone and no default is ever too much.
  out->recent = protect.recent.value_or(std::min(64, wanted / 4));
  if (out->sinks < 0) return Refuse("protect.sinks", absl::StrCat("is ", out->sinks, ", must be 0 or more"));
  if (out->recent < 0) return Refuse("protect.recent", absl::StrCat("is ", out->recent, ", must be 0 or more"));
  for (const auto& [from, to] : protect.ranges) {
    if (from < 0 || to <= from || to > prompt) {
      return Refuse("protect.ranges", absl::StrCat("[", from, ", ", to, ") must lie within the prompt's 0 to ", prompt,
                                                   " and hold at least one token"));
    }
  }
  out->ranges = protect.ranges;
  return absl::OkStatus();
}

}  // namespace

int Protection::Count(int num_tokens) const {
  int count = 0;
  for (int p = 0; p < num_tokens; ++p) count += Covers(p, num_tokens) ? 1 : 0;
  return count;
}

namespace {

// Entries of a list that the default of `recent` is measured by: what the budget holds of dense ones.
int WantedEntries(const EvictionBudget& budget, const PolicyContext& context) {
  if (!budget.drops) return context.num_prompt;
  if (!context.coded() || budget.total_bytes == 0) return budget.entries;
  return static_cast<int>(std::min<int64_t>(budget.total_bytes / context.num_lists() / context.entry_bytes, 1 << 30));
}

// A decode form's interval, and with it how many entries a list holds that are not coded.
void PlanInterval(const PolicyContext& context, DecodeForm decode, int interval, int protected_entries, EvictionBudget* out) {
  out->decode = decode;
  PolicyContext stored = context;
  if (decode != DecodeForm::kAppend) {
    // A decode form holds its budget after every step, so what is appended until the next cut is inside.
    stored.landing_entries = std::numeric_limits<int>::max();
    const int fits = context.coded() && out->total_bytes > 0 ? stored.MaxEntries(out->total_bytes / context.num_lists()) : out->entries;
    const int room = out->total_bytes > 0 ? fits - std::max(protected_entries, 1) : interval;
    out->interval = std::clamp(interval, 1, std::max(1, decode == DecodeForm::kEachToken ? 1 : room / 2));
  }
  out->landing_entries = stored.landing_entries = protected_entries + out->interval;
  if (out->total_bytes == 0) return;
  if (context.coded()) out->entries = stored.MaxEntries(out->total_bytes / context.num_lists());
  out->entries -= out->interval;
}

}  // namespace

absl::StatusOr<Protection> PlanProtection(const KvOptions& options, const PolicyContext& context) {
  EvictionBudget budget;
  if (absl::Status s = ReadBudget(options.budget, context, &budget); !s.ok()) return s;
  if (absl::Status s = ReadProtection(options.protect, context, WantedEntries(budget, context), &budget.protection); !s.ok()) return s;
  return budget.protection;
}

absl::StatusOr<EvictionBudget> PlanBudget(const KvOptions& options, const PolicyContext& context, DecodeForm decode, int interval) {
  EvictionBudget out;
  if (absl::Status s = ReadBudget(options.budget, context, &out); !s.ok()) return s;
  const int wanted = WantedEntries(out, context);
  if (absl::Status s = ReadProtection(options.protect, context, wanted, &out.protection); !s.ok()) return s;
  if (!out.drops) return out;
  if (context.coded() && out.total_bytes > 0 && !context.windows.empty()) {
    return Refuse("bits", "are below 16, but the model has layers with sliding windows, which stay dense: no budget in bytes; give tokens");
  }
  // Generated tokens never lie in a range, so in a decode form the last ones and the ranges add up.
  int protected_entries = out.protection.Count(context.num_prompt);
  if (decode != DecodeForm::kAppend) {
    Protection fixed = out.protection;
    fixed.recent = 0;
    protected_entries = std::max(protected_entries, fixed.Count(context.num_prompt) + out.protection.recent);
  }
  PlanInterval(context, decode, interval, protected_entries, &out);
  if (protected_entries > out.entries && (out.entries < context.num_prompt || decode != DecodeForm::kAppend)) {
    const std::string bytes =
        context.coded() && out.total_bytes > 0
            ? absl::StrCat(", whose pages take ", context.RunBytes(context.landing, protected_entries), " of ",
                           out.total_bytes / context.num_lists(), " bytes")
            : "";
    return Refuse(FieldOf(options.budget.kind),
                  absl::StrCat("is ", options.budget.value, ", which leaves ", std::max(out.entries, 0), " entries a list, but ",
                               protected_entries, " are protected (", out.protection.sinks, " sinks, ", out.protection.recent, " recent, ",
                               out.protection.ranges.size(), " ranges)", bytes, "; raise the budget or protect less"));
  }
  if (decode == DecodeForm::kAppend && out.entries >= context.num_prompt) out.drops = false;
  return out;
}

}  // namespace loupe
