// Appending: layout, rounding, neighbours untouched.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/kernels/attend_reference.h"

namespace loupe {
namespace {

double HalfValue(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double x = exponent == 0    ? std::ldexp(mantissa, -24)
                   : exponent == 31 ? (mantissa != 0 ? std::nan("") : HUGE_VAL)
                                    : std::ldexp(1024 + mantissa, exponent - 25);
  return (h & 0x8000) != 0 ? -x : x;
}

TEST(AppendKv, WritesTheBlockLayoutAndNothingElse) {
  for (const Isa isa : AllIsas()) {
    for (const int dim : {8, 64, 80, 256}) {
      const int groups = 2;
      std::mt19937_64 random(static_cast<uint64_t>(dim));
      TestArena arena(1 << 20);
      const PageClass classes[2] = {{{}, false, true}, {{}, true, false}};
      PageRef slots[2] = {arena.NewPage(classes[0], dim), arena.NewPage(classes[1], dim)};
      slots[0].count = 37, slots[1].count = 15;
      std::vector<uint8_t> before(arena.Page(slots[0]), arena.Page(slots[0]) + (1 << 19));
      std::vector<float> k(static_cast<size_t>(groups * dim)), v = k;
      for (float& x : k) x = std::normal_distribution<float>(0, 3)(random);
      for (float& x : v) x = std::normal_distribution<float>(0, 3)(random);
      AppendKvArgs args;
      args.k = MakeTensor(k.data(), DType::kF32, 1, groups, dim);
      args.v = MakeTensor(v.data(), DType::kF32, 1, groups, dim);
      args.slots = MakeTensor(slots, DType::kBytes, 1, groups);
      args.arena = arena.data();
      ThreadPool pool(1);
      AppendKvCpu(args, {pool, isa});
      for (int g = 0; g < groups; ++g) {
        const PageLayout layout = MakePageLayout(classes[g], dim);
        auto* page = reinterpret_cast<uint16_t*>(arena.Page(slots[g]));
        auto* expected = reinterpret_cast<uint16_t*>(before.data() + (arena.Page(slots[g]) - arena.Page(slots[0])));
        for (int d = 0; d < dim; ++d) {
          const int key = slots[g].count / 16 * dim * 16 + d * 16 + slots[g].count % 16;
          const int64_t value = layout.value_offset / 2 + slots[g].count * dim + d;
          EXPECT_EQ(HalfValue(page[key]), RoundToHalf(k[static_cast<size_t>(g * dim + d)])) << IsaName(isa);
          EXPECT_EQ(HalfValue(page[value]), RoundToHalf(v[static_cast<size_t>(g * dim + d)])) << IsaName(isa);
          expected[key] = page[key], expected[value] = page[value];
        }
        if (classes[g].log_weights) {
          auto* weight = reinterpret_cast<float*>(page) + layout.log_weight_offset / 4 + slots[g].count;
          EXPECT_EQ(*weight, 0.f);
          std::memcpy(reinterpret_cast<float*>(expected) + layout.log_weight_offset / 4 + slots[g].count, weight, 4);
        }
      }
      EXPECT_EQ(std::memcmp(before.data(), arena.Page(slots[0]), before.size()), 0) << "a neighbour was written";
    }
  }
}

TEST(AppendKv, RoundsToNearestEvenAndSaturates) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<std::vector<float>> cases = {
      {0.f, -0.f, 1.f, 1 + 0x1p-11f, 1 + 3 * 0x1p-11f, 65504.f, 65519.f, 65520.f},
      {1e10f, -1e10f, inf, -inf, 0x1p-14f, 0x1.ffcp-15f, 0x1p-24f, 0x1p-25f},
      {0x1.8p-25f, 3 * 0x1p-25f, -0x1.6p-20f, 0x1.fffp-15f, 1e-30f, 2047.5f, -2048.5f, 0.1f}};
  for (const Isa isa : AllIsas()) {
    for (const std::vector<float>& x : cases) {
      AttendCase c(8, 1, 1, 1);
      c.append_isa = isa;
      TestList list;
      c.AddPage(&list, {}, {{x, x, 0, {}, {}}});
      const PageLayout layout = MakePageLayout({}, 8);
      for (size_t d = 0; d < 8; ++d) {
        uint16_t h;
        std::memcpy(&h, c.arena.Page(list.pages[0]) + layout.value_offset + 2 * d, 2);
        const double expected = std::isinf(x[d]) ? std::copysign(65504.0, x[d]) : RoundToHalf(static_cast<double>(x[d]));
        EXPECT_EQ(HalfValue(h), expected) << IsaName(isa) << " " << x[d];
      }
    }
  }
}

TEST(AppendKv, F32PagesKeepEveryBit) {
  for (const Isa isa : AllIsas()) {
    for (const PageFormat format : {PageFormat{Codec::kF32, Codec::kDense}, PageFormat{Codec::kDense, Codec::kF32}}) {
      const int dim = 80, slot = 18;
      AttendCase c(dim, 1, 1, 4);
      c.append_isa = isa;
      TestList list;
      c.AddPage(&list, {format, false, true}, slot + 1);
      const uint8_t* page = c.arena.Page(list.pages[0]);
      const PageLayout layout = MakePageLayout({format, false, true}, dim);
      for (int d = 0; d < dim; ++d) {
        float key, value;
        std::memcpy(&key, page + ((slot / 16 * dim + d) * 16 + slot % 16) * 4, 4);
        std::memcpy(&value, page + layout.value_offset + (slot * dim + d) * 4, 4);
        const auto at = static_cast<size_t>(d);
        if (format.key == Codec::kF32) EXPECT_EQ(key, list.entries[slot].k[at]);
        if (format.value == Codec::kF32) EXPECT_EQ(value, list.entries[slot].v[at]);
      }
    }
  }
}

TEST(AppendKv, ManyRowsEqualRowByRow) {
  const int dim = 64, groups = 3, rows = 200;  // enough that the work is split over threads
  AttendCase c(dim, 1, groups, 3);
  std::vector<float> k = c.Normals(rows * groups * dim), v = c.Normals(rows * groups * dim);
  const auto fill = [&](TestArena& arena, int threads, bool at_once) {
    std::vector<PageRef> slots;
    std::vector<PageRef> pages(3);
    for (int row = 0; row < rows; ++row) {
      for (PageRef& page : pages) {
        if (row % kPageEntries == 0) page = arena.NewPage({}, dim);
        page.count = static_cast<uint16_t>(row % kPageEntries);
        slots.push_back(page);
      }
    }
    ThreadPool pool(threads);
    for (int row = 0; row < rows; row += at_once ? rows : 1) {
      const int n = at_once ? rows : 1;
      AppendKvArgs args;
      args.k = MakeTensor(k.data() + row * groups * dim, DType::kF32, n, groups, dim);
      args.v = MakeTensor(v.data() + row * groups * dim, DType::kF32, n, groups, dim);
      args.slots = MakeTensor(slots.data() + row * groups, DType::kBytes, n, groups);
      args.arena = arena.data();
      AppendKvCpu(args, {pool, DetectIsa()});
    }
  };
  TestArena a(1 << 20), b(1 << 20);
  fill(a, 3, true);
  fill(b, 1, false);
  EXPECT_EQ(std::memcmp(a.data(), b.data(), 1 << 19), 0);
}

}  // namespace
}  // namespace loupe
