// The page pool under random operations, beside a std::map that says what every page is. After each operation all
// counters are compared; now and then the pool recounts itself.
#include "kvcache/page_pool.h"

#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <random>
#include <set>

namespace loupe {
namespace {

constexpr int kHeadDim = 256;  // 32 pages a slab, so that slabs fill and empty often
constexpr int kSlabs = 5;

const PageClass kClasses[] = {{{}, false, false}, {{}, true, false}, {{}, false, true}, {{}, true, true}};

struct ModelPage {
  PageClass page_class;
  int references = 1;
};

class PoolAndModel {
 public:
  explicit PoolAndModel(uint32_t seed) : random_(seed) {
    backend_ = MakeBackend({.device = "cpu", .num_threads = 1, .isa = ""}).value();
    arena_ = SlabArena::Create(kSlabs * kSlabBytes + 12345, *backend_).value();
    pool_ = std::make_unique<PagePool>(arena_.get(), kHeadDim, 2);
  }

  void Operate() {
    // The weight of Take swings, so that the pool is full at times and nearly empty at others.
    const uint32_t take_weight = phase_++ / 700 % 2 == 0 ? 12 : 2;
    const uint32_t dice = random_() % 20;
    if (dice < take_weight) {
      Take();
    } else if (dice < take_weight + 2) {
      Any([&](auto page) { pool_->Share(page->first), ++page->second.references; });
    } else if (dice < 19) {
      Any([&](auto page) { Release(page); });
    } else if (random_() % 4 == 0) {
      pool_->DrainRetired();
      for (uint32_t unit : retired_) taken_.erase(unit);
      retired_.clear();
    } else {
      Undo();
    }
    Compare();
  }

  void Finish() {
    while (!pages_.empty()) Release(pages_.begin());
    pool_->DrainRetired();
    pool_->Audit();
    EXPECT_EQ(pool_->slab_bytes(), 0);
    EXPECT_EQ(arena_->num_free(), kSlabs);
  }
  int refused() const { return refused_; }
  int slab_moves() const { return slab_moves_; }

 private:
  void Take() {
    const PageClass c = kClasses[random_() % 4];
    const bool had_room = pool_->BytesFree(c) - RetiredBytesOf(c) >= pool_->PageBytes(c);
    const auto unit = pool_->Take(c);
    ASSERT_EQ(unit.has_value(), had_room);
    if (!unit) {
      ++refused_;
      return;
    }
    // No overlap with any page that is in use or retired.
    const int64_t begin = int64_t{*unit} * kPageAlignment, end = begin + pool_->PageBytes(c);
    ASSERT_LE(end, arena_->bytes());
    const auto after = taken_.lower_bound(*unit);
    if (after != taken_.end()) {
      ASSERT_LE(end, int64_t{after->first} * kPageAlignment);
    }
    if (after != taken_.begin()) {
      const auto before = std::prev(after);
      ASSERT_GE(begin, int64_t{before->first} * kPageAlignment + pool_->PageBytes(before->second));
    }
    const int slab = static_cast<int>(begin / kSlabBytes);
    ASSERT_EQ(slab, (end - 1) / kSlabBytes);
    const auto owner = slab_owner_.find(slab);
    if (owner != slab_owner_.end() && !(owner->second == c)) ++slab_moves_;
    slab_owner_[slab] = c;
    taken_[*unit] = c;
    pages_[*unit] = {c, 1};
  }

  template <class Use>
  void Any(Use use) {
    if (pages_.empty()) return;
    auto page = pages_.lower_bound(static_cast<uint32_t>(random_() % (kSlabs * kSlabBytes / kPageAlignment)));
    use(page == pages_.end() ? pages_.begin() : page);
  }

  void Release(std::map<uint32_t, ModelPage>::iterator page) {
    const bool last = --page->second.references == 0;
    ASSERT_EQ(pool_->Release(page->first), last);
    if (!last) return;
    retired_.insert(page->first);
    pages_.erase(page);
  }

  // Reserves a mix of pages, more than there is at times, and gives them back: the state must be the very same.
  void Undo() {
    const std::string before = pool_->Dump();
    Reservation reservation(pool_.get());
    const int count = static_cast<int>(random_() % 400);
    for (int i = 0; i < count; ++i) reservation.Take(kClasses[random_() % 4]);
    reservation.GiveBack();
    ASSERT_EQ(before, pool_->Dump());
  }

  int64_t RetiredBytesOf(const PageClass& c) const {
    // BytesFree counts retired pages of the class as free: they are not until they are drained.
    int64_t bytes = 0;
    for (uint32_t unit : retired_) bytes += taken_.at(unit) == c ? pool_->PageBytes(c) : 0;
    return bytes;
  }

  void Compare() {
    int64_t bytes = 0, small = 0, retired_bytes = 0;
    std::set<int> slabs;
    for (const auto& [unit, page] : pages_) {
      bytes += pool_->PageBytes(page.page_class);
      small += page.page_class.small ? 1 : 0;
    }
    for (const auto& [unit, c] : taken_) slabs.insert(static_cast<int>(unit * kPageAlignment / kSlabBytes));
    for (uint32_t unit : retired_) retired_bytes += pool_->PageBytes(taken_.at(unit));
    ASSERT_EQ(pool_->pages_used(), static_cast<int64_t>(pages_.size()));
    ASSERT_EQ(pool_->small_pages_used(), small);
    ASSERT_EQ(pool_->bytes_used(), bytes);
    ASSERT_EQ(pool_->bytes_retired(), retired_bytes);
    ASSERT_EQ(pool_->slab_bytes(), static_cast<int64_t>(slabs.size()) * kSlabBytes);
    Any([&](auto page) {
      ASSERT_EQ(pool_->references(page->first), page->second.references);
      ASSERT_TRUE(pool_->page_class(page->first) == page->second.page_class);
    });
    if (phase_ % 500 == 0) pool_->Audit();
  }

  std::mt19937 random_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<SlabArena> arena_;
  std::unique_ptr<PagePool> pool_;
  std::map<uint32_t, ModelPage> pages_;    // in use
  std::map<uint32_t, PageClass> taken_;    // in use or retired
  std::set<uint32_t> retired_;
  std::map<int, PageClass> slab_owner_;    // the class that last took a page of a slab
  int phase_ = 0;
  int refused_ = 0;
  int slab_moves_ = 0;
};

TEST(PagePoolProperty, AgreesWithAMap) {
  for (uint32_t seed : {1u, 2u, 3u}) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    PoolAndModel pair(seed);
    for (int i = 0; i < 10000 && !testing::Test::HasFatalFailure(); ++i) pair.Operate();
    EXPECT_GT(pair.refused(), 0) << "the arena was never full";
    EXPECT_GT(pair.slab_moves(), 0) << "no slab ever went from one class to another";
    pair.Finish();
  }
}

}  // namespace
}  // namespace loupe
