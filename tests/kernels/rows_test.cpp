// The ops over single rows (embedding, norm, rotation, activation, gathering) against double-precision oracles, for
// every instruction set, and the equality of a row's bits in any company.
#include <gtest/gtest.h>

#include "kernels/half.h"
#include "tests/kernels/quantise_blocks.h"
#include "tests/kernels/reference.h"

namespace loupe::testing {
namespace {

// Each op on arrays of the host.
void Compute(Backend& backend, EmbedArgs args) {
  DeviceArrays arrays(backend);
  args.ids = arrays.In(args.ids), args.out = arrays.Out(args.out);
  backend.Embed(args, arrays.stream());
  arrays.Finish();
}
void Compute(Backend& backend, RmsNormArgs args) {
  DeviceArrays arrays(backend);
  const bool in_place = args.out.data == args.x.data;
  args.out = arrays.Out(args.out);
  args.x = in_place ? args.out : arrays.In(args.x);
  args.weight = arrays.In(args.weight);
  backend.RmsNorm(args, arrays.stream());
  arrays.Finish();
}
void Compute(Backend& backend, SiluMulArgs args) {
  DeviceArrays arrays(backend);
  args.gate_up = arrays.In(args.gate_up), args.out = arrays.Out(args.out);
  backend.SiluMul(args, arrays.stream());
  arrays.Finish();
}
void Compute(Backend& backend, RopeArgs args) {
  DeviceArrays arrays(backend);
  args.x = arrays.Out(args.x), args.positions = arrays.In(args.positions), args.frequencies = arrays.In(args.frequencies);
  backend.Rope(args, arrays.stream());
  arrays.Finish();
}
void Compute(Backend& backend, GatherRowsArgs args) {
  DeviceArrays arrays(backend);
  args.x = arrays.In(args.x), args.rows = arrays.In(args.rows), args.out = arrays.Out(args.out);
  backend.GatherRows(args, arrays.stream());
  arrays.Finish();
}

TEST(Embed, GivesTheTablesRowsExactly) {
  for (const Target& isa : UsableTargets()) {
    Backend& backend = BackendOf(isa, IsCuda(isa));  // in exact mode the GPU keeps every bit of a weight
    for (const WeightType type : kAllWeightTypes) {
      std::mt19937 random(3);
      const int64_t cols = IsBlockType(type) ? 96 : 97;
      const OwnedMatrix m = Quantise(type, RandomFloats(53 * cols, random), 53, cols);
      const OwnedMatrix second = Quantise(type, RandomFloats(18 * cols, random), 18, cols);
      std::vector<double> want = Dequantise(m.view());
      const std::vector<double> more = Dequantise(second.view());
      want.insert(want.end(), more.begin(), more.end());
      auto table = backend.PackWeight(std::vector<HostMatrix>{m.view(), second.view()});
      ASSERT_TRUE(table.ok());
      std::vector<int32_t> ids = {0, 52, 16, 15, 70, 53, 0};
      for (int i = 0; i < 200; ++i) ids.push_back(static_cast<int32_t>(random() % 71));
      std::vector<float> out(ids.size() * static_cast<size_t>(cols));
      EmbedArgs args;
      args.table = table->get();
      args.ids = MakeTensor(ids.data(), DType::kI32, static_cast<int64_t>(ids.size()));
      args.out = MakeTensor(out.data(), DType::kF32, static_cast<int64_t>(ids.size()), cols);
      Compute(backend, args);
      for (size_t i = 0; i < out.size(); ++i) {
        const int64_t row = ids[i / static_cast<size_t>(cols)];
        const double value = want[static_cast<size_t>(row * cols) + i % static_cast<size_t>(cols)];
        ASSERT_NEAR(out[i], value, 6e-8 * std::fabs(value))
            << isa << ", type " << static_cast<int>(type) << ", id " << row;
      }
    }
  }
}

TEST(Embed, ReadsEveryHalf) {
  Backend& backend = BackendOf("portable", false, 1);
  std::vector<uint16_t> halfs(65536);
  for (size_t i = 0; i < halfs.size(); ++i) halfs[i] = static_cast<uint16_t>(i);
  auto table = backend.PackWeight(std::vector<HostMatrix>{{WeightType::kF16, 1, 65536, halfs.data()}});
  ASSERT_TRUE(table.ok());
  int32_t id = 0;
  std::vector<float> out(65536);
  EmbedArgs args;
  args.table = table->get();
  args.ids = MakeTensor(&id, DType::kI32, 1);
  args.out = MakeTensor(out.data(), DType::kF32, 1, 65536);
  Compute(backend, args);
  for (size_t i = 0; i < out.size(); ++i) {
    const double want = HalfValue(halfs[i]);
    ASSERT_TRUE(std::isnan(want) ? std::isnan(out[i]) : out[i] == want) << "half " << i << ": " << out[i];
  }
}

TEST(Half, RoundsToTheNearestAndNeverToInfinity) {
  for (int i = 0; i < 65536; ++i) {
    const auto half = static_cast<uint16_t>(i);
    const float x = HalfToFloat(half);
    if (!std::isfinite(x)) continue;
    ASSERT_EQ(FloatToHalf(x), half) << "half " << i;
    const float next = HalfToFloat(static_cast<uint16_t>(half + 1));  // towards the outside
    if (!std::isfinite(next)) continue;
    for (const float share : {0.25f, 0.5f, 0.75f}) {
      const float between = x + share * (next - x);
      ASSERT_EQ(FloatToHalf(between), ToHalf(between)) << between;
    }
  }
  for (const float beyond : {65519.f, 65520.f, 1e30f, INFINITY}) {
    EXPECT_EQ(FloatToHalf(beyond), 0x7bff) << beyond;
    EXPECT_EQ(FloatToHalf(-beyond), 0xfbff) << beyond;
  }
  EXPECT_TRUE(std::isnan(HalfToFloat(FloatToHalf(NAN))));
}

TEST(RmsNorm, EqualsTheOracle) {
  for (const Target& isa : UsableTargets()) {
    Backend& backend = BackendOf(isa, false);
    for (const int64_t n : {1, 7, 15, 16, 17, 64, 576, 1031}) {
      for (const int64_t rows : {1, 3, 65}) {
        std::mt19937 random(5);
        std::vector<float> x = RandomFloats(rows * 2 * n, random, 3), weight = RandomFloats(n, random);
        std::vector<float> out(x.size());
        RmsNormArgs args;
        args.x = MakeTensor(x.data(), DType::kF32, rows, 2, n);  // two heads a row
        args.weight = MakeTensor(weight.data(), DType::kF32, n);
        args.eps = 1e-5f;
        args.out = MakeTensor(out.data(), DType::kF32, rows, 2, n);
        Compute(backend, args);
        for (int64_t i = 0; i < 2 * rows; ++i) {
          const std::vector<double> want = ReferenceRmsNorm(x.data() + i * n, weight.data(), args.eps, n);
          for (int64_t c = 0; c < n; ++c) {
            const double value = want[static_cast<size_t>(c)];
            ASSERT_NEAR(out[static_cast<size_t>(i * n + c)], value, 1e-6 * std::fabs(value))
                << isa << ", n " << n << ", row " << i;
          }
        }
        args.out = args.x;
        Compute(backend, args);
        EXPECT_EQ(x, out) << "in place";
      }
    }
  }
}

TEST(SiluMul, EqualsTheOracleOverTheWholeRange) {
  for (const Target& isa : UsableTargets()) {
    Backend& backend = BackendOf(isa, false);
    for (const int64_t width : {1, 13, 16, 1536}) {
      for (const int64_t rows : {1, 37}) {
        std::mt19937 random(9);
        std::vector<float> x = RandomFloats(rows * width * 2, random, 20), out(static_cast<size_t>(rows * width));
        x[0] = 0;
        if (width > 12)
          x[1] = 200, x[2] = -200, x[3] = -87.5f, x[4] = 88.5f, x[5] = 3e38f, x[6] = -3e38f, x[7] = 1e-30f;
        SiluMulArgs args;
        args.gate_up = MakeTensor(x.data(), DType::kF32, rows, 2 * width);
        args.out = MakeTensor(out.data(), DType::kF32, rows, width);
        Compute(backend, args);
        for (int64_t i = 0; i < rows * width; ++i) {
          const float* gate = x.data() + i / width * 2 * width + i % width;
          const double want = ReferenceSiluMul(gate[0], gate[width]);
          if (std::fabs(want) > 3.4e38) continue;
          // Below -80 the answer is held at gate * up * e^-80.
          ASSERT_NEAR(out[static_cast<size_t>(i)], want,
                      1e-6 * std::fabs(want) + 2e-35 * std::fabs(double{gate[0]} * gate[width]))
              << isa << ", gate " << gate[0];
        }
      }
    }
  }
}

TEST(Rope, EqualsTheOracle) {
  for (const Target& isa : UsableTargets()) {
    Backend& backend = BackendOf(isa, false);
    for (const bool interleaved : {true, false}) {
      for (const int64_t rows : {1, 5, 67}) {
        for (const int pairs : {1, 20, 32}) {  // of a head of 64: the rest stays as it is
          std::mt19937 random(13);
          const int64_t heads = 3, dim = 64, stride = heads * dim + 40;
          std::vector<float> x = RandomFloats(rows * stride, random), frequencies;
          const std::vector<float> before = x;
          std::vector<int32_t> positions;
          for (int64_t r = 0; r < rows; ++r) positions.push_back(static_cast<int32_t>(random() % 131072));
          for (int i = 0; i < pairs; ++i)
            frequencies.push_back(static_cast<float>(std::pow(10000.0, -double(i) / pairs)));
          RopeArgs args;
          args.x = MakeTensor(x.data(), DType::kF32, rows, heads, dim);
          args.x.row_stride = stride;
          args.positions = MakeTensor(positions.data(), DType::kI32, rows);
          args.frequencies = MakeTensor(frequencies.data(), DType::kF32, pairs);
          args.scale = 1.25f;
          args.interleaved = interleaved;
          Compute(backend, args);
          for (int64_t r = 0; r < rows; ++r) {
            const auto row = before.begin() + r * stride;
            for (int64_t h = 0; h < heads; ++h) {
              std::vector<double> head(row + h * dim, row + (h + 1) * dim);
              ReferenceRope(head, positions[static_cast<size_t>(r)], frequencies, args.scale, interleaved);
              for (int64_t d = 0; d < dim; ++d) {
                ASSERT_NEAR(x[static_cast<size_t>(r * stride + h * dim + d)], head[static_cast<size_t>(d)], 2e-6)
                    << isa << (interleaved ? " interleaved" : " halves") << ", row " << r << ", head " << h
                    << ", dimension " << d;
              }
            }
            for (int64_t i = heads * dim; i < stride; ++i) {
              ASSERT_EQ(x[static_cast<size_t>(r * stride + i)], row[i]) << "written between rows";
            }
          }
        }
      }
    }
  }
}

// The rotations of a step are kept for its later layers: another step, or other frequencies, must not get them.
TEST(Rope, DoesNotReuseRotationsOfOtherPositions) {
  Backend& backend = BackendOf("portable", false, 1);
  float frequency = 1;
  int32_t position = 0;
  const auto rotate = [&] {
    std::vector<float> x = {1, 0};
    RopeArgs args;
    args.x = MakeTensor(x.data(), DType::kF32, 1, 1, 2);
    args.x.shape[2] = 2;
    args.positions = MakeTensor(&position, DType::kI32, 1);
    args.frequencies = MakeTensor(&frequency, DType::kF32, 1);
    Compute(backend, args);
    return x[1];
  };
  for (const int p : {1, 2, 2, 3, 0}) {
    position = p;
    EXPECT_NEAR(rotate(), std::sin(double(p)), 1e-7);
  }
  frequency = .25f;
  position = 3;
  EXPECT_NEAR(rotate(), std::sin(.75), 1e-7);
}

TEST(GatherRows, CopiesRows) {
  Backend& backend = BackendOf(UsableTargets().back(), false);
  std::mt19937 random(17);
  std::vector<float> x = RandomFloats(40 * 600, random), out(50 * 577);
  std::vector<int32_t> rows;
  for (int i = 0; i < 50; ++i) rows.push_back(static_cast<int32_t>(random() % 40));
  GatherRowsArgs args;
  args.x = MakeTensor(x.data(), DType::kF32, 40, 577);
  args.x.row_stride = 600;
  args.rows = MakeTensor(rows.data(), DType::kI32, 50);
  args.out = MakeTensor(out.data(), DType::kF32, 50, 577);
  Compute(backend, args);
  for (size_t i = 0; i < 50; ++i) {
    EXPECT_EQ(0, std::memcmp(&out[i * 577], &x[static_cast<size_t>(rows[i]) * 600], 577 * sizeof(float)))
        << "row " << i;
  }
}

TEST(Rows, BitsDoNotDependOnCompanyOrThreads) {
  for (const Target& isa : UsableTargets()) {
    std::mt19937 random(19);
    const int64_t width = 587;
    const std::vector<float> x = RandomFloats(50 * 2 * width, random);
    std::vector<float> weight = RandomFloats(width, random);
    const auto run = [&](int threads, int64_t begin, int64_t end) {
      Backend& backend = BackendOf(isa, false, threads);
        std::vector<float> part(x.begin() + begin * 2 * width, x.begin() + end * 2 * width);
      std::vector<float> out(part.size() / 2);
      RmsNormArgs norm;
      norm.x = norm.out = MakeTensor(part.data(), DType::kF32, end - begin, 2, width);
      norm.weight = MakeTensor(weight.data(), DType::kF32, width);
      Compute(backend, norm);
      SiluMulArgs silu;
      silu.gate_up = MakeTensor(part.data(), DType::kF32, end - begin, 2 * width);
      silu.out = MakeTensor(out.data(), DType::kF32, end - begin, width);
      Compute(backend, silu);
      return out;
    };
    const std::vector<float> all = run(1, 0, 50);
    for (const int threads : {1, 2, 3}) {
      for (const int64_t begin : {0, 17, 49}) {
        const std::vector<float> some = run(threads, begin, 50);
        EXPECT_EQ(0, std::memcmp(some.data(), all.data() + begin * width, some.size() * 4))
            << isa << ", " << threads << " threads";
      }
    }
  }
}

}  // namespace
}  // namespace loupe::testing
