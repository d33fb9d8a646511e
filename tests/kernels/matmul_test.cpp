// MatMul against a double-precision oracle for every element type, instruction set, path and phase, and its promise
// that a row's bits depend on nothing but its inputs and its phase.
#include <gtest/gtest.h>

#include "tests/kernels/quantise_blocks.h"
#include "tests/kernels/reference.h"

namespace loupe::testing {
namespace {

const char* const kTypeNames[] = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"};

struct Case {
  Target isa;
  bool exact = false;
  WeightType type = WeightType::kF32;

  std::string name() const { return isa + (exact ? " exact " : " fast ") + kTypeNames[static_cast<int>(type)]; }
};

std::vector<Case> AllCases(bool bit_equal = false) {
  std::vector<Case> cases;
  for (const Target& isa : UsableTargets(bit_equal)) {
    for (const bool exact : {false, true}) {
      for (const WeightType type : kAllWeightTypes) cases.push_back({isa, exact, type});
    }
  }
  return cases;
}

// Error allowed per unit of the sum of the terms' magnitudes. f32 sums of up to 2,000 terms stay within 2e-6. The
// 16-bit activations of the fast decode path are off by 2^-16 of the largest of 32, at most: 1.6e-5 times the ratio of
// largest to mean magnitude (about 3 here). bf16 rounds both factors of a prompt row to 2^-9 (exact weights: one
// factor), and the errors of single terms average out. On the GPU
// both factors are fp16 always, whose rounding of a single term is 2^-11 each.
double Tolerance(const Case& c, bool prompt) {
  if (!c.exact && IsCuda(c.isa)) return 1e-3;
  if (c.exact || c.type == WeightType::kF32 || c.type == WeightType::kF16) return 2e-6;
  return prompt ? 4e-3 : c.type == WeightType::kBF16 ? 2e-6 : 5e-5;
}

struct Product {
  std::unique_ptr<Weight> weight;
  std::vector<float> x, bias, add;
  int64_t rows = 0, cols = 0, tokens = 0;

  std::vector<float> Run(Backend& backend, int64_t begin, int64_t end, int64_t prompt_rows, bool in_place = false) {
    DeviceArrays arrays(backend);
    std::vector<float> out(static_cast<size_t>((end - begin) * rows), NAN);
    if (in_place) out.assign(add.begin() + begin * rows, add.begin() + end * rows);
    MatMulArgs args;
    args.weight = weight.get();
    const auto matrix = [](float* data, int64_t n, int64_t m) {
      Tensor t = MakeTensor(data, DType::kF32, n, m);
      t.rank = 2;
      return t;
    };
    args.x = arrays.In(matrix(x.data() + begin * cols, end - begin, cols));
    args.out = arrays.Out(matrix(out.data(), end - begin, rows));
    if (!bias.empty()) args.bias = arrays.In(MakeTensor(bias.data(), DType::kF32, rows));
    if (!add.empty()) args.add = in_place ? args.out : arrays.In(matrix(add.data() + begin * rows, end - begin, rows));
    args.prompt_rows = static_cast<int>(prompt_rows);
    backend.MatMul(args, arrays.stream());
    arrays.Finish();
    return out;
  }
};

Product MakeProduct(Backend& backend, const std::vector<HostMatrix>& parts, int64_t tokens, std::mt19937& random) {
  Product p;
  auto weight = backend.PackWeight(parts);
  LOUPE_CHECK(weight.ok()) << weight.status().ToString();
  p.weight = *std::move(weight);
  p.rows = p.weight->rows();
  p.cols = p.weight->cols();
  p.tokens = tokens;
  p.x = RandomFloats(tokens * p.cols, random, 2);
  return p;
}

OwnedMatrix RandomMatrix(WeightType type, int64_t rows, int64_t cols, std::mt19937& random) {
  return Quantise(type, RandomFloats(rows * cols, random, .05f), rows, cols);
}

void ExpectNear(const Product& p, const std::vector<double>& w, const std::vector<float>& out, double tolerance) {
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t r = 0; r < p.rows; ++r) {
      const size_t at = static_cast<size_t>(t * p.rows + r);
      const Dot dot = ReferenceDot(w.data() + r * p.cols, p.x.data() + t * p.cols, p.cols);
      double want = dot.value;
      if (!p.bias.empty()) want += p.bias[static_cast<size_t>(r)];
      if (!p.add.empty()) want += p.add[at];
      ASSERT_NEAR(out[at], want, tolerance * dot.magnitude + 1e-6 * std::fabs(want) + 1e-12)
          << "token " << t << " row " << r;
    }
  }
}

