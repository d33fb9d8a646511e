#include "engine/scheduler.h"

#include <algorithm>

namespace loupe {
namespace {

constexpr int kMinChunkRows = 16;  // smaller chunks waste the pass over the weights

bool Generates(const SequenceView& view) { return view.prompt_left == 0 && view.decode_left == 1; }

int Admit(std::span<const SequenceView> running, std::span<const SequenceView> waiting, const PlanLimits& limits) {
  int64_t bytes = 0;
  for (const SequenceView& view : running) bytes += view.bytes_now;
  int admitted = 0;
  for (const SequenceView& view : waiting) {
    const bool alone = running.empty() && admitted == 0;
    if (static_cast<int>(running.size()) + admitted >= limits.max_sequences) break;
    if (!alone && bytes + view.bytes_now > limits.capacity_bytes) break;
    bytes += view.bytes_now;
    ++admitted;
  }
  return admitted;
}

// Gives up to `rows` more rows of the sequence to the plan, prompt first.
int Give(const SequenceView& view, int rows, PlannedRows* planned) {
  const int prompt = std::min(rows, view.prompt_left - planned->prompt_rows);
  planned->prompt_rows += prompt;
  const int decode = std::min(rows - prompt, view.decode_left - planned->decode_rows);
  planned->decode_rows += decode;
  return prompt + decode;
}

}  // namespace

void PlanStep(std::span<const SequenceView> running, std::span<const SequenceView> waiting, const PlanLimits& limits, StepPlan* plan) {
  plan->num_admitted = Admit(running, waiting, limits);
  plan->rows.clear();
  int left = limits.max_step_rows;
  const int total = static_cast<int>(running.size()) + plan->num_admitted;
  const auto view = [&](int i) -> const SequenceView& {
    return i < static_cast<int>(running.size()) ? running[i] : waiting[i - static_cast<int>(running.size())];
  };
  int catching_up = 0;
  for (int i = 0; i < total; ++i) {
    if (!Generates(view(i))) {
      ++catching_up;
    } else if (left > 0) {
      plan->rows.push_back({i, 0, 1});
      --left;
    }
  }
  if (catching_up == 0 || left == 0) return;
  const size_t first = plan->rows.size();
  const int share = std::max(kMinChunkRows, left / catching_up);
  for (int i = 0; i < total && left > 0; ++i) {
    if (Generates(view(i))) continue;
    PlannedRows planned{i, 0, 0};
    left -= Give(view(i), std::min(left, share), &planned);
    plan->rows.push_back(planned);
  }
  for (size_t r = first; r < plan->rows.size() && left > 0; ++r) left -= Give(view(plan->rows[r].index), left, &plan->rows[r]);
}

}  // namespace loupe
