// Pages of spherical codes: the same codes on every backend as in plain loops, moved between formats, attended to beside
// dense ones.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "tests/kernels/attend_reference.h"

namespace loupe {
namespace {

using testing::DecodeSpherical;
using testing::EncodeSpherical;
using testing::SphericalCode;

constexpr Codec kCoded[] = {Codec::kS8, Codec::kS4, Codec::kS3, Codec::kS2};
constexpr PageFormat kF32 = {Codec::kF32, Codec::kF32};

PageRef At(PageRef page, int slot) {
  page.count = static_cast<uint16_t>(slot);
  return page;
}

// Moves entries; returns the faults.
int Transcode(AttendCase& c, const std::vector<EntryTranscode>& moves) {
  DeviceArrays arrays(c.arena.backend());
  std::vector<float> means;
  for (const auto& mean : c.mean_keys) means.insert(means.end(), mean.begin(), mean.end());
  int32_t faults = 0;
  TranscodeEntriesArgs args;
  args.entries = moves.data();
  args.num_entries = static_cast<int64_t>(moves.size());
  args.head_dim = c.dim;
  args.arena = c.arena.data();
  if (!means.empty()) args.mean_keys = arrays.In(MakeTensor(means.data(), DType::kF32, c.groups, c.dim));
  args.faults = arrays.Out(MakeTensor(&faults, DType::kI32, 1));
  c.arena.backend().TranscodeEntries(args, arrays.stream());
  arrays.Finish();
  return faults;
}

// What the slots of a list's last page hold, as floats, by way of an f32 page.
struct Floats {
  std::vector<std::vector<float>> k, v;
};
Floats Read(AttendCase& c, const PageRef& page, int g) {
  const PageRef plain = c.arena.NewPage({kF32, page.small != 0, false}, c.dim);
  std::vector<EntryTranscode> moves;
  for (int slot = 0; slot < page.count; ++slot) moves.push_back({At(page, slot), At(plain, slot), g});
  EXPECT_EQ(Transcode(c, moves), 0);
  const PageLayout layout = MakePageLayout(plain.page_class(), c.dim);
  const std::vector<uint8_t> bytes = c.arena.Read(plain, 0, layout.bytes);
  Floats out;
  for (int slot = 0; slot < page.count; ++slot) {
    out.k.emplace_back(static_cast<size_t>(c.dim)), out.v.emplace_back(static_cast<size_t>(c.dim));
    for (int d = 0; d < c.dim; ++d) {
      const auto at = [&](bool key) { return 4 * testing::ElementIndex(c.arena.target(), plain.page_class(), key, slot, d, c.dim); };
      std::memcpy(&out.k.back()[static_cast<size_t>(d)], bytes.data() + at(true), 4);
      std::memcpy(&out.v.back()[static_cast<size_t>(d)], bytes.data() + layout.value_offset + at(false), 4);
    }
  }
  return out;
}

// Scales are laid out alike everywhere, so their bits can be compared; a wrong code would be off by a level or more.
void ExpectCodes(AttendCase& c, const PageRef& page, const std::vector<TestEntry>& entries, int g) {
  const PageClass page_class = page.page_class();
  const PageLayout layout = MakePageLayout(page_class, c.dim);
  const Floats got = Read(c, page, g);
  for (const bool key : {true, false}) {
    const Codec codec = key ? page_class.format.key : page_class.format.value;
    const int64_t offset = key ? layout.key_scale_offset : layout.value_scale_offset;
    std::vector<uint16_t> scales(entries.size());
    if (IsCoded(codec)) {
      const std::vector<uint8_t> bytes = c.arena.Read(page, offset, 2 * static_cast<int64_t>(entries.size()));
      std::memcpy(scales.data(), bytes.data(), bytes.size());
    }
    for (size_t e = 0; e < entries.size(); ++e) {
      const std::vector<float>& x = key ? entries[e].k : entries[e].v;
      const std::vector<float> mean = key ? c.MeanOf(g) : std::vector<float>{};
      const std::vector<double> expected = AttendCase::Stored(x, codec, mean);
      double size = 1e-6;
      for (const double y : expected) size = std::max(size, std::abs(y));
      for (const float y : mean) size = std::max(size, static_cast<double>(std::abs(y)));
      if (IsCoded(codec)) ASSERT_EQ(scales[e], EncodeSpherical(x, mean, codec).scale) << "entry " << e << (key ? " key" : " value");
      for (size_t d = 0; d < expected.size(); ++d) {
        const double y = static_cast<double>((key ? got.k : got.v)[e][d]);
        ASSERT_NEAR(y, expected[d], 2e-6 * size) << "entry " << e << (key ? " key" : " value") << ", dimension " << d;
      }
    }
  }
}

std::vector<TestEntry> RandomEntries(AttendCase& c, int n) {
  std::vector<TestEntry> entries;
  for (int i = 0; i < n; ++i) {
    TestEntry entry{c.Normals(c.dim), c.Normals(c.dim), 0, {}, {}};
    const float scale = std::exp2(static_cast<float>(c.Below(24) - 12));
    for (float& x : entry.k) x *= scale;
    if (c.Below(8) == 0) std::fill(entry.v.begin(), entry.v.end(), 0.f);
    entries.push_back(entry);
  }
  return entries;
}

// Where stores go when an entry is coded: to its own codes and scales. Nothing as long as a dense key is written anywhere, and
// neighbours keep their bits even where they share a byte.
TEST(Spherical, CodingAnEntryStoresItsCodesAndNothingElse) {
  constexpr int64_t kWatched = 1 << 18;
  for (const Target& target : testing::UsableTargets()) {
    for (const int dim : {64, 128}) {
      for (const PageFormat& format : {PageFormat{Codec::kS8, Codec::kS8}, PageFormat{Codec::kS4, Codec::kS2}, PageFormat{Codec::kS3, Codec::kS3}}) {
        SCOPED_TRACE(target + " D " + std::to_string(dim) + " bits " + std::to_string(CodecBits(format.key)));
        AttendCase c(target, dim, 1, 1, 77);
        const PageClass page_class = {format, false, false};
        TestList before, list, behind;
        c.AddPage(&before, page_class, RandomEntries(c, 64));
        c.AddPage(&list, page_class, RandomEntries(c, 20));
        c.AddPage(&behind, page_class, RandomEntries(c, 64));
        const int64_t begin = int64_t{list.pages[0].unit - before.pages[0].unit} * kPageAlignment;
        const int64_t end = begin + MakePageLayout(page_class, dim).bytes;
        for (int e = 0; e < 20; ++e) {
          const std::vector<uint8_t> was = c.arena.Read(before.pages[0], 0, kWatched);
          c.Append(&list, RandomEntries(c, 1));
          const std::vector<uint8_t> is = c.arena.Read(before.pages[0], 0, kWatched);
          int64_t changed = 0;
          for (int64_t at = 0; at < kWatched; ++at) {
            if (was[static_cast<size_t>(at)] == is[static_cast<size_t>(at)]) continue;
            ++changed;
            ASSERT_TRUE(at >= begin && at < end) << "a store outside the page, " << at - begin << " bytes from its begin";
          }
          // s3 keeps signs apart, where a byte holds those of neighbours.
          const int64_t shared = format.key == Codec::kS3 ? dim : 0;
          EXPECT_LE(changed, PlaneBytes(format.key, dim) + PlaneBytes(format.value, dim) + 4 + shared);
          EXPECT_LT(changed, 4 * dim) << "as long as a dense entry";
          EXPECT_GT(changed, 0);
        }
        ExpectCodes(c, list.pages[0], list.entries, 0);
      }
    }
  }
}

// Appended at once, in pieces that end anywhere, or transcoded from f32: the same bits, in every slot of every class.
TEST(Spherical, CodesEqualPlainLoops) {
  for (const Target& target : testing::UsableTargets()) {
    for (const int dim : {64, 128, 192, 256}) {
      for (const Codec codec : kCoded) {
        SCOPED_TRACE(target + " D " + std::to_string(dim) + " bits " + std::to_string(CodecBits(codec)));
        AttendCase c(target, dim, 1, 1, static_cast<uint64_t>(dim) + static_cast<uint64_t>(codec));
        if (codec != Codec::kS3) c.mean_keys = {c.Normals(dim)};
        for (const bool small : {false, true}) {
          const int room = small ? 16 : 64;
          const std::vector<TestEntry> entries = RandomEntries(c, room);
          const PageClass page_class = {{codec, codec}, small, false};
          TestList once, pieces, plain;
          c.AddPage(&once, page_class, entries);
          ExpectCodes(c, once.pages[0], entries, 0);
          c.AddPage(&pieces, page_class, 0);
          for (size_t from = 0, n = 1; from < entries.size(); from += n, n = std::min<size_t>(n * 2 + 1, entries.size() - from)) {
            c.Append(&pieces, {entries.begin() + static_cast<std::ptrdiff_t>(from), entries.begin() + static_cast<std::ptrdiff_t>(from + n)});
          }
          ExpectCodes(c, pieces.pages[0], entries, 0);
          c.AddPage(&plain, {kF32, small, false}, entries);
          const PageRef target_page = c.arena.NewPage(page_class, dim);
          std::vector<EntryTranscode> moves;
          for (int e = 0; e < room; ++e) moves.push_back({At(plain.pages[0], e), At(target_page, e), 0});
          EXPECT_EQ(Transcode(c, moves), 0);
          ExpectCodes(c, At(target_page, room), entries, 0);
        }
      }
    }
  }
}

TEST(Spherical, KeysAndValuesInDifferentFormats) {
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, 64, 1, 1, 7, int64_t{32} << 20);
    c.mean_keys = {c.Normals(64)};
    for (int key = 0; key < kNumCodecs; ++key) {
      for (int value = 0; value < kNumCodecs; ++value) {
        SCOPED_TRACE(target + " " + std::to_string(key) + "/" + std::to_string(value));
        TestList list;
        const std::vector<TestEntry> entries = RandomEntries(c, 21);
        c.AddPage(&list, {{static_cast<Codec>(key), static_cast<Codec>(value)}, false, true}, entries);
        if (key == 0 || value == 0) continue;  // half precision of large keys is the subject of the append tests
        ExpectCodes(c, list.pages[0], entries, 0);
      }
    }
  }
}