// What a product without bias and residual should be, computed once for all instruction sets.
std::vector<Dot> ReferenceProduct(const std::vector<double>& w, const std::vector<float>& x, int64_t rows,
                                  int64_t cols) {
  std::vector<Dot> dots;
  for (size_t t = 0; t < x.size(); t += static_cast<size_t>(cols)) {
    for (int64_t r = 0; r < rows; ++r) dots.push_back(ReferenceDot(w.data() + r * cols, x.data() + t, cols));
  }
  return dots;
}

TEST(MatMul, EqualsTheOracleAtAllShapes) {
  const unsigned seed = 20261130;
  std::vector<std::pair<Case, Backend*>> backends;
  for (const Target& isa : UsableTargets()) {
    for (const bool exact : {false, true}) backends.emplace_back(Case{isa, exact}, &BackendOf(isa, exact));
  }
  std::mt19937 random(seed);
  for (const WeightType type : kAllWeightTypes) {
    for (const int64_t cols : IsBlockType(type) ? std::vector<int64_t>{32, 64, 96, 224, 576}
                                                : std::vector<int64_t>{1, 2, 63, 65, 193, 576}) {
      for (const int64_t rows : {1, 13, 15, 16, 17, 65, 131}) {
        const OwnedMatrix m = RandomMatrix(type, rows, cols, random);
        Product p;
        p.x = RandomFloats(33 * cols, random, 2);
        p.rows = rows, p.cols = cols;
        const std::vector<Dot> want = ReferenceProduct(Dequantise(m.view()), p.x, rows, cols);
        for (auto& [c, backend] : backends) {
          c.type = type;
          p.weight = *backend->PackWeight(std::vector<HostMatrix>{m.view()});
          for (const int64_t tokens : {1, 2, 5, 16, 17, 33}) {
            for (const bool prompt : {false, true}) {
              const std::vector<float> out = p.Run(*backend, 0, tokens, prompt ? tokens : 0);
              for (size_t i = 0; i < out.size(); ++i) {
                ASSERT_NEAR(out[i], want[i].value, Tolerance(c, prompt) * want[i].magnitude + 1e-12)
                    << c.name() << (prompt ? " prompt " : " decode ") << rows << " x " << cols << ", " << tokens
                    << " tokens, element " << i << ", seed " << seed;
              }
            }
          }
        }
      }
    }
  }
}

TEST(MatMul, AddsBiasAndResidualInPlace) {
  for (const Case& c : AllCases()) {
    Backend& backend = BackendOf(c.isa, c.exact);
    std::mt19937 random(7);
    const OwnedMatrix m = RandomMatrix(c.type, 83, 416, random);
    Product p = MakeProduct(backend, {m.view()}, 19, random);
    p.bias = RandomFloats(p.rows, random);
    p.add = RandomFloats(p.rows * p.tokens, random);
    for (const int64_t prompt_rows : {0, 7, 19}) {
      SCOPED_TRACE(c.name() + ", prompt rows " + std::to_string(prompt_rows));
      const std::vector<float> out = p.Run(backend, 0, p.tokens, prompt_rows);
      ExpectNear(p, Dequantise(m.view()), out, Tolerance(c, prompt_rows > 0));
      if (HasFatalFailure()) return;
      EXPECT_EQ(out, p.Run(backend, 0, p.tokens, prompt_rows, true)) << "out as add";
    }
  }
}

