// Surprisal against a double-precision oracle: lengths around the threads' shares, logits far apart, equal ones, strides.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "tests/kernels/reference.h"

namespace loupe::testing {
namespace {

double ReferenceSurprisal(const float* x, int64_t vocab, int32_t id) {
  double top = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t i = 0; i < vocab; ++i) top = std::max(top, static_cast<double>(x[i]));
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(x[i]) - top);
  return std::log(sum) + top - static_cast<double>(x[id]);
}

std::vector<float> Compute(const Target& target, std::vector<float>& logits, int64_t stride, int64_t vocab, std::vector<int32_t>& ids) {
  Backend& backend = BackendOf(target, false, 2);
  const auto rows = static_cast<int64_t>(ids.size());
  std::vector<float> out(ids.size(), -1);
  DeviceArrays arrays(backend);
  SurprisalArgs args;
  args.logits = MakeTensor(logits.data(), DType::kF32, rows, vocab);
  args.logits.rank = 2;
  args.logits.row_stride = stride;
  args.logits = arrays.In(args.logits);
  args.ids = arrays.In(MakeTensor(ids.data(), DType::kI32, rows));
  args.out = arrays.Out(MakeTensor(out.data(), DType::kF32, rows));
  backend.Surprisal(args, arrays.stream());
  arrays.Finish();
  return out;
}

TEST(Surprisal, EqualsTheOracle) {
  for (const Target& target : UsableTargets()) {
    for (const int64_t vocab : {1, 2, 31, 511, 512, 513, 49152}) {
      for (const int64_t rows : {1, 7}) {
        std::mt19937 random(3);
        const int64_t stride = vocab + 5;
        std::vector<float> logits = RandomFloats(rows * stride, random, 12);
        std::vector<int32_t> ids;
        for (int64_t r = 0; r < rows; ++r) ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab)));
        const std::vector<float> out = Compute(target, logits, stride, vocab, ids);
        for (int64_t r = 0; r < rows; ++r) {
          const double want = ReferenceSurprisal(logits.data() + r * stride, vocab, ids[static_cast<size_t>(r)]);
          ASSERT_NEAR(static_cast<double>(out[static_cast<size_t>(r)]), want, 2e-6 * (1 + want))
              << target << ", vocabulary " << vocab << ", row " << r;
        }
      }
    }
  }
}

TEST(Surprisal, HoldsFarApartAndForEqualLogits) {
  for (const Target& target : UsableTargets()) {
    std::vector<float> logits(3 * 1000, 0);
    logits[7] = 3e4f;                                                             // row 0: all mass on one token
    std::fill_n(logits.begin() + 2000, 1000, -std::numeric_limits<float>::max());  // row 2: equal, as low as can be
    std::vector<int32_t> ids = {8, 999, 0};
    const std::vector<float> out = Compute(target, logits, 1000, 1000, ids);
    EXPECT_FLOAT_EQ(out[0], 3e4f) << target;
    EXPECT_NEAR(out[1], std::log(1000.), 1e-5) << target;
    EXPECT_NEAR(out[2], std::log(1000.), 1e-5) << target;
  }
}

}  // namespace
}  // namespace loupe::testing