double Cosine(const std::vector<double>& x, const std::vector<float>& y) {
  double xy = 0, xx = 0, yy = 0;
  for (size_t i = 0; i < x.size(); ++i) xy += x[i] * static_cast<double>(y[i]), xx += x[i] * x[i], yy += static_cast<double>(y[i]) * static_cast<double>(y[i]);
  return xy / std::sqrt(xx * yy);
}
double Norm(const std::vector<double>& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }

// Cosines of isotropic keys against the table of scalar quantisation of N(0, 1) less 0.002; lengths are kept.
TEST(Spherical, DirectionsAndLengths) {
  const double floors[] = {.9999, .9954 - .002, .983 - .002, .940 - .002};
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 4; ++i) {
    double sum = 0;
    for (int n = 0; n < 500; ++n) {
      std::vector<float> x(128);
      for (float& y : x) y = normal(random);
      const std::vector<double> stored = DecodeSpherical(EncodeSpherical(x, {}, kCoded[i]), {});
      sum += Cosine(stored, x);
      ASSERT_NEAR(Norm(stored) / Norm({x.begin(), x.end()}), 1, 0x1p-10);
    }
    EXPECT_GE(sum / 500, floors[i]) << CodecBits(kCoded[i]) << " bits";
  }
}

TEST(Spherical, LevelsAreThoseOfLloydAndMax) {
  const std::vector<std::vector<double>> tables = {{.12840, .38805, .65676, .94234, 1.25623, 1.61805, 2.06902, 2.73259},
                                                   {.24509, .75601, 1.34391, 2.15195},
                                                   {.45278, 1.51042}};
  for (int i = 0; i < 3; ++i) {
    const spherical::Levels levels = spherical::LevelsOf(kCoded[i + 1]);
    ASSERT_EQ(levels.count, static_cast<int>(tables[static_cast<size_t>(i)].size()));
    for (int code = 0; code < 2 * levels.count; ++code) {
      const double level = spherical::TwiceLevel(levels, code) * 0.5 * static_cast<double>(levels.step);
      const double expected = tables[static_cast<size_t>(i)][static_cast<size_t>(code % levels.count)];
      EXPECT_NEAR(level, code < levels.count ? expected : -expected, .04) << levels.bits << " bits, code " << code;
    }
  }
}