TEST(MatMul, StacksPartsOfDifferentTypes) {
  for (const Target& isa : UsableTargets()) {
    for (const bool exact : {false, true}) {
      Backend& backend = BackendOf(isa, exact);
      std::mt19937 random(11);
      std::vector<OwnedMatrix> parts;
      std::vector<HostMatrix> views;
      std::vector<double> w;
      const int64_t part_rows[] = {48, 17, 1, 64, 33, 16};
      for (int i = 0; i < 6; ++i) parts.push_back(RandomMatrix(kAllWeightTypes[i], part_rows[i], 96, random));
      for (const OwnedMatrix& part : parts) {
        views.push_back(part.view());
        const std::vector<double> values = Dequantise(part.view());
        w.insert(w.end(), values.begin(), values.end());
      }
      Product p = MakeProduct(backend, views, 21, random);
      ASSERT_EQ(p.rows, 179);
      SCOPED_TRACE(isa + (exact ? " exact" : " fast"));
      ExpectNear(p, w, p.Run(backend, 0, p.tokens, 9), exact ? 2e-6 : 4e-3);
    }
  }
}

// The promise behind batching: any subset of rows, any number of threads, any mix of phases around it, same bits.
TEST(MatMul, ARowsBitsDependOnItsInputsAndPhaseAlone) {
  for (const Case& c : AllCases(/*bit_equal=*/true)) {
    SCOPED_TRACE(c.name());
    Backend& backend = BackendOf(c.isa, c.exact, 1);
    std::mt19937 random(23);
    const OwnedMatrix m = RandomMatrix(c.type, 147, 832, random);
    Product p = MakeProduct(backend, {m.view()}, 41, random);
    p.add = RandomFloats(p.rows * p.tokens, random);
    const std::vector<float> decode = p.Run(backend, 0, p.tokens, 0);
    const std::vector<float> prompt = p.Run(backend, 0, p.tokens, p.tokens);
    for (const int threads : {1, 2, 3, 7}) {
      Backend& other = BackendOf(c.isa, c.exact, threads);
      auto packed = other.PackWeight(std::vector<HostMatrix>{m.view()});
      ASSERT_TRUE(packed.ok());
      p.weight = *std::move(packed);
      for (const int64_t tokens : {1, 2, 3, 5, 8, 16, 17, 41}) {
        const int64_t begin = p.tokens - tokens;
        for (const int64_t prompt_rows : {int64_t{0}, tokens / 2, tokens}) {
          const std::vector<float> out = p.Run(other, begin, p.tokens, prompt_rows);
          const size_t from = static_cast<size_t>(begin * p.rows);
          const size_t border = static_cast<size_t>(prompt_rows * p.rows);
          ASSERT_EQ(0, std::memcmp(out.data(), prompt.data() + from, border * 4))
              << threads << " threads, " << tokens << " tokens, " << prompt_rows << " of them prompt rows";
          ASSERT_EQ(0, std::memcmp(out.data() + border, decode.data() + from + border, (out.size() - border) * 4))
              << threads << " threads, " << tokens << " tokens, " << prompt_rows << " of them prompt rows";
        }
      }
    }
  }
}

// More rows than a panel's sums are kept for at a time.
TEST(MatMul, LongPromptsEqualShortOnes) {
  for (const Target& isa : UsableTargets(/*bit_equal=*/true)) {
    Backend& backend = BackendOf(isa, false);
    std::mt19937 random(29);
    const OwnedMatrix m = RandomMatrix(WeightType::kQ4_1, 80, 64, random);
    Product p = MakeProduct(backend, {m.view()}, 1300, random);
    const std::vector<float> all = p.Run(backend, 0, p.tokens, p.tokens);
    for (const int64_t begin : {0, 505, 1293}) {
      const std::vector<float> some = p.Run(backend, begin, begin + 7, 7);
      EXPECT_EQ(0, std::memcmp(some.data(), all.data() + begin * p.rows, some.size() * 4))
          << isa << " from row " << begin;
    }
  }
}

