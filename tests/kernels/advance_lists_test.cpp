// AdvanceLists against plain vectors of pages: lists of every length around a page, several layers, tails that begin and
// small ones that are replaced.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "tests/kernels/target.h"

namespace loupe::testing {
namespace {

constexpr int kRoom = 3;

struct Step {
  int layers, rows, groups;
  std::vector<int32_t> positions, visible_end, list_begin, list_end;
  std::vector<PageRef> slots, pages;
  std::vector<TailPage> tails;
};

bool Same(const std::vector<PageRef>& a, const PageRef* b) { return std::memcmp(a.data(), b, a.size() * sizeof(PageRef)) == 0; }

// Arrays as a step that starts from `lists` has them; lists[i] are the pages of list i of the step, the new row counted.
Step Build(int layers, int rows, int groups, const std::vector<std::vector<PageRef>>& lists, const std::vector<int32_t>& positions) {
  Step step{layers, rows, groups, positions, {}, {}, {}, {}, {}, {}};
  for (int layer = 0; layer < layers; ++layer) {
    step.list_begin.push_back(static_cast<int32_t>(step.pages.size()));
    for (int i = 0; i < rows * groups; ++i) {
      const std::vector<PageRef>& list = lists[static_cast<size_t>(layer * rows * groups + i)];
      step.pages.insert(step.pages.end(), list.begin(), list.end());
      step.list_end.push_back(static_cast<int32_t>(step.pages.size()));
      step.pages.resize(step.pages.size() + kRoom);
      step.list_begin.push_back(static_cast<int32_t>(step.pages.size()));
      step.visible_end.push_back(static_cast<int32_t>((list.size() - 1) * kPageEntries + list.back().count));
      step.slots.push_back(list.back());
      --step.slots.back().count;
    }
  }
  return step;
}

void Advance(const Target& target, Step* step) {
  Backend& backend = BackendOf(target);
  DeviceArrays arrays(backend);
  const auto integers = [](std::vector<int32_t>& v) { return MakeTensor(v.data(), DType::kI32, static_cast<int64_t>(v.size())); };
  const auto shaped = [&](Tensor t) {
    t.shape[0] = step->layers, t.shape[1] = step->rows, t.shape[2] = step->groups;
    t.row_stride = step->rows * step->groups;
    return t;
  };
  AdvanceListsArgs args;
  args.positions = arrays.Out(integers(step->positions));
  args.slots = arrays.Out(shaped(MakeTensor(step->slots.data(), DType::kBytes, 1)), sizeof(PageRef));
  args.visible_end = arrays.Out(shaped(integers(step->visible_end)));
  args.list_begin = arrays.In(integers(step->list_begin));
  args.list_end = arrays.Out(integers(step->list_end));
  args.pages = arrays.Out(MakeTensor(step->pages.data(), DType::kBytes, static_cast<int64_t>(step->pages.size())), sizeof(PageRef));
  if (!step->tails.empty()) {
    args.tails = arrays.In(MakeTensor(step->tails.data(), DType::kBytes, static_cast<int64_t>(step->tails.size())), sizeof(TailPage));
  }
  backend.AdvanceLists(args, arrays.stream());
  arrays.Finish();
}

TEST(AdvanceLists, GivesTheNextStepsArrays) {
  for (const Target& target : UsableTargets()) {
    for (const auto& [layers, rows, groups] : {std::tuple{1, 1, 1}, std::tuple{2, 3, 2}, std::tuple{3, 17, 5}}) {
      std::mt19937 random(5);
      uint32_t unit = 0;
      const auto page = [&](int count, bool small) { return MakePageRef(++unit, count, PageClass{PageFormat{}, small, false}); };
      std::vector<std::vector<PageRef>> lists;
      const int lengths[] = {1, 15, 16, 17, 63, 64, 65, 79, 80, 127, 128, 130};
      for (int i = 0; i < layers * rows * groups; ++i) {
        const int length = lengths[random() % std::size(lengths)];
        std::vector<PageRef>& list = lists.emplace_back();
        for (int left = length; left > 0; left -= kPageEntries) {
          list.push_back(page(std::min(left, kPageEntries), left <= kSmallPageEntries));
        }
      }
      std::vector<int32_t> positions;
      for (int r = 0; r < rows; ++r) positions.push_back(static_cast<int32_t>(random() % 1000));
      Step step = Build(layers, rows, groups, lists, positions);
      // Enough to begin two pages: every length meets every border, and the room is used.
      for (int n = 0; n < 2 * kPageEntries + 10; ++n) {
        step.tails.clear();
        for (size_t i = 0; i < lists.size(); ++i) {
          PageRef& last = lists[i].back();
          if (last.small && last.count == kSmallPageEntries) {
            last = page(kSmallPageEntries + 1, false);
            step.tails.push_back({static_cast<int32_t>(i), last});
          } else if (last.count == kPageEntries) {
            lists[i].push_back(page(1, random() % 2 == 0));
            step.tails.push_back({static_cast<int32_t>(i), lists[i].back()});
          } else {
            ++last.count;
          }
        }
        for (int32_t& p : positions) ++p;
        Advance(target, &step);
        const Step want = Build(layers, rows, groups, lists, positions);
        ASSERT_EQ(step.positions, want.positions) << target << " step " << n;
        ASSERT_EQ(step.visible_end, want.visible_end) << target << " step " << n;
        ASSERT_TRUE(Same(step.slots, want.slots.data())) << target << " step " << n;
        for (size_t i = 0; i < lists.size(); ++i) {
          const size_t begin = static_cast<size_t>(step.list_begin[i + i / static_cast<size_t>(rows * groups)]);
          ASSERT_EQ(static_cast<size_t>(step.list_end[i]), begin + lists[i].size()) << target << " step " << n;
          ASSERT_TRUE(Same(lists[i], step.pages.data() + begin)) << target << " step " << n << " list " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace loupe::testing
