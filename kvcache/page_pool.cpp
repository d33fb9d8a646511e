#include "kvcache/page_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kvcache/page_format.h"

namespace loupe {
namespace {

constexpr uint32_t kUnitsPerSlab = static_cast<uint32_t>(kSlabBytes / kPageAlignment);

}  // namespace

PagePool::PagePool(SlabArena* arena, int head_dim, int max_small_slabs)
    : arena_(arena), head_dim_(head_dim), max_small_slabs_(max_small_slabs) {
  slabs_.resize(static_cast<size_t>(arena->num_slabs()));
}

bool PagePool::IsLimited(const PageClass& page_class) { return page_class.small && !IsCoded(page_class.format); }

int PagePool::FindClass(const PageClass& page_class) const {
  // A handful of classes are in use at a time, so a search beats a table of all possible ones.
  for (size_t i = 0; i < classes_.size(); ++i) {
    if (classes_[i].page_class == page_class) return static_cast<int>(i);
  }
  return -1;
}

int PagePool::ClassIndex(const PageClass& page_class) {
  const int known = FindClass(page_class);
  if (known >= 0) return known;
  Class c;
  c.page_class = page_class;
  c.page_bytes = PageBytes(page_class);
  LOUPE_CHECK(c.page_bytes > 0 && c.page_bytes <= kSlabBytes) << "a page of " << c.page_bytes << " bytes fits no slab";
  c.pages_per_slab = static_cast<int>(kSlabBytes / c.page_bytes);
  c.partial = IndexSet(arena_->num_slabs());
  classes_.push_back(std::move(c));
  return static_cast<int>(classes_.size()) - 1;
}

int PagePool::FreeSlabsFor(const PageClass& page_class) const {
  return IsLimited(page_class) ? std::min(arena_->num_free(), max_small_slabs_ - small_slabs_) : arena_->num_free();
}

bool PagePool::CanTake(const PageClass& page_class) const {
  const int known = FindClass(page_class);
  return (known >= 0 && !classes_[static_cast<size_t>(known)].partial.empty()) || FreeSlabsFor(page_class) > 0;
}

std::optional<uint32_t> PagePool::Take(const PageClass& page_class) {
  const int class_index = ClassIndex(page_class);
  Class& owner = classes_[static_cast<size_t>(class_index)];
  int slab_index = owner.partial.First();
  if (slab_index < 0) {
    if (FreeSlabsFor(page_class) <= 0) return std::nullopt;
    slab_index = arena_->TakeSlab();
    small_slabs_ += IsLimited(page_class) ? 1 : 0;
    Slab& fresh = slabs_[static_cast<size_t>(slab_index)];
    fresh.class_index = class_index;
    fresh.pages_taken = 0;
    fresh.free = IndexSet(owner.pages_per_slab);
    fresh.free.InsertBelow(owner.pages_per_slab);
    fresh.references.assign(static_cast<size_t>(owner.pages_per_slab), 0);
    owner.partial.Insert(slab_index);
    ++owner.slabs;
  }
  Slab& slab = slabs_[static_cast<size_t>(slab_index)];
  const int page_index = slab.free.First();
  slab.free.Erase(page_index);
  slab.references[static_cast<size_t>(page_index)] = 1;
  ++slab.pages_taken;
  if (slab.free.empty()) owner.partial.Erase(slab_index);
  ++owner.pages_used;
  ++pages_used_;
  small_pages_used_ += owner.page_class.small ? 1 : 0;
  bytes_used_ += owner.page_bytes;
  return static_cast<uint32_t>(slab_index) * kUnitsPerSlab +
         static_cast<uint32_t>(page_index * owner.page_bytes / kPageAlignment);
}

PagePool::Place PagePool::Find(uint32_t unit) {
  const size_t slab_index = unit / kUnitsPerSlab;
  LOUPE_CHECK(slab_index < slabs_.size() && slabs_[slab_index].class_index >= 0) << "unit " << unit << " is no page";
  Slab& slab = slabs_[slab_index];
  Class& owner = classes_[static_cast<size_t>(slab.class_index)];
  const int64_t offset = int64_t{unit % kUnitsPerSlab} * kPageAlignment;
  LOUPE_CHECK(offset % owner.page_bytes == 0) << "unit " << unit << " is inside a page";
  return {slab, owner, static_cast<int>(slab_index), static_cast<int>(offset / owner.page_bytes)};
}

int PagePool::references(uint32_t unit) const {
  const Place place = const_cast<PagePool*>(this)->Find(unit);
  return static_cast<int>(place.slab.references[static_cast<size_t>(place.page_index)]);
}

PageClass PagePool::page_class(uint32_t unit) const { return const_cast<PagePool*>(this)->Find(unit).owner.page_class; }

void PagePool::Share(uint32_t unit) {
  const Place place = Find(unit);
  uint32_t& references = place.slab.references[static_cast<size_t>(place.page_index)];
  LOUPE_CHECK(references > 0) << "unit " << unit << " has no owner to share with";
  ++references;
}

void PagePool::Uncount(Class& owner) {
  --owner.pages_used;
  --pages_used_;
  small_pages_used_ -= owner.page_class.small ? 1 : 0;
  bytes_used_ -= owner.page_bytes;
}

bool PagePool::Release(uint32_t unit) {
  const Place place = Find(unit);
  uint32_t& references = place.slab.references[static_cast<size_t>(place.page_index)];
  LOUPE_CHECK(references > 0) << "unit " << unit << " is released once too often";
  if (--references > 0) return false;
  Uncount(place.owner);
  ++place.owner.pages_retired;
  bytes_retired_ += place.owner.page_bytes;
  retired_.push_back(unit);
  return true;
}

void PagePool::GiveBack(uint32_t unit) {
  const Place place = Find(unit);
  uint32_t& references = place.slab.references[static_cast<size_t>(place.page_index)];
  LOUPE_CHECK(references == 1) << "unit " << unit << " has " << references << " owners";
  references = 0;
  Uncount(place.owner);
  Free(place);
}

void PagePool::Free(const Place& place) {
  if (place.slab.free.empty()) place.owner.partial.Insert(place.slab_index);
  place.slab.free.Insert(place.page_index);
  if (--place.slab.pages_taken > 0) return;
  place.owner.partial.Erase(place.slab_index);
  --place.owner.slabs;
  small_slabs_ -= IsLimited(place.owner.page_class) ? 1 : 0;
  place.slab.class_index = -1;
  arena_->GiveSlab(place.slab_index);
}

void PagePool::DrainRetired() {
  for (uint32_t unit : retired_) {
    const Place place = Find(unit);
    --place.owner.pages_retired;
    bytes_retired_ -= place.owner.page_bytes;
    Free(place);
  }
  retired_.clear();
}

int64_t PagePool::BytesFree(const PageClass& page_class) const {
  const int64_t page_bytes = PageBytes(page_class);
  int64_t pages = FreeSlabsFor(page_class) * (kSlabBytes / page_bytes);
  const int index = FindClass(page_class);
  if (index >= 0) {
    const Class& owner = classes_[static_cast<size_t>(index)];
    pages += owner.slabs * owner.pages_per_slab - owner.pages_used;
  }
  return pages * page_bytes;
}

std::vector<PageClassUse> PagePool::Uses() const {
  std::vector<PageClassUse> uses;
  for (const Class& owner : classes_) {
    const int64_t free = owner.slabs * owner.pages_per_slab - owner.pages_used - owner.pages_retired;
    uses.push_back({owner.page_class, owner.page_bytes, owner.slabs, owner.pages_used, owner.pages_retired, free});
  }
  return uses;
}

void PagePool::Audit() const {
  int64_t used = 0, small = 0, bytes = 0, taken_slabs = 0, small_slabs = 0;
  std::vector<int64_t> retired(classes_.size(), 0), used_of(classes_.size(), 0), slabs_of(classes_.size(), 0);
  for (size_t i = 0; i < slabs_.size(); ++i) {
    const Slab& slab = slabs_[i];
    if (slab.class_index < 0) continue;
    const size_t c = static_cast<size_t>(slab.class_index);
    const Class& owner = classes_[c];
    ++taken_slabs;
    small_slabs += IsLimited(owner.page_class) ? 1 : 0;
    ++slabs_of[c];
    int taken = 0;
    for (int page = 0; page < owner.pages_per_slab; ++page) {
      const uint32_t references = slab.references[static_cast<size_t>(page)];
      if (slab.free.Contains(page)) {
        LOUPE_CHECK_EQ(references, 0u) << "owners of free page " << page << " of slab " << i;
        continue;
      }
      ++taken;
      references > 0 ? ++used_of[c] : ++retired[c];
    }
    LOUPE_CHECK_EQ(taken, slab.pages_taken) << "pages of slab " << i;
    LOUPE_CHECK(taken > 0) << "slab " << i << " is empty and was not given back";
    LOUPE_CHECK_EQ(owner.partial.Contains(static_cast<int>(i)), taken < owner.pages_per_slab) << "slab " << i;
  }
  int64_t retired_pages = 0, bytes_retired = 0;
  for (size_t c = 0; c < classes_.size(); ++c) {
    const Class& owner = classes_[c];
    LOUPE_CHECK_EQ(used_of[c], owner.pages_used) << "pages in use of class " << c;
    LOUPE_CHECK_EQ(retired[c], owner.pages_retired) << "retired pages of class " << c;
    LOUPE_CHECK_EQ(slabs_of[c], owner.slabs) << "slabs of class " << c;
    used += used_of[c];
    small += owner.page_class.small ? used_of[c] : 0;
    bytes += used_of[c] * owner.page_bytes;
    retired_pages += retired[c];
    bytes_retired += retired[c] * owner.page_bytes;
  }
  LOUPE_CHECK_EQ(used, pages_used_) << "pages in use";
  LOUPE_CHECK_EQ(small, small_pages_used_) << "small pages in use";
  LOUPE_CHECK_EQ(bytes, bytes_used_) << "bytes in use";
  LOUPE_CHECK_EQ(retired_pages, static_cast<int64_t>(retired_.size())) << "retired pages";
  LOUPE_CHECK_EQ(bytes_retired, bytes_retired_) << "retired bytes";
  LOUPE_CHECK_EQ(small_slabs, small_slabs_) << "slabs of small pages";
  LOUPE_CHECK_LE(small_slabs_, max_small_slabs_) << "slabs of small pages";
  LOUPE_CHECK_EQ(taken_slabs, arena_->num_slabs() - arena_->num_free()) << "slabs taken from the arena";
}

std::string PagePool::Dump() const {
  std::string out = absl::StrFormat("slabs free %d, pages used %d small %d bytes %d retired %d\n", arena_->num_free(), pages_used_,
                                    small_pages_used_, bytes_used_, bytes_retired_);
  for (size_t i = 0; i < slabs_.size(); ++i) {
    const Slab& slab = slabs_[i];
    if (slab.class_index < 0) continue;
    out += absl::StrFormat("slab %d class %d:", i, slab.class_index);
    for (size_t page = 0; page < slab.references.size(); ++page) {
      out += slab.free.Contains(static_cast<int>(page)) ? std::string(" -") : absl::StrFormat(" %d", slab.references[page]);
    }
    out += "\n";
  }
  return out;
}

Reservation::Reservation(Reservation&& other) noexcept
    : pool_(other.pool_),
      units_(std::move(other.units_)),
      bytes_asked_(other.bytes_asked_),
      bytes_taken_(other.bytes_taken_),
      failed_(other.failed_) {
  other.Keep();
}

std::optional<uint32_t> Reservation::Take(const PageClass& page_class) {
  bytes_asked_ += pool_->PageBytes(page_class);
  if (failed_) return std::nullopt;
  const std::optional<uint32_t> unit = pool_->Take(page_class);
  if (unit) {
    units_.push_back(*unit);
    bytes_taken_ += pool_->PageBytes(page_class);
  } else {
    failed_ = true;
  }
  return unit;
}

void Reservation::GiveBack() {
  for (uint32_t unit : units_) pool_->GiveBack(unit);
  Keep();
}

void Reservation::Keep() {
  units_.clear();
  bytes_asked_ = bytes_taken_ = 0;
  failed_ = false;
}

}  // namespace loupe