// A norm before and a gate after, as ops of their own or fused. Few rows and many, columns that fill no chunk, outputs
// that fill no tile.
TEST(MatMul, NormBeforeAndGateAfter) {
  for (const Target& isa : UsableTargets()) {
    for (const bool exact : {false, true}) {
      Backend& backend = BackendOf(isa, exact);
      const bool half = IsCuda(isa) && !exact;  // what the pass keeps between ops
      std::mt19937 random(37);
      for (const auto& [cols, width] : std::vector<std::pair<int64_t, int64_t>>{{64, 8}, {576, 40}, {576, 36}, {1000, 200}, {4096, 24}}) {
        const OwnedMatrix m = RandomMatrix(WeightType::kBF16, 2 * width, cols, random);
        const std::vector<double> w = Dequantise(m.view());
        auto weight = backend.PackWeight(std::vector<HostMatrix>{m.view()});
        ASSERT_TRUE(weight.ok());
        for (const int64_t tokens : {1, 2, 3, 7, 8, 9, 20}) {
          for (const auto& [norm, gate] : {std::pair{true, true}, std::pair{true, false}, std::pair{false, true}}) {
            std::vector<float> residual = RandomFloats(tokens * cols, random, 3), scale = RandomFloats(cols, random);
            std::vector<float> x = residual, product(static_cast<size_t>(2 * tokens * width)), gated(static_cast<size_t>(tokens * width));
            std::vector<uint16_t> narrow(x.size());
            for (size_t i = 0; i < x.size(); ++i) {
              narrow[i] = ToHalf(x[i]);
              x[i] = static_cast<float>(HalfValue(narrow[i]));
            }
            DeviceArrays arrays(backend);
            const auto matrix = [&](auto& data, DType type, int64_t n) {
              Tensor t = MakeTensor(data.data(), type, tokens, n);
              t.rank = 2;
              return t;
            };
            MatMulArgs args;
            args.weight = weight->get();
            args.x = half ? arrays.In(matrix(narrow, DType::kF16, cols)) : arrays.In(matrix(x, DType::kF32, cols));
            args.out = arrays.Out(matrix(product, DType::kF32, 2 * width));
            if (norm) {
              args.norm = {arrays.In(matrix(residual, DType::kF32, cols)), arrays.In(MakeTensor(scale.data(), DType::kF32, cols)), 1e-5f, args.x};
            }
            if (gate) args.gated = arrays.Out(matrix(gated, DType::kF32, width));
            const std::vector<float> before = x;  // which the norm may overwrite
            backend.MatMul(args, arrays.stream());
            arrays.Finish();
            for (int64_t t = 0; t < tokens; ++t) {
              std::vector<float> row(before.begin() + t * cols, before.begin() + (t + 1) * cols);
              if (norm) {
                const std::vector<double> normed = ReferenceRmsNorm(residual.data() + t * cols, scale.data(), 1e-5, cols);
                row.assign(normed.begin(), normed.end());
              }
              const double tolerance = half ? 1e-3 : 4e-6;
              for (int64_t r = 0; r < width; ++r) {
                const Dot up = ReferenceDot(w.data() + (width + r) * cols, row.data(), cols);
                const Dot first = ReferenceDot(w.data() + r * cols, row.data(), cols);
                const double silu = first.value / (1 + std::exp(-first.value));
                const double want = gate ? silu * up.value : first.value;
                const double error = gate ? 1.1 * first.magnitude * std::fabs(up.value) + up.magnitude * std::fabs(silu) +
                                                tolerance * first.magnitude * up.magnitude
                                          : first.magnitude;
                ASSERT_NEAR(gate ? gated[static_cast<size_t>(t * width + r)] : product[static_cast<size_t>(t * 2 * width + r)], want,
                            tolerance * error + 1e-6)
                    << isa << (exact ? " exact, " : ", ") << cols << " columns, width " << width << ", " << tokens << " tokens, norm "
                    << norm << ", gate " << gate << ", token " << t << ", output " << r;
              }
            }
          }
        }
      }
    }
  }
}

