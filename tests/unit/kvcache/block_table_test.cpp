#include "kvcache/block_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace loupe {
namespace {

std::vector<int32_t> Values(const PositionPlane& plane) {
  std::vector<int32_t> values;
  for (int e = 0; e < plane.size(); ++e) values.push_back(plane[e]);
  return values;
}

TEST(PositionPlane, AppendedPositionsStayARun) {
  PositionPlane plane;
  plane.Append(0, 5);
  plane.Append(5, 60);
  EXPECT_EQ(plane.size(), 65);
  EXPECT_TRUE(plane.chosen().empty());
  EXPECT_EQ(plane[64], 64);
}

TEST(PositionPlane, AssignSplitsOffTheRunThatReachesTheEnd) {
  PositionPlane plane;
  plane.Assign({0, 3, 7, 8, 9}, 10);
  EXPECT_EQ(std::vector<int32_t>(plane.chosen().begin(), plane.chosen().end()), (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(plane.run_begin(), 7);
  plane.Append(10, 2);
  EXPECT_EQ(Values(plane), (std::vector<int32_t>{0, 3, 7, 8, 9, 10, 11}));
}

TEST(PositionPlane, ARunThatEndsEarlierIsStored) {
  PositionPlane plane;
  plane.Assign({0, 1, 2}, 10);
  EXPECT_EQ(plane.run_count(), 0);
  plane.Append(10, 1);
  EXPECT_EQ(Values(plane), (std::vector<int32_t>{0, 1, 2, 10}));
}

TEST(PositionPlaneDeathTest, AGapInAppendedPositionsIsABug) {
  PositionPlane plane;
  plane.Append(0, 3);
  EXPECT_DEATH(plane.Append(4, 1), "position of an appended entry");
}

// Every operation beside a plain vector.
TEST(PositionPlane, AgreesWithAVector) {
  const uint32_t seed = 7;
  std::mt19937 random(seed);
  PositionPlane plane;
  std::vector<int32_t> model;
  int32_t length = 0;
  for (int i = 0; i < 2000; ++i) {
    const uint32_t dice = random() % 8;
    if (dice < 4) {
      const int count = static_cast<int>(random() % 5) + 1;
      plane.Append(length, count);
      for (int k = 0; k < count; ++k) model.push_back(length++);
    } else if (dice < 6) {
      std::vector<int32_t> kept;
      for (int32_t p : model) {
        if (random() % 8 != 0) kept.push_back(p);
      }
      model = kept;
      plane.Assign(kept, length);
    } else {
      const int count = static_cast<int>(random() % (model.size() + 1)) / 4;
      plane.DropFront(count);
      model.erase(model.begin(), model.begin() + count);
    }
    ASSERT_EQ(Values(plane), model) << "seed " << seed << " operation " << i;
    const int32_t position = static_cast<int32_t>(random() % static_cast<uint32_t>(length + 3)) - 1;
    const auto bound = std::lower_bound(model.begin(), model.end(), position) - model.begin();
    ASSERT_EQ(plane.LowerBound(position), bound) << "position " << position << " seed " << seed << " operation " << i;
  }
}

}  // namespace
}  // namespace loupe