TEST(Spherical, TheTurnIsItsOwnInverseAndKeepsProducts) {
  std::mt19937_64 random(4);
  std::normal_distribution<double> normal;
  for (const int dim : {64, 128, 192, 256}) {
    std::vector<double> x(static_cast<size_t>(dim)), y(x);
    for (double& z : x) z = normal(random);
    for (double& z : y) z = normal(random);
    const double before = std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
    std::vector<double> turned_x = x, turned_y = y;
    testing::Hadamard(turned_x), testing::Hadamard(turned_y);
    const double n = spherical::TurnBlock(dim);
    EXPECT_NEAR(std::inner_product(turned_x.begin(), turned_x.end(), turned_y.begin(), 0.0) / n, before, 1e-9);
    testing::Hadamard(turned_x);
    for (size_t d = 0; d < x.size(); ++d) EXPECT_NEAR(turned_x[d] / n, x[d], 1e-9);
    EXPECT_NEAR(static_cast<double>(spherical::TurnScale(static_cast<int>(n))), 1 / std::sqrt(n), 1e-8);
  }
}

// 8 bits to 4 costs next to nothing beyond coding at 4 bits at once.
TEST(Spherical, EightBitsToFour) {
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, 128, 1, 1, 9);
    TestList list;
    std::vector<TestEntry> entries;
    for (int i = 0; i < 64; ++i) entries.push_back({c.Normals(128), c.Normals(128), 0, {}, {}});
    c.AddPage(&list, {{Codec::kS8, Codec::kS8}, false, false}, entries);
    const PageRef four = c.arena.NewPage({{Codec::kS4, Codec::kS4}, false, false}, 128);
    std::vector<EntryTranscode> moves;
    for (int e = 0; e < 64; ++e) moves.push_back({At(list.pages[0], e), At(four, e), 0});
    EXPECT_EQ(Transcode(c, moves), 0);
    const Floats got = Read(c, At(four, 64), 0);
    double key = 0, value = 0;
    for (size_t e = 0; e < 64; ++e) {
      key += Cosine({got.k[e].begin(), got.k[e].end()}, entries[e].k) / 64;
      value += Cosine({got.v[e].begin(), got.v[e].end()}, entries[e].v) / 64;
    }
    EXPECT_GE(key, .995) << target;
    EXPECT_GE(value, .995) << target;
  }
}

