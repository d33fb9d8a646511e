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
  const PageClass page_class = ref.page_class();
  const PageLayout layout = MakePageLayout(page_class, dim);
  const std::vector<uint8_t> page = arena.Read(ref, 0, layout.bytes);
  const auto read = [&](bool key, int64_t plane, Codec codec) {
    const int64_t size = codec == Codec::kF32 ? 4 : 2;
    std::vector<uint8_t> out;
    for (int d = 0; d < dim; ++d) {
      const auto at = page.begin() + plane + size * testing::ElementIndex(arena.target(), page_class, key, ref.count, d, dim);
      out.insert(out.end(), at, at + size);
    }
    return out;
  };
  bytes.k = read(true, 0, page_class.format.key);
  bytes.v = read(false, layout.value_offset, page_class.format.value);
  if (page_class.log_weights) std::memcpy(&bytes.beta, page.data() + layout.log_weight_offset + 4 * ref.count, 4);
  return bytes;
}

void Copy(TestArena& arena, int dim, const std::vector<EntryCopy>& copies) {
  Backend& backend = BackendOf(arena.target(), false, 2);
  auto stream = backend.NewStream();
  CopyEntriesArgs args;
  args.copies = copies.data();
  args.num_copies = static_cast<int64_t>(copies.size());
  args.head_dim = dim;
  args.arena = arena.data();
  backend.CopyEntries(args, *stream);
  const absl::Status status = stream->Synchronize();
  EXPECT_TRUE(status.ok()) << status.ToString();
}

PageRef At(PageRef page, int slot) {
  page.count = static_cast<uint16_t>(slot);
  return page;
}

TEST(CopyEntries, EveryClassToEveryClass) {
  for (const Target& target : testing::UsableTargets()) {
    for (const int dim : {64, 80, 8}) {
      for (const bool from_small : {false, true}) {
        for (const bool to_small : {false, true}) {
          for (const bool from_weights : {false, true}) {
            AttendCase c(target, dim, 1, 1, 21);
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
}

TEST(CopyEntries, WholeBlocksAndRunsAcrossThem) {
  for (const Target& target : testing::UsableTargets()) {
    for (const int shift : {0, 1, 16}) {
      AttendCase c(target, 64, 1, 1, 22);
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
}

TEST(CopyEntries, InOrderWithinAPage) {
  for (const Target& target : testing::UsableTargets()) {
    AttendCase c(target, 64, 1, 1, 23);
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
}

TEST(CopyEntriesDeathTest, RefusesToLoseALogWeight) {
  const Target target = "portable";  // on the GPU it is the device that traps
  AttendCase c(target, 8, 1, 1, 24);
  TestList from, to;
  TestEntry entry{c.Normals(8), c.Normals(8), 1.5f, {}, {}};
  c.AddPage(&from, {{}, true, true}, {entry});
  c.AddPage(&to, {{}, true, false}, 1);
  EXPECT_DEATH(Copy(c.arena, 8, {{At(from.pages[0], 0), At(to.pages[0], 0)}}), "log-weight 1.5 would be lost");
}

}  // namespace
}  // namespace loupe
