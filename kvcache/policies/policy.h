// A policy says what a list keeps, in which format, and what becomes of the rest. It decides and never touches memory:
// it sees read-only views and returns actions; the same inputs give the same actions. Policies are immutable and shared
// by all sequences that use them. Called by the step thread.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/page_layout.h"

namespace loupe {

// What a policy wants to know. Every field costs something when asked for and nothing otherwise.
struct Signals {
  int window_query_rows = 0;       // the last w query rows of the prompt, per layer
  bool page_mass = false;          // probability per page at decode
  bool entry_probability = false;  // probability per entry at decode
};

// One list as a policy sees it. Entries are in list order, which is positional after every repack.
struct ListView {
  int layer = 0;
  int kv_head = 0;
  std::span<const int32_t> positions;  // [entries] position of each entry in the sequence
  // Present only if asked for by Signals; R heads of the group.
  std::span<const float> window_queries;     // [w, R, D] after RoPE, oldest row first
  std::span<const float> page_mass;          // [pages, R] of the last decode step
  std::span<const float> entry_probability;  // [entries, R] of the last decode step
};

// What a list shall hold from now on: copies of these entries, ascending; everything else is dropped. (Merging,
// transcoding and tiers are further kinds of output records of the same repack.)
struct ListAction {
  int layer = 0;
  int kv_head = 0;
  std::vector<int32_t> keep;  // indexes into the list's entries
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  virtual Signals signals() const { return {}; }
  // True if this policy never acts: the cache then builds no views for it, and a step costs nothing for it.
  virtual bool keeps_everything() const { return false; }
  // The prompt is complete and its last row computed. Lists without an action stay as they are; a list has one action at
  // most. `lists` holds all lists of one sequence, layer by layer, kv heads within; a list may be empty.
  virtual void AfterPrefill(std::span<const ListView> lists, std::vector<ListAction>* actions) const = 0;
  // A generated token was appended.
  virtual void AfterDecode(std::span<const ListView> lists, std::vector<ListAction>* actions) const = 0;
};

// Keeps everything, dense: the default and the yardstick. Lives for ever.
const Policy& FullPolicy();

}  // namespace loupe