TEST(Spherical, WhatIsNotFiniteIsCountedAndStaysVisible) {
  for (const Target& target : testing::UsableTargets()) {
    for (const Codec codec : kCoded) {
      AttendCase c(target, 64, 1, 1, 10);
      TestList list;
      std::vector<TestEntry> entries = RandomEntries(c, 40);
      entries[3].k[5] = std::nanf("");
      entries[17].v[63] = std::numeric_limits<float>::infinity();
      entries[39].k[0] = 3e38f, entries[39].k[1] = 3e38f;  // its length overflows
      c.AddPage(&list, {kF32, false, false}, entries);
      const PageRef coded = c.arena.NewPage({{codec, codec}, false, false}, 64);
      std::vector<EntryTranscode> moves;
      for (int e = 0; e < 40; ++e) moves.push_back({At(list.pages[0], e), At(coded, e), 0});
      EXPECT_EQ(Transcode(c, moves), 3) << target;
      const Floats got = Read(c, At(coded, 40), 0);
      for (size_t e = 0; e < 40; ++e) {
        EXPECT_EQ(std::isnan(got.k[e][9]), e == 3 || e == 39) << target << " entry " << e;
        EXPECT_EQ(std::isnan(got.v[e][9]), e == 17) << target << " entry " << e;
      }
    }
  }
}

