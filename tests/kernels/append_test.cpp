// Appending: layout, rounding, neighbours untouched.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/kernels/attend_reference.h"
#include "tests/kernels/reference.h"

namespace loupe {
namespace {


// One call: `rows` rows of `groups` kv heads.
void Append(TestArena& arena, std::vector<float>& k, std::vector<float>& v, std::vector<PageRef>& slots, int64_t first, int64_t rows,
            int groups, int dim, int threads = 1) {
  Backend& backend = BackendOf(arena.target(), false, threads);
  DeviceArrays arrays(backend);
  const auto tensor = [&](std::vector<float>& x) {
    Tensor t = MakeTensor(x.data() + first * groups * dim, DType::kF32, rows, groups, dim);
    t.rank = 3;
    return t;
  };
  AppendKvArgs args;
  args.k = arrays.In(tensor(k));
  args.v = arrays.In(tensor(v));
  args.slots = arrays.In(MakeTensor(slots.data() + first * groups, DType::kBytes, rows, groups), sizeof(PageRef));
  args.arena = arena.data();
  backend.AppendKv(args, arrays.stream());
  arrays.Finish();
}

TEST(AppendKv, WritesTheLayoutAndNothingElse) {
  for (const Target& target : testing::UsableTargets()) {
    for (const int dim : {8, 64, 80, 256}) {
      const int groups = 2;
      std::mt19937_64 random(static_cast<uint64_t>(dim));
      TestArena arena(target, 1 << 20);
      const PageClass classes[2] = {{{}, false, true}, {{}, true, false}};
      std::vector<PageRef> slots = {arena.NewPage(classes[0], dim), arena.NewPage(classes[1], dim)};
      slots[0].count = 37, slots[1].count = 15;
      std::vector<uint8_t> expected = arena.Read(slots[0], 0, 1 << 19);
      std::vector<float> k(static_cast<size_t>(groups * dim)), v = k;
      for (float& x : k) x = std::normal_distribution<float>(0, 3)(random);
      for (float& x : v) x = std::normal_distribution<float>(0, 3)(random);
      Append(arena, k, v, slots, 0, 1, groups, dim);
      const std::vector<uint8_t> after = arena.Read(slots[0], 0, 1 << 19);
      for (int g = 0; g < groups; ++g) {
        const PageLayout layout = MakePageLayout(classes[g], dim);
        const auto page = static_cast<size_t>(int64_t{slots[g].unit - slots[0].unit} * kPageAlignment);
        const auto check = [&](int64_t plane, bool key, int d, float x) {
          const int64_t element = testing::ElementIndex(target, classes[g], key, slots[g].count, d, dim);
          const size_t at = page + static_cast<size_t>(plane + 2 * element);
          uint16_t bits;
          std::memcpy(&bits, after.data() + at, 2);
          EXPECT_EQ(testing::HalfValue(bits), RoundToHalf(static_cast<double>(x))) << target;
          std::memcpy(expected.data() + at, &bits, 2);
        };
        for (int d = 0; d < dim; ++d) {
          check(0, true, d, k[static_cast<size_t>(g * dim + d)]);
          check(layout.value_offset, false, d, v[static_cast<size_t>(g * dim + d)]);
        }
        if (classes[g].log_weights) {
          const size_t at = page + static_cast<size_t>(layout.log_weight_offset + 4 * slots[g].count);
          float weight;
          std::memcpy(&weight, after.data() + at, 4);
          EXPECT_EQ(weight, 0.f);
          std::memcpy(expected.data() + at, &weight, 4);
        }
      }
      EXPECT_EQ(expected, after) << target << ": a neighbour was written";
    }
  }
}

TEST(AppendKv, RoundsToNearestEvenAndSaturates) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<std::vector<float>> cases = {
      {0.f, -0.f, 1.f, 1 + 0x1p-11f, 1 + 3 * 0x1p-11f, 65504.f, 65519.f, 65520.f},
      {1e10f, -1e10f, inf, -inf, 0x1p-14f, 0x1.ffcp-15f, 0x1p-24f, 0x1p-25f},
      {0x1.8p-25f, 3 * 0x1p-25f, -0x1.6p-20f, 0x1.fffp-15f, 1e-30f, 2047.5f, -2048.5f, 0.1f},
      {1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 0x1.fep127f, 0x1.ffp127f, -0x1.fffffep127f, 0x1p-126f, 0x1p-133f, 0x1.8p-134f}};
  const double largest = 65504;
  for (const Target& target : testing::UsableTargets()) {
    for (const std::vector<float>& x : cases) {
      AttendCase c(target, 8, 1, 1, 1);
      TestList list;
      c.AddPage(&list, {}, {{x, x, 0, {}, {}}});
      const PageLayout layout = MakePageLayout({}, 8);
      const std::vector<uint8_t> page = c.arena.Read(list.pages[0], 0, layout.bytes);
      for (size_t d = 0; d < 8; ++d) {
        const int64_t at = layout.value_offset + 2 * testing::ElementIndex(target, {}, false, 0, static_cast<int>(d), 8);
        uint16_t bits;
        std::memcpy(&bits, page.data() + at, 2);
        const double exact = std::isinf(x[d]) ? std::copysign(largest, x[d]) : RoundToHalf(static_cast<double>(x[d]));
        EXPECT_EQ(testing::HalfValue(bits), std::clamp(exact, -largest, largest)) << target << " " << x[d];
      }
    }
  }
}

TEST(AppendKv, F32PagesKeepEveryBit) {
  for (const Target& target : testing::UsableTargets()) {
    for (const PageFormat format : {PageFormat{Codec::kF32, Codec::kDense}, PageFormat{Codec::kDense, Codec::kF32}}) {
      const int dim = 80, slot = 18;
      const PageClass page_class{format, false, true};
      AttendCase c(target, dim, 1, 1, 4);
      TestList list;
      c.AddPage(&list, page_class, slot + 1);
      const PageLayout layout = MakePageLayout(page_class, dim);
      const std::vector<uint8_t> page = c.arena.Read(list.pages[0], 0, layout.bytes);
      for (int d = 0; d < dim; ++d) {
        const bool is_key = format.key == Codec::kF32;
        const int64_t at = (is_key ? 0 : layout.value_offset) + 4 * testing::ElementIndex(target, page_class, is_key, slot, d, dim);
        float value;
        std::memcpy(&value, page.data() + at, 4);
        const TestEntry& entry = list.entries[slot];
        EXPECT_EQ(value, (is_key ? entry.k : entry.v)[static_cast<size_t>(d)]) << target;
      }
    }
  }
}

// Rotating on the way gives the very bits of rotating before.
TEST(AppendKv, RotationOnTheWayEqualsRotationBefore) {
  for (const Target& target : testing::UsableTargets()) {
    Backend& backend = BackendOf(target);
    for (const int dim : {8, 64, 128}) {
      for (const bool interleaved : {true, false}) {
        for (const int64_t rows : {1, 3, 17}) {
          const int groups = 2, heads = 6, pairs = dim == 64 ? 20 : dim / 2;
          AttendCase c(target, dim, 1, 1, 5);
          std::vector<float> q = c.Normals(static_cast<int>(rows) * heads * dim), k = c.Normals(static_cast<int>(rows) * groups * dim),
                             v = c.Normals(static_cast<int>(rows) * groups * dim), frequencies;
          std::vector<int32_t> positions;
          for (int64_t r = 0; r < rows; ++r) positions.push_back(static_cast<int32_t>(r * 7919 + 3));
          for (int i = 0; i < pairs; ++i) frequencies.push_back(std::pow(10000.f, -static_cast<float>(i) / static_cast<float>(pairs)));
          const auto run = [&](TestArena& arena, bool fused) {
            std::vector<PageRef> slots;
            for (int64_t i = 0; i < rows * groups; ++i) {
              slots.push_back(arena.NewPage({{}, i % 2 == 0, i % 3 == 0}, dim));
              slots.back().count = static_cast<uint16_t>(i % 16);
            }
            std::vector<float> own_q = q, own_k = k;
            DeviceArrays arrays(backend);
            const auto heads_of = [&](std::vector<float>& x, int n) {
              Tensor t = MakeTensor(x.data(), DType::kF32, rows, n, dim);
              t.rank = 3;
              return t;
            };
            Rotation rotation;
            rotation.q = arrays.Out(heads_of(own_q, heads));
            rotation.positions = arrays.In(MakeTensor(positions.data(), DType::kI32, rows));
            rotation.frequencies = arrays.In(MakeTensor(frequencies.data(), DType::kF32, pairs));
            rotation.scale = 1.25f, rotation.interleaved = interleaved;
            AppendKvArgs args;
            args.k = arrays.In(heads_of(own_k, groups));
            args.v = arrays.In(heads_of(v, groups));
            args.slots = arrays.In(MakeTensor(slots.data(), DType::kBytes, rows, groups), sizeof(PageRef));
            args.arena = arena.data();
            if (fused) {
              args.rotation = rotation;
            } else {
              for (const Tensor& x : {rotation.q, args.k}) {
                backend.Rope({x, rotation.positions, rotation.frequencies, rotation.scale, interleaved}, arrays.stream());
              }
            }
            backend.AppendKv(args, arrays.stream());
            arrays.Finish();
            return own_q;
          };
          TestArena a(target, 1 << 20), b(target, 1 << 20);
          EXPECT_EQ(run(a, true), run(b, false)) << target << ", " << dim << " dimensions";
          EXPECT_EQ(a.Read({}, 0, 1 << 19), b.Read({}, 0, 1 << 19)) << target << ", " << dim << " dimensions";
        }
      }
    }
  }
}

TEST(AppendKv, ManyRowsEqualRowByRow) {
  const int dim = 64, groups = 3, rows = 200;  // enough that the work is split over threads
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, dim, 1, groups, 3);
    std::vector<float> k = c.Normals(rows * groups * dim), v = c.Normals(rows * groups * dim);
    const auto fill = [&](TestArena& arena, int threads, bool at_once) {
      std::vector<PageRef> slots, pages(3);
      for (int row = 0; row < rows; ++row) {
        for (PageRef& page : pages) {
          if (row % kPageEntries == 0) page = arena.NewPage({}, dim);
          page.count = static_cast<uint16_t>(row % kPageEntries);
          slots.push_back(page);
        }
      }
      for (int row = 0; row < rows; row += at_once ? rows : 1) {
        Append(arena, k, v, slots, row, at_once ? rows : 1, groups, dim, threads);
      }
    };
    TestArena a(target, 1 << 20), b(target, 1 << 20);
    fill(a, 3, true);
    fill(b, 1, false);
    EXPECT_EQ(a.Read({}, 0, 1 << 19), b.Read({}, 0, 1 << 19)) << target;
  }
}

}  // namespace
}  // namespace loupe
