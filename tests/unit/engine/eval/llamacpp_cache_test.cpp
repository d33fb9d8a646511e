// The simulated rivals: blocks by hand, error bounds, and only evaluation knows them.
#include "engine/eval/llamacpp_cache.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"
#include "kvcache/policies/registry.h"

namespace loupe {
namespace {

TEST(RoundBlocks, BlocksByHand) {
  std::vector<float> x(32, 0.f);
  x[0] = 127, x[1] = -64.4f, x[2] = 0.4f;
  RoundBlocks(RivalBlock::kQ8_0, x);  // steps of 1
  EXPECT_EQ(x[0], 127);
  EXPECT_EQ(x[1], -64);
  EXPECT_EQ(x[2], 0);
  std::vector<float> y(32, 0.f);
  y[0] = -8, y[1] = 7.4f, y[2] = 7.9f, y[3] = 0.4f;  // steps of 1, from -8 to 7
  RoundBlocks(RivalBlock::kQ4_0, y);
  EXPECT_EQ(y[0], -8);
  EXPECT_EQ(y[1], 7);
  EXPECT_EQ(y[2], 7);
  EXPECT_EQ(y[3], 0);
  std::vector<float> zero(64, 0.f);
  RoundBlocks(RivalBlock::kQ4_0, zero);
  EXPECT_EQ(zero, std::vector<float>(64, 0.f));
}

TEST(RoundBlocks, ErrorsAreBoundedByEachBlocksOwnStep) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<float> x(96);
    for (size_t i = 0; i < x.size(); ++i) x[i] = normal(random) * (i < 32 ? 100.f : 1.f);
    for (const auto& [block, steps] : {std::pair{RivalBlock::kQ8_0, 127.f}, {RivalBlock::kQ4_0, 8.f}}) {
      std::vector<float> rounded = x;
      RoundBlocks(block, rounded);
      for (size_t b = 0; b < 3; ++b) {
        float largest = 0;
        for (size_t i = 32 * b; i < 32 * b + 32; ++i) largest = std::max(largest, std::abs(x[i]));
        // q4_0 has one step less on the other side.
        const float bound = largest / steps * (block == RivalBlock::kQ8_0 ? 0.51f : 1.01f) + largest * 1e-3f;
        for (size_t i = 32 * b; i < 32 * b + 32; ++i) EXPECT_LE(std::abs(rounded[i] - x[i]), bound);
      }
    }
  }
}

TEST(Rivals, AreNoPoliciesOfAServer) {
  EXPECT_TRUE(RivalOf("llamacpp-q8_0").has_value());
  EXPECT_TRUE(RivalOf("llamacpp-q4_0").has_value());
  EXPECT_FALSE(RivalOf("full").has_value());
  EXPECT_DOUBLE_EQ(BytesRatio(RivalBlock::kQ8_0), 0.53125);
  EXPECT_DOUBLE_EQ(BytesRatio(RivalBlock::kQ4_0), 0.28125);
  EXPECT_EQ(FindPolicy("llamacpp-q8_0"), nullptr);
}

}  // namespace
}  // namespace loupe
