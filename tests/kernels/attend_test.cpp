// Attention against the double-precision oracle, and its promises: bits do not depend on threads, other rows or the
// chunking of a prompt.
//
// Error bounds, relative to sum p |v| of the output's element. f32 arithmetic: 1e-5 (sums of a few hundred exponentials,
// each rounding 6e-8; the exponential adds 3e-7) and 2^-23 of the largest sum |q k|, to which a dot product's rounding is
// relative; that part only shows in the cases with very large logits. bf16 path: values and exponentials
// are rounded to bf16 (relative 2^-9 each), so is each factor of a logit, which moves the logit by at most 2^-8 of
// sum |q k|; a logit error d changes a probability by a factor of at most e^(2d). On the GPU rows of both phases take
// such a path in fp16, with 2^-11 in place of 2^-8.
#include "tests/kernels/attend_reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

namespace loupe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const int kCounts[] = {0, 1, 15, 16, 17, 63, 64, 65, 127, 300};

std::vector<Expected> OracleOfAllRows(const AttendCase& c) {
  std::vector<Expected> all;
  for (const TestRow& row : c.rows) all.push_back(c.Oracle(row));
  return all;
}

// Checks all rows, prompt rows by the bound of the bf16 path if not exact.
void ExpectOracle(const AttendCase& c, const std::vector<Expected>& oracle, const AttendCase::Result& result, bool exact) {
  const int width = c.heads * c.groups * c.dim;
  for (size_t r = 0; r < c.rows.size(); ++r) {
    const Expected& expected = oracle[r];
    for (int i = 0; i < width; ++i) {
      const auto at = static_cast<size_t>(i);
      const double span = expected.logit_span[static_cast<size_t>(i / c.dim)];
      const bool gpu = IsCuda(c.arena.target()), rounded = !exact && (c.rows[r].prompt || gpu);
      const double unit = !rounded ? 0 : gpu ? 0x1p-11 : 0x1p-8;
      const double bound = unit + std::expm1(2 * unit * span) + 1e-5 + 0x1p-23 * span;
      const double got = static_cast<double>(result.out[r * static_cast<size_t>(width) + at]);
      ASSERT_NEAR(got, expected.out[at], bound * expected.scale[at] + 1e-30)
          << "row " << r << (c.rows[r].prompt ? " (prompt)" : " (decode)") << ", head " << i / c.dim << ", dim " << i % c.dim;
    }
  }
}

// Random lists, and rows of both phases with random windows over them.
void FillAtRandom(AttendCase& c, int sequences, bool log_weights, int prompt_rows = 40, bool mixed_formats = true) {
  c.mixed_formats = c.Below(2) == 0 && mixed_formats;
  for (int i = 0; i < sequences * c.groups; ++i) {
    c.lists.push_back(c.RandomList(kCounts[c.Below(10)], c.Below(2) == 0, log_weights, i % c.groups));
  }
  for (const bool prompt : {true, false}) {
    for (int s = 0; s < sequences; ++s) {
      const int n = prompt ? c.Below(prompt_rows + 1) : 1 + c.Below(2);
      for (int i = 0; i < n; ++i) {
        TestRow& row = c.AddRow(s, prompt);
        for (size_t g = 0; g < row.end.size(); ++g) {
          const int count = row.end[g];
          row.end[g] = std::max(0, count - (n - 1 - i));
          if (c.Below(3) == 0) row.begin[g] = c.Below(count + 1);
        }
      }
    }
  }
}

struct Shape {
  Target target;
  int heads, dim;
};
class AttendShapes : public ::testing::TestWithParam<Shape> {};

std::vector<Shape> AllShapes() {
  std::vector<Shape> shapes;
  for (const Target& target : testing::UsableTargets()) {
    for (const int dim : {64, 128, 80}) {
      for (const int heads : {1, 3, 4, 5, 7, 8}) shapes.push_back({target, heads, dim});
    }
    shapes.push_back({target, 16, 64});
    shapes.push_back({target, 2, 8});
    shapes.push_back({target, 16, 72});
    shapes.push_back({target, 2, 256});
  }
  return shapes;
}

