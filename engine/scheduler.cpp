#include "engine/scheduler.h"

#include <algorithm>
#include <numeric>

#include "kernels/check.h"

namespace loupe {
namespace {

// Recomputed tokens are computed in chunks like a prompt; a single decode row is not a chunk.
bool NeedsChunks(const RunningView& view) { return view.prompt_rows > 0 || view.decode_rows > 1; }

class Planner {
 public:
  Planner(std::span<const RunningView> running, std::span<const WaitingView> waiting, const StepLimits& limits)
      : running_(running), waiting_(waiting), limits_(limits), by_rank_(running.size()) {
    std::iota(by_rank_.begin(), by_rank_.end(), 0);
    std::sort(by_rank_.begin(), by_rank_.end(), [&](int a, int b) { return View(a).rank.Before(View(b).rank); });
    free_bytes_ = limits.free_bytes;
    for (const RunningView& view : running) free_bytes_ -= view.needed_bytes;
  }

  StepPlan Plan() {
    while (plan_.num_admissions < static_cast<int>(waiting_.size()) && Admit(waiting_[static_cast<size_t>(plan_.num_admissions)])) {
    }
    GiveRows();
    return std::move(plan_);
  }

 private:
  const RunningView& View(int index) const { return running_[static_cast<size_t>(index)]; }
  int num_running() const { return static_cast<int>(by_rank_.size()) + plan_.num_admissions; }
  bool Fits(const WaitingView& view) const { return num_running() < limits_.max_sequences && view.needed_bytes <= free_bytes_; }

  bool Admit(const WaitingView& view) {
    if (PromptsFillSteps(view.rank.priority)) return false;
    if (!Fits(view) && num_running() > 0 && !Displace(view)) return false;
    free_bytes_ -= view.needed_bytes;
    ++plan_.num_admissions;
    return true;
  }

  bool PromptsFillSteps(int priority) const {
    int count = plan_.num_admissions;  // all of them rank before
    int64_t rows = 0;
    for (int i = 0; i < plan_.num_admissions; ++i) rows += waiting_[static_cast<size_t>(i)].prompt_rows;
    for (const int index : by_rank_) {
      const RunningView& view = View(index);
      if (!NeedsChunks(view) || view.rank.priority < priority) continue;
      ++count;
      rows += view.prompt_rows + view.decode_rows;
    }
    return count >= kMaxPromptsAtOnce && rows >= limits_.max_step_rows;
  }

  // Preempts from the lowest rank upwards until `view` fits, or nobody at all if that would not do.
  bool Displace(const WaitingView& view) {
    size_t count = 0;
    int64_t bytes = free_bytes_;
    int left = num_running();
    const auto fits = [&] { return left == 0 || (left < limits_.max_sequences && view.needed_bytes <= bytes); };
    while (!fits()) {
      if (count == by_rank_.size()) return false;
      const RunningView& victim = View(by_rank_[by_rank_.size() - 1 - count]);
      if (victim.rank.priority >= view.rank.priority) return false;
      bytes += victim.held_bytes + victim.needed_bytes;
      --left;
      ++count;
    }
    for (; count > 0; --count) {
      plan_.preemptions.push_back(by_rank_.back());
      by_rank_.pop_back();
    }
    free_bytes_ = bytes;
    return true;
  }

  // Running and admitted samples in one order.
  std::vector<int> Merged() const {
    std::vector<int> merged = by_rank_;
    const int first = static_cast<int>(running_.size());
    for (int i = 0; i < plan_.num_admissions; ++i) merged.push_back(first + i);
    std::stable_sort(merged.begin(), merged.end(), [&](int a, int b) { return RankOf(a).Before(RankOf(b)); });
    return merged;
  }
  Rank RankOf(int index) const {
    const size_t i = static_cast<size_t>(index);
    return i < running_.size() ? running_[i].rank : waiting_[i - running_.size()].rank;
  }

  void GiveRows() {
    struct Need {
      RowGrant* grant;
      bool prompt;
      int rows;
    };
    const std::vector<int> merged = Merged();
    plan_.grants.resize(merged.size());
    std::vector<Need> needs;
    int left = limits_.max_step_rows;
    for (size_t i = 0; i < merged.size(); ++i) {
      RowGrant& grant = plan_.grants[i];
      grant.index = merged[i];
      const bool is_running = merged[i] < static_cast<int>(running_.size());
      if (is_running && !NeedsChunks(View(merged[i]))) {
        grant.decode_rows = View(merged[i]).decode_rows;
        left -= grant.decode_rows;
        continue;
      }
      // One phase at a time: the policy acts between the prompt and what follows it.
      const int prompt_rows =
          is_running ? View(merged[i]).prompt_rows : waiting_[static_cast<size_t>(merged[i]) - running_.size()].prompt_rows;
      needs.push_back({&grant, prompt_rows > 0, prompt_rows > 0 ? prompt_rows : View(merged[i]).decode_rows});
    }
    LOUPE_CHECK_GE(left, 0) << "rows are left after the decode rows of " << merged.size() << " samples";
    const auto give = [&left](Need& need, int share) {
      const int rows = std::min({need.rows, share, left});
      (need.prompt ? need.grant->prompt_rows : need.grant->decode_rows) += rows;
      need.rows -= rows;
      left -= rows;
    };
    for (Need& need : needs) give(need, std::max(left / 2, kMinShareRows));
    for (Need& need : needs) give(need, left);
    std::erase_if(plan_.grants, [](const RowGrant& grant) { return grant.prompt_rows + grant.decode_rows == 0; });
  }

  std::span<const RunningView> running_;
  std::span<const WaitingView> waiting_;
  const StepLimits& limits_;
  std::vector<int> by_rank_;  // running samples that stay
  int64_t free_bytes_ = 0;    // less what running samples will still ask for
  StepPlan plan_;
};

}  // namespace

StepPlan PlanStep(std::span<const RunningView> running, std::span<const WaitingView> waiting, const StepLimits& limits) {
  return Planner(running, waiting, limits).Plan();
}

}  // namespace loupe
