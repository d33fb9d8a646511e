// What must hold for every plan, over random views.
#include <algorithm>
#include <map>
#include <random>

#include "engine/scheduler.h"
#include "gtest/gtest.h"

namespace loupe {
namespace {

struct Situation {
  std::vector<RunningView> running;
  std::vector<WaitingView> waiting;
  StepLimits limits;
};

class Maker {
 public:
  explicit Maker(uint64_t seed) : random_(seed) {}
  Situation Make() {
    Situation s;
    s.limits.max_sequences = Uniform(1, 12);
    s.limits.max_step_rows = s.limits.max_sequences + Uniform(0, Chance(0.5) ? 5 : 200);
    s.limits.free_bytes = Uniform(0, 3000);
    const int num_running = Uniform(0, s.limits.max_sequences), num_waiting = Uniform(0, 8);
    std::vector<uint64_t> orders(static_cast<size_t>(num_running + num_waiting));
    for (size_t i = 0; i < orders.size(); ++i) orders[i] = i;
    std::shuffle(orders.begin(), orders.end(), random_);
    for (int i = 0; i < num_running; ++i) {
      RunningView view{{Uniform(-1, 1), orders[static_cast<size_t>(i)]}, 0, 1, Uniform(0, 900), Uniform(0, 300)};
      if (Chance(0.4)) view.prompt_rows = Uniform(1, 300), view.decode_rows = Uniform(0, 20);
      else if (Chance(0.2)) view.decode_rows = Uniform(2, 100);
      s.running.push_back(view);
    }
    for (int i = 0; i < num_waiting; ++i) {
      s.waiting.push_back({{Uniform(-1, 1), orders[static_cast<size_t>(num_running + i)]}, Uniform(1, 300), Uniform(1, 1500)});
    }
    std::sort(s.waiting.begin(), s.waiting.end(), [](const auto& a, const auto& b) { return a.rank.Before(b.rank); });
    return s;
  }

 private:
  bool Chance(double p) { return std::uniform_real_distribution<>(0, 1)(random_) < p; }
  int Uniform(int low, int high) { return std::uniform_int_distribution<>(low, high)(random_); }
  std::mt19937_64 random_;
};

void CheckGrants(const Situation& s, const StepPlan& plan) {
  const int num_running = static_cast<int>(s.running.size());
  std::map<int, RowGrant> by_index;
  int rows = 0;
  for (const RowGrant& g : plan.grants) {
    EXPECT_TRUE(by_index.emplace(g.index, g).second) << "two grants for " << g.index;
    rows += g.prompt_rows + g.decode_rows;
    EXPECT_GT(g.prompt_rows + g.decode_rows, 0);
    EXPECT_TRUE(g.prompt_rows == 0 || g.decode_rows == 0) << "both phases";
    EXPECT_LT(g.index, num_running + plan.num_admissions);
  }
  EXPECT_LE(rows, s.limits.max_step_rows);
  int unmet = 0;
  for (int i = 0; i < num_running; ++i) {
    const RunningView& view = s.running[static_cast<size_t>(i)];
    const bool out = std::count(plan.preemptions.begin(), plan.preemptions.end(), i) > 0;
    const RowGrant g = by_index.contains(i) ? by_index[i] : RowGrant{};
    if (out) {
      EXPECT_FALSE(by_index.contains(i)) << "a preempted sample has rows";
    } else if (view.prompt_rows == 0 && view.decode_rows == 1) {
      EXPECT_EQ(g.decode_rows, 1) << "decode waits for prompts";
    } else {
      const int need = view.prompt_rows > 0 ? view.prompt_rows : view.decode_rows;
      EXPECT_LE(g.prompt_rows + g.decode_rows, need);
      EXPECT_TRUE(view.prompt_rows == 0 || g.decode_rows == 0) << "decode rows before the prompt is complete";
      unmet += need - g.prompt_rows - g.decode_rows;
    }
  }
  for (int i = 0; i < plan.num_admissions; ++i) {
    const int need = s.waiting[static_cast<size_t>(i)].prompt_rows;
    const int given = by_index.contains(num_running + i) ? by_index[num_running + i].prompt_rows : 0;
    EXPECT_LE(given, need);
    unmet += need - given;
  }
  EXPECT_TRUE(unmet == 0 || rows == s.limits.max_step_rows) << "rows are left while work waits";
}

void CheckPlaces(const Situation& s, const StepPlan& plan) {
  const int stay = static_cast<int>(s.running.size() - plan.preemptions.size());
  EXPECT_LE(stay + plan.num_admissions, s.limits.max_sequences);
  EXPECT_TRUE(plan.num_admissions > 0 || plan.preemptions.empty()) << "preempted for nobody";
  EXPECT_TRUE(!s.running.empty() || s.waiting.empty() || plan.num_admissions > 0) << "the engine would stand still";
  // What came in fits, unless it is alone.
  int64_t bytes = s.limits.free_bytes;
  for (size_t i = 0; i < s.running.size(); ++i) {
    const bool out = std::count(plan.preemptions.begin(), plan.preemptions.end(), static_cast<int>(i)) > 0;
    bytes += out ? s.running[i].held_bytes : -s.running[i].needed_bytes;
  }
  for (int i = 0; i < plan.num_admissions; ++i) bytes -= s.waiting[static_cast<size_t>(i)].needed_bytes;
  EXPECT_TRUE(bytes >= 0 || stay + plan.num_admissions <= 1 || plan.num_admissions == 0);
  for (const int out : plan.preemptions) {
    const Rank& rank = s.running[static_cast<size_t>(out)].rank;
    EXPECT_LT(rank.priority, s.waiting[static_cast<size_t>(plan.num_admissions) - 1].rank.priority > rank.priority
                                 ? s.waiting[static_cast<size_t>(plan.num_admissions) - 1].rank.priority
                                 : s.waiting[0].rank.priority);
    for (size_t i = 0; i < s.running.size(); ++i) {
      if (std::count(plan.preemptions.begin(), plan.preemptions.end(), static_cast<int>(i)) > 0) continue;
      EXPECT_TRUE(s.running[i].rank.Before(rank)) << "a sample of lower rank stayed";
    }
  }
}

TEST(SchedulerProperty, EveryPlanHolds) {
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Situation s = Maker(seed).Make();
    const StepPlan plan = PlanStep(s.running, s.waiting, s.limits);
    CheckGrants(s, plan);
    CheckPlaces(s, plan);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(SchedulerProperty, TheOrderOfRunningSamplesDoesNotMatter) {
  for (uint64_t seed = 1; seed <= 1000; ++seed) {
    Situation s = Maker(seed).Make();
    const auto describe = [&] {
      const StepPlan plan = PlanStep(s.running, s.waiting, s.limits);
      const auto order = [&](int index) {
        const size_t i = static_cast<size_t>(index);
        return i < s.running.size() ? s.running[i].rank.order : s.waiting[i - s.running.size()].rank.order;
      };
      std::string text = std::to_string(plan.num_admissions) + " -";
      for (const int out : plan.preemptions) text += " " + std::to_string(order(out));
      for (const RowGrant& g : plan.grants) {
        text += " | " + std::to_string(order(g.index)) + " " + std::to_string(g.prompt_rows) + " " + std::to_string(g.decode_rows);
      }
      return text;
    };
    const std::string before = describe();
    std::reverse(s.running.begin(), s.running.end());
    ASSERT_EQ(before, describe()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace loupe
