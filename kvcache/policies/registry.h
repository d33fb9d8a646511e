// All policies, one row each: name, what it does, its parameters with ranges and defaults, and how one is made for a
// request. What lists policies to users (HTTP, gRPC, --help-kv) reads the same rows. Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kvcache/policies/options.h"
#include "kvcache/policies/policy.h"

namespace loupe {

class Scorer;
struct EvictionBudget;
struct SphericalProfile;
struct Strategy;

// A parameter: a number in a range, or one of several words.
struct ParamSpec {
  std::string name;
  std::string summary;
  double default_value = 0;
  double min = 0, max = 0;
  bool integer = true;
  std::vector<std::string> choices = {};  // not empty: a word; default_value is the index of the default
};

// What lists cost, and what there is to hold: what a policy must know of cache and prompt to plan its budget.
struct PolicyContext {
  int num_layers = 0;
  int num_kv_heads = 0;
  int heads_per_group = 0;
  int head_dim = 0;
  std::string model;             // its name, for messages
  std::span<const int> windows;  // [layers] sliding windows, 0: none; empty: none at all
  int max_step_rows = 0;
  int64_t entry_bytes = 0;       // key and value in the model's own cache type
  int64_t page_bytes = 0;        // 64 entries
  int64_t small_page_bytes = 0;  // 16 entries
  int num_prompt = 0;
  bool allow_baselines = false;  // policies that only serve as comparison
  std::span<const std::shared_ptr<const Strategy>> strategies;        // that the operator brought, each made for this model
  std::span<const std::shared_ptr<const SphericalProfile>> profiles;  // likewise

  // How entries are stored: the first `landing_entries` of a list in `landing`, the others in `format`. All of them are
  // `dense` unless the request asks for bits (coded.h).
  PageFormat dense, landing, format;
  int landing_entries = 0;

  int num_lists() const { return num_layers * num_kv_heads; }
  bool coded() const { return format != dense || landing != dense; }
  // Bytes of a list's pages.
  int64_t ListBytes(int entries) const;
  // The longest list that `bytes` hold.
  int MaxEntries(int64_t bytes) const;
  // The same without slack.
  double EntryBytesOf(double entries) const;
  double EntriesIn(double bytes) const;
  // Bytes of the pages of a run of so many entries in one format, tails as block_table.h says.
  int64_t RunBytes(const PageFormat& run_format, int64_t entries) const;
  // All lists dense: what a prompt holds at its end, until the pages of its codes have taken their place.
  int64_t DensePromptBytes() const;
  // At least the bytes of a list's pages, whatever its tails, while `waiting` entries more than planned are not coded yet.
  int64_t MostBytes(int64_t entries, int64_t waiting) const;
};

struct PolicyRow {
  std::string name;
  std::string summary;
  std::string needs;  // what it costs, for people
  bool baseline = false;
  std::vector<ParamSpec> params;
  // `options` has all parameters of the row, in range. Either `make`, whose INVALID_ARGUMENT names the field, the value and
  // its limits; or `make_scorer` of a primitive that ranks the entries of each list, which a strategy may also name.
  absl::StatusOr<std::unique_ptr<Policy>> (*make)(const KvOptions& options, const PolicyContext& context) = nullptr;
  std::unique_ptr<Scorer> (*make_scorer)(const KvOptions& options, const EvictionBudget& budget, const PolicyContext& context) = nullptr;
  bool drops_each_token = false;  // of a scorer's decode form: one entry a token in place of a cut now and then
  bool chooses_formats = false;   // `bits` are the policy's own business, in options.bits; other policies are told by the context
};

// In the order in which they are shown. "auto" is none of them: the engine chooses one.
std::span<const PolicyRow> AllPolicies();
const PolicyRow* FindPolicy(std::string_view name);

// The policy that `options` names, for a prompt. INVALID_ARGUMENT: "kv.<field>: <what is wrong, with the limits>".
absl::StatusOr<std::unique_ptr<Policy>> MakePolicy(const KvOptions& options, const PolicyContext& context);

// All parameters of the row: those given, checked, and the defaults of the others. INVALID_ARGUMENT names the parameter.
absl::StatusOr<KvOptions> WithDefaults(const PolicyRow& row, const KvOptions& options);

// A parameter's value. For the rows' make functions: every parameter is there.
double NumberParam(const KvOptions& options, const char* name);
const std::string& WordParam(const KvOptions& options, const char* name);

}  // namespace loupe
