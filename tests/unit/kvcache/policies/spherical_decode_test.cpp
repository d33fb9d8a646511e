// What a sequence gives up when it has outgrown its budget: the least loss, page by page.
#include "kvcache/policies/spherical_decode.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "kvcache/page_format.h"
#include "tests/support/profiles.h"
#include "tests/unit/kvcache/policies/policy_run.h"

namespace loupe {
namespace {

constexpr PageFormat kS8{Codec::kS8, Codec::kS8}, kS4{Codec::kS4, Codec::kS4};

class FitPagesTest : public ::testing::Test {
 protected:
  FitPagesTest() : run_({2, 4, 2, 64}), context_(run_.cache().policy_context(1000)), profile_(testing::RandomProfile(2, 2, 64)) {}

  // Four lists; the first 20 entries of each and the last are not open.
  std::vector<HeldList> Lists(int entries, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<HeldList> lists(4);
    for (HeldList& list : lists) {
      for (int e = 0; e < entries; ++e) {
        const bool open = e >= 20 && e + 1 < entries;
        list.open.push_back(open);
        list.formats.push_back(!open ? context_.dense : e < entries / 2 ? kS8 : kS4);
        list.scores.push_back(static_cast<float>(random() % 1000) / 1000.f);
      }
    }
    return lists;
  }
  double Loss(const std::vector<HeldList>& before, const std::vector<HeldList>& after) const {
    double loss = 0;
    for (size_t i = 0; i < after.size(); ++i) {
      double sum = 0, lost = 0;
      for (size_t e = 0; e < after[i].formats.size(); ++e) {
        if (!before[i].open[e]) continue;
        const double score = double{before[i].scores[e]} + 1e-6;
        const auto bits = [](Codec codec) { return IsCoded(codec) ? CodecBits(codec) : 16; };
        const auto& format = after[i].formats[e];
        sum += score;
        lost += score * (format ? CostOfBits(profile_->lists[i], bits(format->key), bits(format->value)) : CostOfShare(profile_->lists[i], 0));
      }
      if (sum > 0) loss += lost / sum;
    }
    return loss;
  }

  PolicyRun run_;
  PolicyContext context_;
  std::shared_ptr<const SphericalProfile> profile_;
};

TEST_F(FitPagesTest, FitsAndLosesMoreTheLessThereIs) {
  const PlanShape shape{&context_, 1000, 20, context_.dense, false};
  for (const int entries : {21, 63, 64, 65, 257, 1000}) {
    const std::vector<HeldList> before = Lists(entries, 5);
    const int64_t whole = SizeOf(before, shape);
    int64_t least = 0;
    for (const HeldList& list : before) {
      least += context_.RunBytes(context_.dense, std::count(list.open.begin(), list.open.end(), false));
    }
    double previous = -1;
    for (int step = 0; step <= 20; ++step) {
      const int64_t size = whole - (whole - least) * step / 20;
      std::vector<HeldList> lists = before;
      FitPages(profile_->lists, shape, {}, size, &lists);
      EXPECT_LE(SizeOf(lists, shape), size) << entries << " entries, step " << step;
      const double loss = Loss(before, lists);
      EXPECT_GE(loss, previous - 1e-12);
      previous = loss;
      for (size_t i = 0; i < lists.size(); ++i) {
        for (size_t e = 0; e < lists[i].formats.size(); ++e) {
          const auto &was = before[i].formats[e], &is = lists[i].formats[e];
          if (!before[i].open[e]) EXPECT_EQ(was, is);
          if (is && IsCoded(is->key)) EXPECT_LE(CodecBits(is->key), CodecBits(was->key)) << "bits that are gone came back";
        }
      }
    }
    EXPECT_GT(previous, entries > 22 ? 0 : -1);
  }
}

TEST_F(FitPagesTest, EnoughRoomChangesNothingAndLimitsHold) {
  const PlanShape shape{&context_, 1000, 20, context_.dense, false};
  const std::vector<HeldList> before = Lists(500, 7);
  std::vector<HeldList> lists = before;
  FitPages(profile_->lists, shape, {}, SizeOf(before, shape), &lists);
  for (size_t i = 0; i < lists.size(); ++i) EXPECT_EQ(lists[i].formats, before[i].formats);
  SphericalLimits limits;
  limits.floor = 4;
  FitPages({}, shape, limits, SizeOf(before, shape) / 2, &lists);
  int gone = 0;
  for (const HeldList& list : lists) {
    for (const auto& format : list.formats) {
      gone += !format;
      if (format && IsCoded(format->key)) EXPECT_GE(std::min(CodecBits(format->key), CodecBits(format->value)), 4);
    }
  }
  EXPECT_GT(gone, 0);
}

TEST_F(FitPagesTest, WhatNobodyLooksAtGoesFirst) {
  const PlanShape shape{&context_, 1000, 20, context_.dense, true};
  std::vector<HeldList> lists = Lists(20 + 64 * 4 + 1, 9);
  for (HeldList& list : lists) {
    for (size_t e = 0; e < list.scores.size(); ++e) {
      list.scores[e] = e >= 20 + 64 && e < 20 + 128 ? 1e-4f : 1;
      if (list.open[e]) list.formats[e] = kS4;
    }
  }
  SphericalLimits limits;
  limits.key = limits.value = 4;
  FitPages(profile_->lists, shape, limits, SizeOf(lists, shape) - 4 * 64, &lists);
  for (const HeldList& list : lists) {
    for (size_t e = 0; e < list.formats.size(); ++e) EXPECT_EQ(!list.formats[e], e >= 20 + 64 && e < 20 + 128) << e;
  }
}

}  // namespace
}  // namespace loupe