TEST(Spherical, AKeyAtTheMeanHasNoLength) {
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, 64, 1, 1, 11);
    c.mean_keys = {c.Normals(64)};
    TestList list;
    std::vector<TestEntry> entries = {{c.mean_keys[0], std::vector<float>(64, 0.f), 0, {}, {}}};
    c.AddPage(&list, {{Codec::kS4, Codec::kS2}, false, false}, entries);
    const Floats got = Read(c, list.pages[0], 0);
    EXPECT_EQ(got.k[0], c.mean_keys[0]) << target;
    for (const float x : got.v[0]) EXPECT_EQ(x, 0.f) << target;
  }
}

// Lists of pages of all formats, in both phases, against the softmax in double precision over what the codes stand for.
class CodedShapes : public ::testing::TestWithParam<std::tuple<Target, int, int>> {};

TEST_P(CodedShapes, MixedPagesEqualTheOracle) {
  const auto& [target, heads, dim] = GetParam();
  for (const uint64_t seed : {1, 2, 3, 4}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    AttendCase c(target, dim, heads, 2, seed * 100 + static_cast<uint64_t>(heads * 1000 + dim), int64_t{dim} * (160 << 10));
    c.coded = c.mixed_formats = true;
    c.scale = 1 / std::sqrt(static_cast<float>(dim));
    if (seed != 2) c.mean_keys = {c.Normals(dim), c.Normals(dim)};
    const int counts[] = {0, 1, 16, 17, 63, 64, 65, 300, 700};
    for (int i = 0; i < 4; ++i) c.lists.push_back(c.RandomList(counts[c.Below(9)], seed % 2 == 0, seed >= 3, i % 2));
    if (seed >= 3) {
      c.sinks = c.Normals(heads * 2);
      for (int i = 0; i < 4; ++i) c.extra.push_back(c.RandomList(c.Below(80), true, true, i % 2));
    }
    for (const bool prompt : {true, false}) {
      for (int s = 0; s < 2; ++s) {
        for (int i = 0; i < (prompt ? 5 : 1); ++i) {
          TestRow& row = c.AddRow(s, prompt);
          for (size_t g = 0; g < 2 && prompt; ++g) row.end[g] = std::max(0, row.end[g] - (4 - i));
        }
      }
    }
    const AttendCase::Result exact = c.Attend(2, true), fast = c.Attend(2, false);
    for (size_t r = 0; r < c.rows.size(); ++r) {
      const Expected expected = c.Oracle(c.rows[r]);
      const size_t width = expected.out.size();
      for (size_t i = 0; i < width; ++i) {
        const double span = expected.logit_span[i / static_cast<size_t>(dim)];
        // What is rounded is turned, so errors are those of the head's mean coordinate.
        const auto head = expected.scale.begin() + static_cast<std::ptrdiff_t>(i / static_cast<size_t>(dim)) * dim;
        const double size = std::max(expected.scale[i], Norm({head, head + dim}) / std::sqrt(static_cast<double>(dim)));
        const auto check = [&](const AttendCase::Result& result, double unit) {
          const double got = static_cast<double>(result.out[r * width + i]);
          ASSERT_NEAR(got, expected.out[i], (2 * unit + std::expm1(2 * unit * span) + 2e-5 + 0x1p-22 * span) * size + 1e-30)
              << "row " << r << (c.rows[r].prompt ? " (prompt)" : " (decode)") << " number " << i;
        };
        const bool rounds = c.rows[r].prompt || IsCuda(target);
        check(exact, target == "avx512" ? 0x1p-14 : 0);  // whose queries and weights have 16 bits
        check(fast, rounds ? 0x1p-8 : 0x1p-14);
      }
    }
    // The outcome does not depend on threads, nor on who asks for what each page weighs.
    if (!IsCuda(target)) EXPECT_EQ(fast.out, c.Attend(1, false).out);
    const AttendCase::Result asked = c.Attend(2, false, true);
    EXPECT_EQ(fast.out, asked.out);
    size_t page = 0;
    for (int list = 0; list < 4; ++list) {
      const TestRow& row = c.rows[10 + static_cast<size_t>(list / 2)];
      const TestList& of = c.lists[static_cast<size_t>(list)];
      for (int h = 0; h < heads; ++h) {
        const std::vector<double> expected = c.Probabilities(row, list % 2, h);
        for (size_t e = 0; e < of.entries.size(); ++e) {
          const size_t at = (page * kPageEntries + static_cast<size_t>(of.numbers[e])) * static_cast<size_t>(heads);
          ASSERT_NEAR(static_cast<double>(asked.probability[at + static_cast<size_t>(h)]), expected[e], 4e-3 * expected[e] + 1e-4);
        }
      }
      page += of.pages.size();
    }
  }
}

