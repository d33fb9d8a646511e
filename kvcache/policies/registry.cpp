#include "kvcache/policies/registry.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/check.h"
#include "kvcache/policies/primitives.h"

namespace loupe {
namespace {

absl::Status Refuse(const std::string& field, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("kv.", field, ": ", why));
}

absl::Status CheckParam(const ParamSpec& spec, const KvParam& value) {
  const std::string field = absl::StrCat("params.", spec.name);
  if (!spec.choices.empty()) {
    const auto* word = std::get_if<std::string>(&value);
    if (word != nullptr && std::find(spec.choices.begin(), spec.choices.end(), *word) != spec.choices.end()) return absl::OkStatus();
    return Refuse(field, absl::StrCat("is ", word != nullptr ? *word : "a number", ", must be one of ", absl::StrJoin(spec.choices, ", ")));
  }
  const auto* number = std::get_if<double>(&value);
  if (number == nullptr) return Refuse(field, absl::StrCat("must be a number from ", spec.min, " to ", spec.max));
  // Written so that NaN fails.
  const bool fits = *number >= spec.min && *number <= spec.max && (!spec.integer || *number == std::floor(*number));
  if (fits) return absl::OkStatus();
  return Refuse(field,
                absl::StrCat("is ", *number, ", must be a ", spec.integer ? "whole " : "", "number from ", spec.min, " to ", spec.max));
}

std::string NamesOf(std::span<const PolicyRow> rows, bool baselines) {
  std::string names = "auto";
  for (const PolicyRow& row : rows) {
    if (baselines || !row.baseline) absl::StrAppend(&names, ", ", row.name);
  }
  return names;
}

}  // namespace

absl::StatusOr<KvOptions> WithDefaults(const PolicyRow& row, const KvOptions& options) {
  KvOptions out = options;
  for (const auto& given : options.params) {
    const std::string& name = given.first;
    const KvParam& value = given.second;
    const auto spec = std::find_if(row.params.begin(), row.params.end(), [&](const ParamSpec& p) { return p.name == name; });
    if (spec == row.params.end()) {
      std::vector<std::string> known;
      for (const ParamSpec& p : row.params) known.push_back(p.name);
      return Refuse("params." + name, absl::StrCat("policy ", row.name, " has no such parameter; it has ",
                                                   known.empty() ? "none" : absl::StrJoin(known, ", ")));
    }
    if (absl::Status status = CheckParam(*spec, value); !status.ok()) return status;
  }
  for (const ParamSpec& spec : row.params) {
    const KvParam value = spec.choices.empty() ? KvParam(spec.default_value)
                                               : KvParam(spec.choices[static_cast<size_t>(spec.default_value)]);
    out.params.emplace(spec.name, value);
  }
  return out;
}

int64_t PolicyContext::ListBytes(int entries) const {
  const int tail = entries % kPageEntries;
  return entries / kPageEntries * page_bytes + (tail == 0 ? 0 : tail <= kSmallPageEntries ? small_page_bytes : page_bytes);
}

int PolicyContext::MaxEntries(int64_t bytes) const {
  const int64_t pages = bytes / page_bytes;
  const bool small = bytes - pages * page_bytes >= small_page_bytes;
  return static_cast<int>(std::min<int64_t>(pages * kPageEntries + (small ? kSmallPageEntries : 0), 1 << 30));
}

std::span<const PolicyRow> AllPolicies() {
  static const std::vector<PolicyRow> rows = {FullRow(),      StreamingRow(), H2oRow(),     TovaRow(),  SnapKvRow(), AdaKvRow(),
                                              PyramidKvRow(), ChunkKvRow(),   KeyDiffRow(), PolyKvRow(), KnormRow(), RandomRow()};
  return rows;
}

const PolicyRow* FindPolicy(std::string_view name) {
  for (const PolicyRow& row : AllPolicies()) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

absl::StatusOr<std::unique_ptr<Policy>> MakePolicy(const KvOptions& options, const PolicyContext& context) {
  const PolicyRow* row = FindPolicy(options.policy);
  if (row == nullptr) {
    return Refuse("policy", absl::StrCat("is ", options.policy, ", must be one of ", NamesOf(AllPolicies(), context.allow_baselines)));
  }
  if (row->baseline && !context.allow_baselines) {
    return Refuse("policy", absl::StrCat(row->name, " only serves as a comparison; start the server with --allow-baselines to have it"));
  }
  if (!options.strategy.empty() && row->name != "polykv") {
    return Refuse("strategy", absl::StrCat("is ", options.strategy, ", but policy ", row->name, " takes none"));
  }
  auto complete = WithDefaults(*row, options);
  if (!complete.ok()) return complete.status();
  if (row->make != nullptr) return row->make(*complete, context);
  return MakeEviction(row->name, *complete, context, row->drops_each_token ? DecodeForm::kEachToken : DecodeForm::kInterval,
                      [&](const EvictionBudget& budget) { return row->make_scorer(*complete, budget, context); });
}

double NumberParam(const KvOptions& options, const char* name) {
  const auto it = options.params.find(name);
  LOUPE_CHECK(it != options.params.end()) << "parameter " << name << " is in no row";
  return std::get<double>(it->second);
}

const std::string& WordParam(const KvOptions& options, const char* name) {
  const auto it = options.params.find(name);
  LOUPE_CHECK(it != options.params.end()) << "parameter " << name << " is in no row";
  return std::get<std::string>(it->second);
}

}  // namespace loupe
