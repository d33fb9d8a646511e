#include "kvcache/page_pool.h"

#include <gtest/gtest.h>

#include <utility>

namespace loupe {
namespace {

const PageClass kLarge{};
const PageClass kSmall{{}, true, false};

class PagePoolTest : public testing::Test {
 protected:
  PagePoolTest() {
    backend_ = MakeBackend({.device = "cpu", .num_threads = 1, .isa = ""}).value();
    arena_ = SlabArena::Create(2 * kSlabBytes, *backend_).value();
    pool_ = std::make_unique<PagePool>(arena_.get(), 64, 1);
  }
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<SlabArena> arena_;
  std::unique_ptr<PagePool> pool_;
};

TEST_F(PagePoolTest, ArenaBelowOneSlabIsRefusedWithTheNumbers) {
  const auto arena = SlabArena::Create(kSlabBytes - 1, *backend_);
  EXPECT_TRUE(absl::IsInvalidArgument(arena.status()));
  EXPECT_NE(std::string(arena.status().message()).find("2097151"), std::string::npos) << arena.status().ToString();
  EXPECT_TRUE(absl::IsInvalidArgument(SlabArena::Create(-5, *backend_).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(SlabArena::Create((int64_t{512} << 30) + kSlabBytes, *backend_).status()));
}

TEST_F(PagePoolTest, AnEmptySlabGoesToAnotherClass) {
  // Pages of 64 entries of 64 dimensions: 16 KiB, 128 a slab; small ones 4 KiB, 512 a slab.
  std::vector<uint32_t> units;
  while (const auto unit = pool_->Take(kLarge)) units.push_back(*unit);
  EXPECT_EQ(units.size(), 256u);
  EXPECT_FALSE(pool_->Take(kSmall).has_value());
  EXPECT_EQ(pool_->BytesFree(kLarge), 0);
  for (size_t i = 128; i < 256; ++i) pool_->GiveBack(units[i]);
  EXPECT_EQ(pool_->BytesFree(kSmall), kSlabBytes);
  for (int i = 0; i < 512; ++i) ASSERT_TRUE(pool_->Take(kSmall).has_value()) << i;
  EXPECT_FALSE(pool_->Take(kSmall).has_value());
  EXPECT_EQ(pool_->slab_bytes(), 2 * kSlabBytes);
  EXPECT_EQ(pool_->bytes_used(), 128 * 16384 + 512 * 4096);
  pool_->Audit();
}

TEST_F(PagePoolTest, SmallPagesLeaveTheOtherSlabsAlone) {
  const PageClass small_with_weights{{}, true, true};
  const uint32_t first = pool_->Take(kSmall).value();
  EXPECT_FALSE(pool_->CanTake(small_with_weights)) << "the one slab for small pages has a class";
  EXPECT_FALSE(pool_->Take(small_with_weights).has_value());
  EXPECT_EQ(pool_->BytesFree(small_with_weights), 0);
  for (int i = 1; i < 512; ++i) ASSERT_TRUE(pool_->Take(kSmall).has_value()) << i;
  EXPECT_FALSE(pool_->CanTake(kSmall));
  EXPECT_FALSE(pool_->Take(kSmall).has_value());
  EXPECT_EQ(pool_->BytesFree(kLarge), kSlabBytes);
  pool_->GiveBack(first);
  EXPECT_TRUE(pool_->CanTake(kSmall));
  pool_->Audit();
}

TEST_F(PagePoolTest, ThePageOfTheLastOwnerRetiresAndIsDrained) {
  const uint32_t unit = pool_->Take(kLarge).value();
  pool_->Share(unit);
  EXPECT_FALSE(pool_->Release(unit));
  EXPECT_TRUE(pool_->Release(unit));
  EXPECT_EQ(pool_->bytes_used(), 0);
  EXPECT_EQ(pool_->bytes_retired(), 16384);
  EXPECT_NE(pool_->Take(kLarge).value(), unit) << "a retired page may still be read";
  pool_->DrainRetired();
  EXPECT_EQ(pool_->bytes_retired(), 0);
  EXPECT_EQ(pool_->Take(kLarge).value(), unit);
  pool_->Audit();
}

TEST_F(PagePoolTest, ClassesAreCountedApart) {
  ASSERT_TRUE(pool_->Take(kLarge).has_value());
  const uint32_t small = pool_->Take(kSmall).value();
  ASSERT_TRUE(pool_->Take(kSmall).has_value());
  pool_->Release(small);
  const std::vector<PageClassUse> uses = pool_->Uses();
  ASSERT_EQ(uses.size(), 2u);
  EXPECT_EQ(uses[0].pages_used, 1);
  EXPECT_EQ(uses[0].pages_free, 127);
  EXPECT_EQ(uses[1].pages_used, 1);
  EXPECT_EQ(uses[1].pages_retired, 1);
  EXPECT_EQ(uses[1].pages_free, 510);
}

TEST_F(PagePoolTest, AReservationThatIsNotKeptLeavesNoTrace) {
  ASSERT_TRUE(pool_->Take(kLarge).has_value());
  const std::string before = pool_->Dump();
  {
    Reservation reservation(pool_.get());
    for (int i = 0; i < 300; ++i) reservation.Take(i % 2 ? kLarge : kSmall);
    EXPECT_TRUE(reservation.failed());
    EXPECT_EQ(reservation.bytes_asked(), 150 * (16384 + 4096)) << "what is missing counts as asked";
    Reservation moved(std::move(reservation));
    EXPECT_GT(moved.bytes_taken(), 0);
  }
  EXPECT_EQ(before, pool_->Dump());
  Reservation reservation(pool_.get());
  const uint32_t unit = reservation.Take(kSmall).value();
  reservation.Keep();
  EXPECT_EQ(pool_->references(unit), 1);
}

using PagePoolDeathTest = PagePoolTest;

TEST_F(PagePoolDeathTest, MisuseStops) {
  const uint32_t unit = pool_->Take(kLarge).value();
  EXPECT_DEATH(pool_->references(unit + 1), "inside a page");
  EXPECT_DEATH(pool_->Share(unit + 128), "no owner");
  pool_->Release(unit);
  EXPECT_DEATH(pool_->Release(unit), "once too often");
  EXPECT_DEATH(pool_->references(static_cast<uint32_t>(2 * kSlabBytes / kPageAlignment)), "is no page");
}

}  // namespace
}  // namespace loupe