TEST_P(AttendShapes, RandomRaggedListsEqualTheOracle) {
  const Shape shape = GetParam();
  for (const uint64_t seed : {1, 2, 3}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    AttendCase c(shape.target, shape.dim, shape.heads, 2, seed + static_cast<uint64_t>(shape.heads * 1000 + shape.dim));
    c.scale = seed == 2 ? 1.f : 1 / std::sqrt(static_cast<float>(shape.dim));
    // The GPU's fast kernels read dense pages; f32 ones are for its exact mode (seed 3).
    const bool mixed = !IsCuda(shape.target) || seed == 3;
    FillAtRandom(c, 2, seed % 2 == 0, 14, mixed);
    if (seed >= 2) c.sinks = c.Normals(c.heads * c.groups);
    if (seed >= 2) {
      c.mixed_formats = c.mixed_formats && mixed;
      for (size_t i = 0; i < c.lists.size(); ++i) c.extra.push_back(c.RandomList(kCounts[c.Below(10)], true, true));
    }
    const std::vector<Expected> oracle = OracleOfAllRows(c);
    ExpectOracle(c, oracle, c.Attend(2, true), true);
    if (!IsCuda(shape.target) || !c.mixed_formats) ExpectOracle(c, oracle, c.Attend(2, false), false);
  }
}

INSTANTIATE_TEST_SUITE_P(All, AttendShapes, ::testing::ValuesIn(AllShapes()), [](const auto& i) {
  return i.param.target + "_R" +
         std::to_string(i.param.heads) + "_D" + std::to_string(i.param.dim);
});

TEST(Cuda, IsThere) {
  if (!testing::BuiltWithCuda()) GTEST_SKIP() << "this build has no CUDA backend";
  const auto backend = testing::TryBackend("cuda", false, 1);
  if (!backend.ok()) GTEST_SKIP() << "the GPU's instances are left out: " << backend.status().ToString();
}

TEST(Attend, SeeingNothingGivesZeros) {
  for (const Target& target : testing::UsableTargets()) {
    for (const bool sink : {false, true}) {
      AttendCase c(target, 64, 3, 1, 5);
      if (sink) c.sinks = {0.f, -kInfinity, 3.f};
      c.lists.push_back(c.RandomList(100, false, false));
      c.lists.push_back(TestList{});
      c.lists.emplace_back();
      TestEntry removed{c.Normals(64), c.Normals(64), -kInfinity, {}, {}};
      c.AddPage(&c.lists.back(), {{}, true, true}, {removed, removed});
      for (const bool prompt : {true, false}) {
        c.AddRow(0, prompt).end = {0};
        c.AddRow(0, prompt).begin = {100};
        c.AddRow(1, prompt);
        c.AddRow(2, prompt);
      }
      for (const bool exact : {true, false}) {
        for (const float x : c.Attend(2, exact).out) ASSERT_EQ(x, 0.f) << target << " sink " << sink;
      }
    }
  }
}

TEST(Attend, ZeroLogitsAreNotPadding) {
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, 64, 2, 1, 6);
    c.lists.resize(1);
    std::vector<TestEntry> entries;
    for (int i = 0; i < 17; ++i) entries.push_back({std::vector<float>(64, 0.f), std::vector<float>(64, static_cast<float>(i)), 0, {}, {}});
    c.AddPage(&c.lists[0], {}, entries);
    c.AddRow(0, true);
    c.AddRow(0, false);
    for (const float x : c.Attend(1, false).out) ASSERT_NEAR(x, 8.f, 8 * 0x1p-8) << target;
    for (const float x : c.Attend(1, true).out) ASSERT_NEAR(x, 8.f, 1e-5) << target;
  }
}

