// Copying entries: byte-exact between any slots of pages of any class.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/kernels/attend_reference.h"

namespace loupe {
namespace {

struct Bytes {
  std::vector<uint8_t> k, v;
  float beta = 0;
  bool operator==(const Bytes&) const = default;
};

Bytes ReadSlot(TestArena& arena, const PageRef& ref, int dim) {
  Bytes bytes;
  const PageLayout layout = MakePageLayout(ref.page_class(), dim);
  const uint8_t* page = arena.Page(ref);
  const PageFormat format = ref.page_class().format;
  const int key_size = format.key == Codec::kF32 ? 4 : 2, value_size = format.value == Codec::kF32 ? 4 : 2;
  for (int i = 0; i < dim * key_size; ++i) {
    const int d = i / key_size;
    bytes.k.push_back(page[(ref.count / 16 * dim * 16 + d * 16 + ref.count % 16) * key_size + i % key_size]);
  }
  for (int i = 0; i < dim * value_size; ++i) bytes.v.push_back(page[layout.value_offset + ref.count * dim * value_size + i]);
  if (ref.log_weights != 0) std::memcpy(&bytes.beta, arena.Page(ref) + layout.log_weight_offset + 4 * ref.count, 4);
  return bytes;
}

void Copy(TestArena& arena, int dim, const std::vector<EntryCopy>& copies) {
  ThreadPool pool(2);
  CopyEntriesArgs args;
  args.copies = copies.data();
  args.num_copies = static_cast<int64_t>(copies.size());
  args.head_dim = dim;
  args.arena = arena.data();
  CopyEntriesCpu(args, {pool, DetectIsa()});
}

PageRef At(PageRef page, int slot) {
  page.count = static_cast<uint16_t>(slot);
  return page;
}

TEST(CopyEntries, EveryClassToEveryClass) {
  for (const int dim : {64, 80, 8}) {
    for (const bool from_small : {false, true}) {
      for (const bool to_small : {false, true}) {
        for (const bool from_weights : {false, true}) {
          AttendCase c(dim, 1, 1, 21);
          TestList from, to;
          const PageFormat format = c.RandomFormat();
          c.AddPage(&from, {format, from_small, from_weights}, from_small ? 16 : 64);
          c.AddPage(&to, {format, to_small, true}, to_small ? 16 : 64);
          std::vector<EntryCopy> copies;
          std::vector<Bytes> expected;
          for (int slot = 0; slot < (to_small ? 16 : 64); ++slot) expected.push_back(ReadSlot(c.arena, At(to.pages[0], slot), dim));
          for (const int slot : {0, 3, 15, to_small ? 7 : 63}) {
            const int source = c.Below(from_small ? 16 : 64);
            copies.push_back({At(from.pages[0], source), At(to.pages[0], slot)});
            expected[static_cast<size_t>(slot)] = ReadSlot(c.arena, copies.back().from, dim);
          }
          Copy(c.arena, dim, copies);
          for (size_t slot = 0; slot < expected.size(); ++slot) {
            EXPECT_TRUE(ReadSlot(c.arena, At(to.pages[0], static_cast<int>(slot)), dim) == expected[slot])
                << "dim " << dim << " slot " << slot << " small " << from_small << to_small << " weights " << from_weights;
          }
        }
      }
    }
  }
}

TEST(CopyEntries, WholeBlocksAndRunsAcrossThem) {
  for (const int shift : {0, 1, 16}) {
    AttendCase c(64, 1, 1, 22);
    TestList from, to;
    const PageFormat format{shift == 0 ? Codec::kF32 : Codec::kDense, shift == 1 ? Codec::kF32 : Codec::kDense};
    c.AddPage(&from, {format, false, false}, 64);
    c.AddPage(&to, {format, false, true}, 64);
    std::vector<EntryCopy> copies;
    for (int slot = 0; slot + shift < 64; ++slot) copies.push_back({At(from.pages[0], slot), At(to.pages[0], slot + shift)});
    Copy(c.arena, 64, copies);
    for (const EntryCopy& copy : copies) {
      const Bytes got = ReadSlot(c.arena, copy.to, 64);
      EXPECT_TRUE(got == ReadSlot(c.arena, copy.from, 64)) << "shift " << shift << " slot " << copy.to.count;
      EXPECT_EQ(got.beta, 0.f);
    }
  }
}

TEST(CopyEntries, InOrderWithinAPage) {
  AttendCase c(64, 1, 1, 23);
  TestList list;
  c.AddPage(&list, {{}, false, true}, 64);
  std::vector<Bytes> before;
  for (int slot = 0; slot < 64; ++slot) before.push_back(ReadSlot(c.arena, At(list.pages[0], slot), 64));
  std::vector<EntryCopy> copies;  // compaction: keep every third entry
  for (int i = 0; i * 3 < 64; ++i) copies.push_back({At(list.pages[0], i * 3), At(list.pages[0], i)});
  Copy(c.arena, 64, copies);
  for (int i = 0; i * 3 < 64; ++i) {
    EXPECT_TRUE(ReadSlot(c.arena, At(list.pages[0], i), 64) == before[static_cast<size_t>(i * 3)]) << i;
  }
}

TEST(CopyEntriesDeathTest, RefusesToLoseALogWeight) {
  AttendCase c(8, 1, 1, 24);
  TestList from, to;
  TestEntry entry{c.Normals(8), c.Normals(8), 1.5f, {}, {}};
  c.AddPage(&from, {{}, true, true}, {entry});
  c.AddPage(&to, {{}, true, false}, 1);
  EXPECT_DEATH(Copy(c.arena, 8, {{At(from.pages[0], 0), At(to.pages[0], 0)}}), "log-weight 1.5 would be lost");
}

}  // namespace
}  // namespace loupe
