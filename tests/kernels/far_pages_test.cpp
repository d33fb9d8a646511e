// Pages past 4 GiB of an arena: what 32-bit offsets would fold back. The same entries are written, copied and attended to
// at both ends of a large arena; the results must have the same bits. The GPU alone: a CPU of a small machine has no such
// arena to spare. Run it under compute-sanitizer memcheck.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/reference.h"

namespace loupe::testing {
namespace {

constexpr int64_t kFar = (int64_t{4} << 30) + (int64_t{64} << 20);
constexpr int kGroups = 2, kHeads = 8, kDim = 128, kSequences = 3, kPages = 3, kEntries = 150;

// Everything for lists whose pages begin at `offset` into the arena, far from each other's neighbours.
std::vector<float> Outputs(Backend& backend, const DeviceBuffer& arena, int64_t offset, bool prompt) {
  std::mt19937 random(7);
  const int lists = kSequences * kGroups, rows = kSequences;
  const int64_t page_bytes = MakePageLayout({}, kDim).bytes;
  std::vector<PageRef> pages;
  for (int i = 0; i < lists * kPages; ++i) {
    const int count = std::min(kPageEntries, kEntries - i % kPages * kPageEntries);
    pages.push_back(MakePageRef(static_cast<uint32_t>((offset + (i * 7 % (lists * kPages)) * page_bytes) / kPageAlignment), count, {}));
  }
  DeviceArrays arrays(backend);
  const auto tensor = [](std::vector<float>& x, int64_t n, int heads) {
    Tensor t = MakeTensor(x.data(), DType::kF32, n, heads, kDim);
    t.rank = 3;
    return t;
  };
  std::vector<float> k = RandomFloats(int64_t{kEntries} * lists * kDim, random), v = RandomFloats(int64_t{kEntries} * lists * kDim, random);
  std::vector<PageRef> slots;
  for (int e = 0; e < kEntries; ++e) {
    for (int list = 0; list < lists; ++list) {
      slots.push_back(pages[static_cast<size_t>(list * kPages + e / kPageEntries)]);
      slots.back().count = static_cast<uint16_t>(e % kPageEntries);
    }
  }
  AppendKvArgs append;
  append.k = arrays.In(tensor(k, kEntries, lists));
  append.v = arrays.In(tensor(v, kEntries, lists));
  append.slots = arrays.In(MakeTensor(slots.data(), DType::kBytes, kEntries, lists), sizeof(PageRef));
  append.arena = arena.data();
  backend.AppendKv(append, arrays.stream());
  // The first entry of each list becomes its second.
  std::vector<EntryCopy> copies;
  for (int list = 0; list < lists; ++list) {
    EntryCopy copy{pages[static_cast<size_t>(list * kPages)], pages[static_cast<size_t>(list * kPages)]};
    copy.from.count = 0, copy.to.count = 1;
    copies.push_back(copy);
  }
  backend.CopyEntries({copies.data(), lists, kDim, arena.data()}, arrays.stream());

  std::vector<float> q = RandomFloats(int64_t{rows} * kHeads * kDim, random), out(q.size());
  std::vector<int32_t> row_sequence, list_begin, begin(static_cast<size_t>(rows * kGroups), 0), end(static_cast<size_t>(rows * kGroups), kEntries);
  for (int row = 0; row < rows; ++row) row_sequence.push_back(row);
  for (int list = 0; list <= lists; ++list) list_begin.push_back(list * kPages);
  const auto integers = [&](std::vector<int32_t>& x, int64_t n, int64_t m) { return arrays.In(MakeTensor(x.data(), DType::kI32, n, m)); };
  AttendArgs attend;
  attend.q = arrays.In(tensor(q, rows, kHeads));
  attend.out = arrays.Out(tensor(out, rows, kHeads));
  attend.row_sequence = integers(row_sequence, rows, 1);
  attend.pages = arrays.In(MakeTensor(pages.data(), DType::kBytes, static_cast<int64_t>(pages.size())), sizeof(PageRef));
  attend.list_begin = integers(list_begin, lists + 1, 1);
  attend.visible_begin = integers(begin, rows, kGroups);
  attend.visible_end = integers(end, rows, kGroups);
  attend.arena = arena.data();
  attend.scale = .09f;
  attend.prompt_rows = prompt ? rows : 0;
  backend.Attend(attend, arrays.stream());
  arrays.Finish();
  return out;
}

TEST(FarPages, EqualNearOnes) {
  if (!BuiltWithCuda()) GTEST_SKIP() << "this build has no CUDA backend";
  for (const Target& target : UsableTargets()) {
    if (!IsCuda(target)) continue;
    Backend& backend = BackendOf(target);
    auto arena = backend.Allocate(kFar + (int64_t{16} << 20));
    ASSERT_TRUE(arena.ok()) << arena.status();
    for (const bool prompt : {false, true}) {
      const std::vector<float> near = Outputs(backend, **arena, 0, prompt), far = Outputs(backend, **arena, kFar, prompt);
      EXPECT_EQ(near, far) << (prompt ? "prompt" : "decode");
      for (const float x : far) ASSERT_TRUE(std::isfinite(x) && x != 0);
    }
  }
}

}  // namespace
}  // namespace loupe::testing
