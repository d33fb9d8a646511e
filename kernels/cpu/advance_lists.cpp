#include "kernels/check.h"
#include "kernels/cpu/cpu_ops.h"

namespace loupe {

void AdvanceListsCpu(const AdvanceListsArgs& args) {
  const int64_t layers = args.slots.shape[0], rows = args.slots.shape[1], groups = args.slots.shape[2];
  const int64_t lists = rows * groups;
  auto* slots = args.slots.as<PageRef>();
  auto* visible_end = args.visible_end.as<int32_t>();
  auto* pages = args.pages.as<PageRef>();
  auto* list_end = args.list_end.as<int32_t>();
  for (int64_t row = 0; row < rows; ++row) ++args.positions.as<int32_t>()[row];
  for (int64_t i = 0; i < layers * lists; ++i) {
    ++visible_end[i];
    ++slots[i].count;
    pages[list_end[i] - 1].count = static_cast<uint16_t>(slots[i].count + 1);
  }
  for (int64_t tail = 0; tail < (args.tails.defined() ? args.tails.rows() : 0); ++tail) {
    const auto& [i, page] = args.tails.as<TailPage>()[tail];
    slots[i] = page;
    --slots[i].count;
    const int32_t last = args.list_begin.as<int32_t>()[i + i / lists] + (visible_end[i] - 1) / kPageEntries;
    LOUPE_CHECK(last < args.pages.rows()) << "a list's table has no room for page " << last;
    if (last > 0 && last == list_end[i]) pages[last - 1].count = kPageEntries;
    pages[last] = page;
    list_end[i] = last + 1;
  }
}

}  // namespace loupe
