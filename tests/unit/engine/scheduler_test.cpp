// PlanStep on hand-written views.
#include "engine/scheduler.h"

#include "gtest/gtest.h"

namespace loupe {
namespace {

constexpr int64_t kPlenty = 1 << 20;

RunningView Decoding(uint64_t order, int priority = 0) { return {{priority, order}, 0, 1, 1000, 10}; }
RunningView Prompting(uint64_t order, int rows, int priority = 0) { return {{priority, order}, rows, 0, 500, 100}; }
WaitingView Waiting(uint64_t order, int rows, int64_t bytes, int priority = 0) { return {{priority, order}, rows, bytes}; }

// index:prompt+decode of each grant.
std::string Grants(const StepPlan& plan) {
  std::string text;
  for (const RowGrant& g : plan.grants) {
    text += std::to_string(g.index) + ":" + std::to_string(g.prompt_rows) + "+" + std::to_string(g.decode_rows) + " ";
  }
  return text;
}

TEST(SchedulerTest, NothingToDo) {
  const StepPlan plan = PlanStep({}, {}, {4, 16, kPlenty});
  EXPECT_TRUE(plan.grants.empty());
  EXPECT_EQ(plan.num_admissions, 0);
}

TEST(SchedulerTest, DecodeRowsFirstTheRestToPrompts) {
  const std::vector<RunningView> running = {Prompting(1, 500), Decoding(2), Decoding(3)};
  EXPECT_EQ(Grants(PlanStep(running, {}, {8, 64, kPlenty})), "0:62+0 1:0+1 2:0+1 ");
}

TEST(SchedulerTest, AShortPromptBehindALongOneGetsItsShare) {
  const std::vector<RunningView> running = {Prompting(1, 5000), Prompting(2, 20), Prompting(3, 5000)};
  // Half of 128, then 20 of the 64 that are left, then half of 44, and what remains to the first.
  EXPECT_EQ(Grants(PlanStep(running, {}, {8, 128, kPlenty})), "0:86+0 1:20+0 2:22+0 ");
}

TEST(SchedulerTest, RecomputedTokensComeInChunksAfterThePrompt) {
  RunningView replay = Decoding(1);
  replay.decode_rows = 30;
  replay.prompt_rows = 10;
  EXPECT_EQ(Grants(PlanStep(std::vector{replay}, {}, {8, 16, kPlenty})), "0:10+0 ") << "one phase at a time";
  replay.prompt_rows = 0;
  EXPECT_EQ(Grants(PlanStep(std::vector{replay, Decoding(2)}, {}, {8, 16, kPlenty})), "0:0+15 1:0+1 ");
}

TEST(SchedulerTest, AdmissionLooksAtWhatRunningSamplesStillNeed) {
  const std::vector<RunningView> running = {Prompting(1, 50)};  // will ask for 100 bytes
  const std::vector<WaitingView> waiting = {Waiting(2, 10, 60), Waiting(3, 10, 1)};
  EXPECT_EQ(PlanStep(running, waiting, {8, 64, 159}).num_admissions, 0) << "nobody overtakes the first";
  EXPECT_EQ(PlanStep(running, waiting, {8, 64, 160}).num_admissions, 1);
  EXPECT_EQ(PlanStep(running, waiting, {8, 64, 161}).num_admissions, 2);
  EXPECT_EQ(PlanStep(running, waiting, {2, 64, 161}).num_admissions, 1) << "places count too";
}

TEST(SchedulerTest, TheFirstComesInRegardlessIfNothingRuns) {
  const std::vector<WaitingView> waiting = {Waiting(2, 10, 1000), Waiting(3, 10, 1)};
  const StepPlan plan = PlanStep({}, waiting, {8, 64, 5});
  EXPECT_EQ(plan.num_admissions, 1);
  EXPECT_EQ(Grants(plan), "0:10+0 ");
}

TEST(SchedulerTest, DisplacesOnlyStrictlyLowerPriorityAndOnlyIfItHelps) {
  const std::vector<RunningView> running = {Decoding(1, 0), Decoding(2, -1), Decoding(3, -1)};
  const StepLimits full{3, 64, kPlenty};
  StepPlan plan = PlanStep(running, std::vector{Waiting(9, 5, 10, -1)}, full);
  EXPECT_TRUE(plan.preemptions.empty());
  plan = PlanStep(running, std::vector{Waiting(9, 5, 10, 0)}, full);
  EXPECT_EQ(plan.preemptions, std::vector<int>{2}) << "the youngest of the lowest";
  EXPECT_EQ(Grants(plan), "0:0+1 3:5+0 1:0+1 ");
  // 2020 bytes come free from the two; a request for more than that and what is free displaces nobody.
  const StepLimits scarce{8, 64, 30};
  EXPECT_EQ(PlanStep(running, std::vector{Waiting(9, 5, 2020, 0)}, scarce).preemptions, (std::vector<int>{2, 1}));
  plan = PlanStep(running, std::vector{Waiting(9, 5, 2021, 0)}, scarce);
  EXPECT_TRUE(plan.preemptions.empty());
  EXPECT_EQ(plan.num_admissions, 0);
}

TEST(SchedulerTest, PromptsThatFillStepsKeepOthersWaiting) {
  std::vector<WaitingView> waiting;
  for (uint64_t i = 0; i < 20; ++i) waiting.push_back(Waiting(i, 1000, 1));
  EXPECT_EQ(PlanStep({}, waiting, {64, 512, kPlenty}).num_admissions, kMaxPromptsAtOnce);
  for (WaitingView& view : waiting) view.prompt_rows = 3;
  EXPECT_EQ(PlanStep({}, waiting, {64, 512, kPlenty}).num_admissions, 20) << "short ones all fit into one step";
  std::vector<RunningView> running;
  for (uint64_t i = 0; i < 6; ++i) running.push_back(Prompting(i, 1000, -1));
  EXPECT_EQ(PlanStep(running, waiting, {64, 512, kPlenty}).num_admissions, 20) << "lower priority does not hold them up";
}

}  // namespace
}  // namespace loupe
