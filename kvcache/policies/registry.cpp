#include "kvcache/policies/registry.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/check.h"
#include "kvcache/page_format.h"
#include "kvcache/policies/coded.h"
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

// With bits a number may stand for the word that it is.
KvParam WordOf(const ParamSpec& spec, const KvParam& value) {
  const auto* number = std::get_if<double>(&value);
  return number == nullptr || spec.choices.empty() ? value : KvParam(absl::StrCat(*number));
}

// Of the row, or one that all policies have.
const ParamSpec* FindParam(const PolicyRow& row, const std::string& name) {
  for (const std::span<const ParamSpec> specs : {std::span<const ParamSpec>(row.params), CodingParams()}) {
    for (const ParamSpec& spec : specs) {
      if (spec.name == name) return &spec;
    }
  }
  return nullptr;
}

std::string NamesOf(std::span<const PolicyRow> rows, bool baselines) {
  std::string names = "auto";
  for (const PolicyRow& row : rows) {
    if (baselines || !row.baseline) absl::StrAppend(&names, ", ", row.name);
  }
  return names;
}

// The row's policy, which knows of formats what `context` says.
absl::StatusOr<std::unique_ptr<Policy>> MakeUncoded(const PolicyRow& row, const KvOptions& options, const PolicyContext& context) {
  if (row.make != nullptr) return row.make(options, context);
  return MakeEviction(row.name, options, context, row.drops_each_token ? DecodeForm::kEachToken : DecodeForm::kInterval,
                      [&](const EvictionBudget& budget) { return row.make_scorer(options, budget, context); });
}

}  // namespace

absl::StatusOr<KvOptions> WithDefaults(const PolicyRow& row, const KvOptions& options) {
  KvOptions out = options;
  for (const auto& given : options.params) {
    const std::string& name = given.first;
    const ParamSpec* spec = FindParam(row, name);
    if (spec == nullptr) {
      std::vector<std::string> known;
      for (const ParamSpec& p : row.params) known.push_back(p.name);
      return Refuse("params." + name, absl::StrCat("policy ", row.name, " has no such parameter; it has ",
                                                   known.empty() ? "none" : absl::StrJoin(known, ", ")));
    }
    KvParam& value = out.params[name] = WordOf(*spec, given.second);
    if (absl::Status status = CheckParam(*spec, value); !status.ok()) return status;
  }
  for (const ParamSpec& spec : row.params) {
    const KvParam value = spec.choices.empty() ? KvParam(spec.default_value)
                                               : KvParam(spec.choices[static_cast<size_t>(spec.default_value)]);
    out.params.emplace(spec.name, value);
  }
  return out;
}

int64_t PolicyContext::RunBytes(const PageFormat& run_format, int64_t entries) const {
  const int64_t large = MakePageLayout({run_format, false, false}, head_dim).bytes;
  const int64_t small = MakePageLayout({run_format, true, false}, head_dim).bytes;
  const int64_t tail = (entries % kPageEntries + kSmallPageEntries - 1) / kSmallPageEntries;
  return entries / kPageEntries * large + std::min(tail * small, large);
}

double PolicyContext::EntryBytesOf(double entries) const {
  const double first = coded() ? std::min<double>(entries, landing_entries) : 0;
  const double landing_bytes = first > 0 ? static_cast<double>(EntryBytes(landing, head_dim)) : 0;
  return first * landing_bytes + (entries - first) * static_cast<double>(coded() ? EntryBytes(format, head_dim) : entry_bytes);
}

double PolicyContext::EntriesIn(double bytes) const {
  if (!coded()) return bytes / static_cast<double>(entry_bytes);
  const double first = EntryBytesOf(landing_entries);
  if (bytes <= first) return bytes / static_cast<double>(EntryBytes(landing, head_dim));
  return landing_entries + (bytes - first) / static_cast<double>(EntryBytes(format, head_dim));
}

int64_t PolicyContext::DensePromptBytes() const {
  const int64_t pages = (int64_t{num_prompt} + kSmallPageEntries + kPageEntries - 1) / kPageEntries;
  return pages * page_bytes * num_lists();
}

int64_t PolicyContext::MostBytes(int64_t entries, int64_t waiting) const {
  const auto pages = [](int64_t count) { return (count + kPageEntries - 1) / kPageEntries; };
  if (!coded()) return pages(entries) * page_bytes;
  const int64_t first = std::min(entries, landing_entries + waiting);
  return pages(first) * MakePageLayout({landing, false, false}, head_dim).bytes +
         pages(entries - first) * MakePageLayout({format, false, false}, head_dim).bytes;
}

int64_t PolicyContext::ListBytes(int entries) const {
  if (coded()) {
    const int first = std::min(entries, landing_entries);
    return RunBytes(landing, first) + RunBytes(format, entries - first);
  }
  const int tail = entries % kPageEntries;
  return entries / kPageEntries * page_bytes + (tail == 0 ? 0 : tail <= kSmallPageEntries ? small_page_bytes : page_bytes);
}

int PolicyContext::MaxEntries(int64_t bytes) const {
  if (coded()) {
    int fits = 0, not_any_more = 1 << 30;
    while (not_any_more - fits > 1) {
      const int middle = fits + (not_any_more - fits) / 2;
      (ListBytes(middle) <= bytes ? fits : not_any_more) = middle;
    }
    return fits;
  }
  const int64_t pages = bytes / page_bytes;
  const bool small = bytes - pages * page_bytes >= small_page_bytes;
  return static_cast<int>(std::min<int64_t>(pages * kPageEntries + (small ? kSmallPageEntries : 0), 1 << 30));
}

std::span<const PolicyRow> AllPolicies() {
  static const std::vector<PolicyRow> rows = {FullRow(),      StreamingRow(), H2oRow(),     TovaRow(),  SnapKvRow(), AdaKvRow(),
                                              PyramidKvRow(), ChunkKvRow(),   KeyDiffRow(), PolyKvRow(), SphericalRow(), KnormRow(),
                                              RandomRow()};
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
  if (!options.strategy.empty() && row->name != "polykv" && row->name != "spherical") {
    return Refuse("strategy", absl::StrCat("is ", options.strategy, ", but policy ", row->name, " takes none"));
  }
  auto complete = WithDefaults(*row, options);
  if (!complete.ok()) return complete.status();
  if (absl::Status status = CheckFloor(*complete); !status.ok()) return status;
  if (row->chooses_formats) return row->make(*complete, context);
  const auto coding = ReadCoding(*complete, context);
  if (!coding.ok()) return coding.status();
  if (!*coding) return MakeUncoded(*row, *complete, context);
  PolicyContext coded = context;
  coded.format = (*coding)->format;
  coded.landing = (*coding)->landing;
  const auto protection = PlanProtection(*complete, coded);
  if (!protection.ok()) return protection.status();
  auto policy = MakeUncoded(*row, *complete, coded);
  if (!policy.ok()) return policy.status();
  return StoreCoded(*std::move(policy), **coding, *protection, coded);
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
