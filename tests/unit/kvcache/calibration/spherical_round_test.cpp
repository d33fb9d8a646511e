// Calibration's rounding beside the codes of real pages: the reference of the kernels, and a cache that stores them.
#include "kvcache/calibration/spherical_round.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/kernels/spherical_reference.h"
#include "tests/unit/kvcache/policies/policy_run.h"

namespace loupe {
namespace {

std::vector<float> RandomVector(std::mt19937* random, size_t dim) {
  std::normal_distribution<float> normal(0.3f, 2.f);
  std::vector<float> x(dim);
  for (float& v : x) v = normal(*random);
  return x;
}

TEST(RoundSpherical, EqualsTheReferenceOfTheKernels) {
  std::mt19937 random(1);
  for (const size_t dim : {64, 128, 192, 256}) {
    for (const Codec codec : {Codec::kS8, Codec::kS4, Codec::kS3, Codec::kS2}) {
      for (int trial = 0; trial < 20; ++trial) {
        const std::vector<float> x = RandomVector(&random, dim), mean = trial % 2 ? RandomVector(&random, dim) : std::vector<float>{};
        std::vector<float> rounded = x;
        RoundSpherical(codec, mean, rounded);
        const std::vector<double> expected = testing::DecodeSpherical(testing::EncodeSpherical(x, mean, codec), mean);
        for (size_t d = 0; d < dim; ++d) EXPECT_NEAR(double{rounded[d]}, expected[d], 1e-5 * (1 + std::abs(expected[d])));
      }
    }
  }
}

TEST(RoundSpherical, ZeroAndTheMeanStayAndDenseIsNoCode) {
  std::mt19937 random(2);
  const std::vector<float> mean = RandomVector(&random, 64);
  std::vector<float> x = mean;
  RoundSpherical(Codec::kS4, mean, x);
  EXPECT_EQ(x, mean);
  std::vector<float> zero(64, 0.f);
  RoundSpherical(Codec::kS8, {}, zero);
  EXPECT_EQ(zero, std::vector<float>(64, 0.f));
  x = RandomVector(&random, 64);
  const std::vector<float> before = x;
  RoundSpherical(Codec::kDense, mean, x);
  EXPECT_EQ(x, before);
}

// A list whose entries were replaced by what their codes stand for attends as one that holds the codes.
TEST(RoundSpherical, ACacheOfRoundedEntriesAttendsAsOneOfCodes) {
  constexpr int kDim = 64, kRows = 70;
  for (const Codec codec : {Codec::kS8, Codec::kS4, Codec::kS3, Codec::kS2}) {
    PolicyRun run({1, 2, 1, kDim});
    std::mt19937 random(3);
    const std::vector<float> mean = RandomVector(&random, kDim);
    ASSERT_TRUE(run.cache().SetMeanKeys(mean).ok());
    const Rows rows = RandomRows(run.shape(), kRows + 1, 4);
    const SeqId coded = run.Prefill(FullPolicy(), rows, kRows, kRows), rounded = run.cache().Fork(coded).value();
    ListAction action{0, 0, {}};
    action.coded.push_back({{codec, codec}, {}});
    for (int32_t e = 0; e < kRows; ++e) action.coded[0].entries.push_back(e);
    ASSERT_TRUE(run.cache().Repack(coded, std::span(&action, 1), run.stream()).ok());
    const std::vector<float> all(rows.k[0].begin(), rows.k[0].begin() + kRows * kDim);
    std::vector<float> keys = all, values = all;
    for (int e = 0; e < kRows; ++e) {
      RoundSpherical(codec, mean, std::span(keys).subspan(static_cast<size_t>(e * kDim), kDim));
      RoundSpherical(codec, {}, std::span(values).subspan(static_cast<size_t>(e * kDim), kDim));
    }
    ASSERT_TRUE(run.cache().Rewrite(rounded, 0, 0, keys, values, run.stream()).ok());
    run.cache().Audit();
    const std::vector<float> a = run.Step({coded, 0, 1, false}, rows, kRows), b = run.Step({rounded, 0, 1, false}, rows, kRows);
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 2e-4f * (1 + std::abs(b[i]))) << i;
    EXPECT_LT(run.cache().Report(coded).device_bytes, run.cache().Report(rounded).device_bytes);
    run.cache().Close(coded);
    run.cache().Close(rounded);
    run.cache().Audit();
  }
}

}  // namespace
}  // namespace loupe