TEST(MatMul, StridedRowsAndExtremeActivations) {
  for (const Case& c : AllCases()) {
    SCOPED_TRACE(c.name());
    Backend& backend = BackendOf(c.isa, c.exact);
    std::mt19937 random(31);
    const OwnedMatrix m = RandomMatrix(c.type, 20, 64, random);
    const std::vector<double> w = Dequantise(m.view());
    auto weight = backend.PackWeight(std::vector<HostMatrix>{m.view()});
    ASSERT_TRUE(weight.ok());
    // Rows of zeros, of subnormal numbers, and of large ones with one far larger.
    const float large = IsCuda(c.isa) ? 1e3f : 1e6f;  // fp16 ends at 65,504
    std::vector<float> x(3 * 100, 0.5f * large), out(3 * 40, -1);
    for (int i = 0; i < 64; ++i) x[static_cast<size_t>(i)] = 0, x[static_cast<size_t>(100 + i)] = 1e-40f;
    x[207] = -30 * large;
    MatMulArgs args;
    args.weight = weight->get();
    args.x = MakeTensor(x.data(), DType::kF32, 3, 64);
    args.x.row_stride = 100;
    args.out = MakeTensor(out.data(), DType::kF32, 3, 20);
    args.out.row_stride = 40;
    for (const int prompt_rows : {0, 3}) {
      args.prompt_rows = prompt_rows;
      DeviceArrays arrays(backend);
      MatMulArgs there = args;
      there.x = arrays.In(args.x);
      there.out = arrays.Out(args.out);
      backend.MatMul(there, arrays.stream());
      arrays.Finish();
      for (int r = 0; r < 20; ++r) {
        const size_t row = static_cast<size_t>(r);
        EXPECT_EQ(out[row], 0) << "row " << r;
        EXPECT_NEAR(out[40 + row], 0, 1e-36) << "row " << r;
        // The largest value sets the grid of its block of 32: an error of 3e7 / 65,024 per term at most.
        const Dot dot = ReferenceDot(w.data() + r * 64, x.data() + 200, 64);
        EXPECT_NEAR(out[80 + row], dot.value, (IsCuda(c.isa) ? 1e-3 : prompt_rows ? 1e-2 : 5e-4) * dot.magnitude) << "row " << r;
        EXPECT_EQ(out[20 + row], -1) << "written between rows";
      }
    }
  }
}

TEST(MatMul, RefusesWhatItCannotPack) {
  Backend& backend = BackendOf("portable", false, 1);
  const std::vector<float> data(4096);
  const auto pack = [&](std::vector<HostMatrix> parts) { return backend.PackWeight(parts).status(); };
  EXPECT_EQ(pack({}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(pack({{WeightType::kQ4_1, 16, 33, data.data()}}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(pack({{WeightType::kF32, 0, 32, data.data()}}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(pack({{WeightType::kF32, 1, 32, nullptr}}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(pack({{WeightType::kF32, 1, 32, data.data()}, {WeightType::kF32, 1, 16, data.data()}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_NE(pack({{WeightType::kQ8_0, 2, 48, data.data()}}).ToString().find("48"), std::string::npos);
}

TEST(MatMul, RefusesWeightsThatTheGpuWouldMakeInfinite) {
  for (const Target& target : UsableTargets()) {
    if (!IsCuda(target)) continue;
    std::vector<float> data(64, 65504.f);
    const std::vector<HostMatrix> parts{{WeightType::kF32, 2, 32, data.data()}};
    EXPECT_TRUE(BackendOf(target).PackWeight(parts).ok());
    data[40] = -70000.f;
    const absl::Status refused = BackendOf(target).PackWeight(parts).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(refused.ToString().find("70000"), std::string::npos) << refused;
    EXPECT_TRUE(BackendOf(target, true).PackWeight(parts).ok()) << "exact mode keeps f32";
  }
}

}  // namespace
}  // namespace loupe::testing
