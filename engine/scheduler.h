// Which rows the next step computes, for whom, and who comes in or has to leave: PlanStep, a pure function of what is
// running, what waits and what is free. It changes nothing; the core applies the plan. Step thread only, but stateless.
//
// Rank: higher priority first, then earlier arrival; a preempted sample keeps its rank, so it returns before later ones.
// - Every sample that decodes gets its row: prompts never delay it by more than one step.
// - What is left of the step goes to prompts (and to recomputing after a preemption) by rank, at most half of what is
//   left to each, so that a long prompt does not hold up those behind it; what remains goes to the first again.
// - The waiting come in strictly by rank: nobody overtakes a request that does not fit yet. One comes in only if all its
//   known tokens fit beside everything that the running samples are still sure to need, with a little headroom; if
//   nothing runs, the first comes in regardless.
// - A waiting sample that finds no room displaces running ones of strictly lower priority, lowest rank first.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace loupe {

struct Rank {
  int priority = 0;
  uint64_t order = 0;  // of arrival
  bool Before(const Rank& other) const { return priority != other.priority ? priority > other.priority : order < other.order; }
};

struct RunningView {
  Rank rank;
  int prompt_rows = 0;       // not in the cache yet
  int decode_rows = 0;       // generated tokens not in the cache yet: one, or more after a preemption
  int64_t held_bytes = 0;    // given back if it were preempted
  int64_t needed_bytes = 0;  // it will ask for, until its known tokens and the headroom are in
};

struct WaitingView {
  Rank rank;
  int prompt_rows = 0;       // of the whole prompt; what was generated before a preemption is recomputed after it
  int64_t needed_bytes = 0;  // for its known tokens and the headroom
};

struct StepLimits {
  int max_sequences = 0;  // running at a time; at most max_step_rows
  int max_step_rows = 0;
  int64_t free_bytes = 0;
};

struct RowGrant {
  int index = 0;  // into running; from running.size() on: into waiting, which is admitted
  int prompt_rows = 0;
  int decode_rows = 0;
};

struct StepPlan {
  std::vector<int> preemptions;  // indexes into running; they get no rows
  int num_admissions = 0;        // the first so many of waiting
  std::vector<RowGrant> grants;  // by rank, none empty
};

// At most so many samples have unfinished prompts, unless their prompts together do not fill a step. Samples of lower
// priority do not count against one that waits.
inline constexpr int kMaxPromptsAtOnce = 6;
// A share of a step below this is not worth a pass over the sample's cache.
inline constexpr int kMinShareRows = 16;

// `waiting` is sorted by rank; `running` need not be.
StepPlan PlanStep(std::span<const RunningView> running, std::span<const WaitingView> waiting, const StepLimits& limits);

}  // namespace loupe