TEST(Attend, LogWeightEqualsCopies) {
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, 64, 3, 1, 7);
    const TestEntry once{c.Normals(64), c.Normals(64), 0, {}, {}}, other{c.Normals(64), c.Normals(64), 0, {}, {}};
    TestEntry heavy = once;
    heavy.beta = std::log(20.f);
    c.lists.resize(2);
    c.AddPage(&c.lists[0], {{}, true, true}, {other, heavy});
    std::vector<TestEntry> copies(20, once);
    copies.push_back(other);
    c.AddPage(&c.lists[1], {}, copies);
    for (const bool prompt : {true, false}) {
      const std::vector<float> q = c.AddRow(0, prompt).q;
      c.AddRow(1, prompt).q = q;
    }
    const std::vector<float> out = c.Attend(1, true).out;
    for (size_t i = 0; i < 192; ++i) {
      ASSERT_NEAR(out[i], out[i + 192], 1e-5) << target;
      ASSERT_NEAR(out[i + 384], out[i + 576], 1e-5) << target;
    }
  }
}

TEST(Attend, AZeroLogWeightChangesNoBit) {
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, 64, 3, 1, 8);
    std::vector<TestEntry> entries;
    for (int i = 0; i < 64; ++i) entries.push_back({c.Normals(64), c.Normals(64), 0, {}, {}});
    c.lists.resize(2);
    c.AddPage(&c.lists[0], {{}, false, false}, entries);
    c.AddPage(&c.lists[1], {{}, false, true}, entries);
    for (const bool prompt : {true, false}) {
      const std::vector<float> q = c.AddRow(0, prompt).q;
      c.AddRow(1, prompt).q = q;
    }
    const std::vector<float> out = c.Attend(1, false).out;
    EXPECT_EQ(std::memcmp(out.data(), out.data() + 192, 768), 0) << target;
    EXPECT_EQ(std::memcmp(out.data() + 384, out.data() + 576, 768), 0) << target;
  }
}

TEST(Attend, BitsDoNotDependOnThreadsOrOtherRows) {
  for (const Target& target : testing::UsableTargets(/*bit_equal=*/true)) {
    for (const uint64_t seed : {11, 12, 13}) {
      SCOPED_TRACE(target + " seed " + std::to_string(seed));
      AttendCase c(target, seed == 11 ? 128 : 64, 3, 2, seed);
      FillAtRandom(c, 4, true, 40, !IsCuda(target));
      c.sinks = c.Normals(6);
      for (size_t i = 0; i < c.lists.size(); ++i) c.extra.push_back(c.RandomList(c.Below(200), true, true));
      const std::vector<float> all = c.Attend(1, false).out;
      for (const int threads : {2, 3}) {
        EXPECT_EQ(std::memcmp(all.data(), c.Attend(threads, false).out.data(), all.size() * 4), 0) << threads << " threads";
      }
      const std::vector<TestRow> rows = c.rows;
      const size_t width = all.size() / rows.size();
      for (size_t r = 0; r < rows.size(); ++r) {
        c.rows = {rows[r]};
        ASSERT_EQ(std::memcmp(all.data() + r * width, c.Attend(2, false).out.data(), width * 4), 0) << "row " << r;
      }
    }
  }
}

TEST(Attend, MoreUnitsThanAreInFlightAtOnce) {
  const Target target = testing::UsableTargets(/*bit_equal=*/true).back();
  AttendCase c(target, IsCuda(target) ? 64 : 8, 1, 2, 14);
  for (int i = 0; i < 2; ++i) {
    c.lists.emplace_back();
    for (int page = 0; page < 13; ++page) c.AddPage(&c.lists.back(), {{}, true, false}, 1 + c.Below(3));
  }
  for (int i = 0; i < 1200; ++i) c.AddRow(0, false);  // 9,600 units
  const std::vector<float> all = c.Attend(2, false).out;
  const std::vector<TestRow> rows = c.rows;
  for (size_t r = 0; r < rows.size(); r += 37) {
    c.rows = {rows[r]};
    const auto width = static_cast<size_t>(2 * c.dim);
    ASSERT_EQ(std::memcmp(all.data() + r * width, c.Attend(1, false).out.data(), width * 4), 0) << "row " << r;
  }
}

