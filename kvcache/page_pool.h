// Pages of every class, carved from the slabs of one arena, with reference counts and a ledger that is exact at any
// moment. A page is named by its unit: its address in the arena in steps of 128 bytes, as in PageRef.
//
// Life of a page: Take -> (Share, Release)* -> the last Release retires it -> DrainRetired frees it. A retired page still
// has its bytes, because work given to a stream before the release may read them; it is drained at the next step. A page
// that nobody has read (a reservation that did not run) is freed at once by GiveBack.
// Owned by the cache, used by the step thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvcache/arena.h"
#include "kvcache/index_set.h"

namespace loupe {

// What one page class holds now.
struct PageClassUse {
  PageClass page_class;
  int64_t page_bytes = 0;
  int64_t slabs = 0;
  int64_t pages_used = 0;
  int64_t pages_retired = 0;
  int64_t pages_free = 0;  // inside the taken slabs
};

class PagePool {
 public:
  // Small pages that are not coded never take more than `max_small_slabs` slabs, however they are spread over them: the
  // others are always there for large pages. Whoever wants coded ones asks for as many as their number of entries says, so
  // that results do not depend on what is free.
  PagePool(SlabArena* arena, int head_dim, int max_small_slabs);

  // A page with one reference, or nothing when neither the class nor the arena has room.
  std::optional<uint32_t> Take(const PageClass& page_class);
  bool CanTake(const PageClass& page_class) const;
  void Share(uint32_t unit);
  // True if that was the last reference: the page is retired then.
  bool Release(uint32_t unit);
  // For the only holder of a page that no work on a stream has touched.
  void GiveBack(uint32_t unit);
  void DrainRetired();

  int references(uint32_t unit) const;
  PageClass page_class(uint32_t unit) const;
  int64_t PageBytes(const PageClass& page_class) const { return MakePageLayout(page_class, head_dim_).bytes; }
  // Bytes of pages of one class that Take could still hand out in a row, retired pages counted as free (they are
  // drained before the next step takes any).
  int64_t BytesFree(const PageClass& page_class) const;

  int max_small_slabs() const { return max_small_slabs_; }
  int64_t pages_used() const { return pages_used_; }
  int64_t small_pages_used() const { return small_pages_used_; }
  int64_t bytes_used() const { return bytes_used_; }
  int64_t bytes_retired() const { return bytes_retired_; }
  int64_t slab_bytes() const { return (arena_->num_slabs() - arena_->num_free()) * kSlabBytes; }
  std::vector<PageClassUse> Uses() const;

  // Recounts the slabs and CHECKs the ledger against them.
  void Audit() const;
  // The whole state as text, equal exactly if the states are.
  std::string Dump() const;

 private:
  struct Class {
    PageClass page_class;
    int64_t page_bytes = 0;
    int pages_per_slab = 0;
    int64_t slabs = 0;
    int64_t pages_used = 0;
    int64_t pages_retired = 0;
    IndexSet partial;  // slabs with a free page
  };
  struct Slab {
    int class_index = -1;
    int pages_taken = 0;               // used and retired
    IndexSet free;                     // page indexes
    std::vector<uint32_t> references;  // 0 for free and retired pages
  };
  struct Place {
    Slab& slab;
    Class& owner;
    int slab_index;
    int page_index;
  };

  static bool IsLimited(const PageClass& page_class);
  int FindClass(const PageClass& page_class) const;
  int FreeSlabsFor(const PageClass& page_class) const;
  int ClassIndex(const PageClass& page_class);
  Place Find(uint32_t unit);
  void Free(const Place& place);
  void Uncount(Class& owner);

  SlabArena* arena_;
  int head_dim_;
  int max_small_slabs_;
  int small_slabs_ = 0;
  std::vector<Class> classes_;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> retired_;
  int64_t pages_used_ = 0;
  int64_t small_pages_used_ = 0;
  int64_t bytes_used_ = 0;
  int64_t bytes_retired_ = 0;
};

// Pages taken for a step or a repack that may still be called off: gives them back unless Keep was called.
class Reservation {
 public:
  explicit Reservation(PagePool* pool) : pool_(pool) {}
  ~Reservation() { GiveBack(); }
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&&) = delete;

  // The same contract as PagePool::Take. After a failure the reservation still counts what it would have needed.
  std::optional<uint32_t> Take(const PageClass& page_class);
  // Also forgets a failure, so that the reservation can be used again.
  void GiveBack();
  // The pages belong to someone else from now on.
  void Keep();

  bool failed() const { return failed_; }
  int64_t bytes_asked() const { return bytes_asked_; }
  int64_t bytes_taken() const { return bytes_taken_; }
  std::span<const uint32_t> units() const { return units_; }

 private:
  PagePool* pool_;
  std::vector<uint32_t> units_;
  int64_t bytes_asked_ = 0;
  int64_t bytes_taken_ = 0;
  bool failed_ = false;
};

}  // namespace loupe
