// From the budget and the protection that a request asks for to numbers of entries. Pure arithmetic, any thread.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kvcache/policies/options.h"
#include "kvcache/policies/registry.h"

namespace loupe {

// Entries that always stay: the first positions, the last ones, ranges.
struct Protection {
  int sinks = 0;
  int recent = 0;
  std::vector<std::pair<int, int>> ranges;  // [from, to)

  bool Covers(int position, int num_tokens) const {
    if (position < sinks || position >= num_tokens - recent) return true;
    for (const auto& [from, to] : ranges) {
      if (position >= from && position < to) return true;
    }
    return false;
  }
  // Protected positions of a sequence.
  int Count(int num_tokens) const;
};

// What becomes of generated tokens.
enum class DecodeForm : uint8_t {
  kAppend,      // they come on top
  kEachToken,   // a list that is full drops one entry a token
  kInterval,    // after every so many tokens a list is cut back
};

struct EvictionBudget {
  bool drops = false;      // false: nothing is ever dropped
  int entries = 0;         // that a list keeps; the mean for policies that treat lists differently
  int64_t total_bytes = 0; // of all lists' pages when the prompt is complete; 0: the budget counts entries
  Protection protection;
  DecodeForm decode = DecodeForm::kAppend;
  int interval = 0;        // of kEachToken (1) and kInterval
  int landing_entries = 0; // of a list, as they are stored when they come: protected ones, and those since the last cut
};

// INVALID_ARGUMENT: a budget out of range, ranges outside the prompt, a budget that protected entries alone exceed, with
// the numbers, or less than one small page of 16 entries a list, since no list can be smaller.
absl::StatusOr<Protection> PlanProtection(const KvOptions& options, const PolicyContext& context);
absl::StatusOr<EvictionBudget> PlanBudget(const KvOptions& options, const PolicyContext& context, DecodeForm decode, int interval);

}  // namespace loupe