// The rows of a prompt of 150 tokens, computed in chunks; each chunk is appended just before.
std::vector<float> PromptInChunks(const Target& target, bool exact, int chunk, int window) {
  constexpr int kTokens = 150;
  AttendCase source(target, 64, 3, 1, 15), c(target, 64, 3, 1, 16);
  std::vector<TestEntry> entries;
  std::vector<std::vector<float>> queries;
  for (int i = 0; i < kTokens; ++i) {
    entries.push_back({source.Normals(64), source.Normals(64), 0, {}, {}});
    queries.push_back(source.Normals(192));
  }
  c.sinks = {0.5f, -1.f, 2.f};
  c.lists.resize(1);
  std::vector<float> out;
  for (int from = 0; from < kTokens; from += chunk) {
    const int to = std::min(kTokens, from + chunk);
    c.rows.clear();
    for (int i = from; i < to; ++i) {
      if (i % kPageEntries == 0) c.AddPage(&c.lists[0], {}, 0);
      c.Append(&c.lists[0], entries[static_cast<size_t>(i)]);
    }
    for (int i = from; i < to; ++i) {
      TestRow& row = c.AddRow(0, true);
      row.q = queries[static_cast<size_t>(i)];
      row.begin = {std::max(0, i + 1 - window)};
      row.end = {i + 1};
    }
    const std::vector<float> part = c.Attend(2, exact).out;
    out.insert(out.end(), part.begin(), part.end());
  }
  return out;
}

TEST(Attend, BitsDoNotDependOnTheChunkingOfAPrompt) {
  for (const Target& target : testing::UsableTargets()) {
    for (const bool exact : {true, false}) {
      for (const int window : {1000, 40}) {
        const std::vector<float> all = PromptInChunks(target, exact, 150, window);
        for (const int chunk : {1, 7, 64}) {
          const std::vector<float> chunked = PromptInChunks(target, exact, chunk, window);
          ASSERT_EQ(all.size(), chunked.size());
          EXPECT_EQ(std::memcmp(all.data(), chunked.data(), all.size() * 4), 0)
              << target << " exact " << exact << " chunk " << chunk << " window " << window;
        }
      }
    }
  }
}

TEST(Attend, ProbabilitiesOfPagesAndEntries) {
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, 64, 3, 2, 17);
    for (const int count : {300, 1, 65, 17, 127, 700}) c.lists.push_back(c.RandomList(count, true, true));
    c.sinks = c.Normals(6);
    for (size_t i = 0; i < c.lists.size(); ++i) c.extra.push_back(c.RandomList(20, false, true));
    c.AddRow(2, true);
    for (int s = 0; s < 3; ++s) c.AddRow(s, false);
    c.rows[1].begin = {70, 0}, c.rows[1].end = {140, 1}, c.rows[3].begin = {0, 400};
    const AttendCase::Result result = c.Attend(2, false, true);
    EXPECT_EQ(result.out, c.Attend(2, false).out) << "asking must not change the output";
    size_t page = 0;
    for (int list = 0; list < 6; ++list) {
      const TestRow& row = c.rows[static_cast<size_t>(1 + list / 2)];
      std::vector<std::vector<double>> p;
      for (int h = 0; h < 3; ++h) p.push_back(c.Probabilities(row, list % 2, h));
      size_t entry = 0;
      for (const PageRef& ref : c.lists[static_cast<size_t>(list)].pages) {
        for (size_t h = 0; h < 3; ++h) {
          double mass = 0;
          for (size_t e = 0; e < kPageEntries; ++e) {
            const double expected = e < ref.count ? p[h][entry + e] : 0;
            mass += expected;
            const double slack = IsCuda(target) ? 0.01 * expected : 0;  // queries are rounded to fp16 there
            ASSERT_NEAR(result.probability[(page * kPageEntries + e) * 3 + h], expected, 1e-5 + slack) << "list " << list << " entry " << e;
          }
          ASSERT_NEAR(result.mass[page * 3 + h], mass, 1e-5 + (IsCuda(target) ? 0.01 * mass : 0)) << "list " << list << " page " << page;
        }
        entry += ref.count, ++page;
      }
    }
  }
}

TEST(Attend, ASequenceWithSeveralDecodeRowsGetsNoProbabilities) {
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, 64, 1, 1, 18);
    c.lists.push_back(c.RandomList(64, false, false));
    c.AddRow(0, false);
    c.AddRow(0, false);
    for (const float x : c.Attend(2, false, true).mass) EXPECT_EQ(x, -1.f) << target;
  }
}

}  // namespace
}  // namespace loupe