std::vector<std::tuple<Target, int, int>> Shapes() {
  std::vector<std::tuple<Target, int, int>> shapes;
  for (const Target& target : testing::UsableTargets()) {
    for (const int dim : {64, 128, 256}) {
      for (const int heads : {1, 3, 4, 8}) shapes.emplace_back(target, heads, dim);
    }
    shapes.emplace_back(target, 5, 64), shapes.emplace_back(target, 7, 128), shapes.emplace_back(target, 2, 192);
  }
  return shapes;
}
INSTANTIATE_TEST_SUITE_P(All, CodedShapes, ::testing::ValuesIn(Shapes()), [](const auto& i) {
  return std::get<0>(i.param) + "_R" + std::to_string(std::get<1>(i.param)) + "_D" + std::to_string(std::get<2>(i.param));
});

// Copies within a format are copies of bits, wherever the slots lie.
TEST(Spherical, CopiesKeepTheirBits) {
  for (const Target& target : testing::UsableTargets()) {
    for (const Codec codec : kCoded) {
      AttendCase c(target, 64, 1, 1, 12);
      TestList from, to;
      const std::vector<TestEntry> entries = RandomEntries(c, 64), others = RandomEntries(c, 64);
      c.AddPage(&from, {{codec, codec}, false, false}, entries);
      c.AddPage(&to, {{codec, codec}, false, true}, others);
      std::vector<EntryCopy> copies;
      std::vector<TestEntry> expected = others;
      for (int i = 16; i < 32; ++i) copies.push_back({At(from.pages[0], i), At(to.pages[0], i + 16)}), expected[static_cast<size_t>(i + 16)] = entries[static_cast<size_t>(i)];
      for (const auto& [a, b] : {std::pair{0, 63}, {63, 0}, {7, 12}}) {
        copies.push_back({At(from.pages[0], a), At(to.pages[0], b)});
        expected[static_cast<size_t>(b)] = entries[static_cast<size_t>(a)];
      }
      auto stream = c.arena.backend().NewStream();
      c.arena.backend().CopyEntries({copies.data(), static_cast<int64_t>(copies.size()), 64, c.arena.data()}, *stream);
      ASSERT_TRUE(stream->Synchronize().ok());
      ExpectCodes(c, to.pages[0], expected, 0);
      ExpectCodes(c, from.pages[0], entries, 0);
    }
  }
}

}  // namespace
}  // namespace loupe
