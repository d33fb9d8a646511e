// Decides what the next step computes: a pure function of views, so that it can be tested with a handful of numbers.
//
// Every running sequence that generates gets its row first. The rest of the step goes to prompts: each gets an equal
// share, and what is left over goes to the oldest. Waiting sequences are admitted in order of priority and arrival, as
// long as the bytes of all running sequences with some headroom fit; the first that does not fit holds back those
// behind it, so nobody starves.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace loupe {

// A sequence as the scheduler sees it. Views come in order of precedence: priority, then arrival.
struct SequenceView {
  int prompt_left = 0;   // prompt tokens not yet in the cache
  int decode_left = 0;   // generated tokens not yet in the cache; more than one after a preemption
  int64_t bytes_now = 0;  // estimate of what the sequence takes with its tokens of now and headroom
};

struct PlanLimits {
  int max_step_rows = 0;
  int max_sequences = 0;
  int64_t capacity_bytes = 0;
};

struct PlannedRows {
  int index = 0;        // into running, or running.size() + index into waiting for those admitted
  int prompt_rows = 0;
  int decode_rows = 0;
};

struct StepPlan {
  int num_admitted = 0;  // the first so many of waiting
  std::vector<PlannedRows> rows;
};

// Fills `plan`, whose memory is reused. A step always has rows if anything runs or could run alone.
void PlanStep(std::span<const SequenceView> running, std::span<const SequenceView> waiting, const PlanLimits& limits, StepPlan* plan);

}  // namespace loupe
