#include "kvcache/policies/spherical_decode.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace loupe {
namespace {

// What the lists of the default model lose on average (docs/quality.md), for models without a profile.
constexpr ListCosts kTypical = {{5e-4, 1.1e-4, 2e-5}, {8e-5, 1.7e-5, 4e-6}, {1.1e-3, 1.9e-3, 2.4e-3, 3e-3, 3.4e-3, 5e-3}};

// Open entries of a list that are stored alike, as many as a page has.
struct Page {
  int list = 0;
  std::vector<int32_t> entries;
  double weight = 0;  // its part of the attention that all open entries of the list get
};

int64_t BytesOf(const PlanShape& shape, const PageFormat& format, size_t count) {
  return shape.in_entries ? static_cast<int64_t>(count) : shape.context->RunBytes(format, static_cast<int64_t>(count));
}

int BitsOf(Codec codec) { return IsCoded(codec) ? CodecBits(codec) : 16; }

std::vector<Page> PagesOf(int list, const HeldList& held) {
  std::vector<Page> pages;
  double sum = 0;
  for (size_t e = 0, last = 0; e < held.formats.size(); ++e) {
    if (!held.open[e]) continue;
    const bool goes_on = !pages.empty() && pages.back().entries.size() < static_cast<size_t>(kPageEntries) &&
                         held.formats[last] == held.formats[e];
    if (!goes_on) pages.push_back({list, {}, 0});
    pages.back().entries.push_back(static_cast<int32_t>(e));
    // Nobody looked at it so far, but may.
    const double score = double{held.scores[e]} + 1e-6;
    pages.back().weight += score, sum += score, last = e;
  }
  for (Page& page : pages) page.weight /= sum;
  return pages;
}

// The page as it is, with fewer bits, or gone.
ListOptions OptionsOf(const Page& page, const PageFormat& now, const ListCosts& costs, const PlanShape& shape,
                      const SphericalLimits& limits) {
  constexpr std::pair<int, int> kBits[] = {{8, 8}, {8, 4}, {4, 4}, {4, 3}, {4, 2}, {3, 3}, {3, 2}, {2, 2}};
  const int count = static_cast<int>(page.entries.size()), key_now = BitsOf(now.key), value_now = BitsOf(now.value);
  ListOptions options = {{now, count, BytesOf(shape, now, page.entries.size()), page.weight * CostOfBits(costs, key_now, value_now)}};
  for (const auto& [key, value] : kBits) {
    if (key > key_now || value > value_now || (key == key_now && value == value_now) || !Allowed(limits, key, value)) continue;
    const PageFormat format = FormatOf(key, value, shape.context->dense);
    options.push_back({format, count, BytesOf(shape, format, page.entries.size()), page.weight * CostOfBits(costs, key, value)});
  }
  options.push_back({now, 0, 0, page.weight * CostOfShare(costs, 0)});
  return options;
}

}  // namespace

int64_t SizeOf(std::span<const HeldList> lists, const PlanShape& shape) {
  int64_t size = 0;
  for (const HeldList& list : lists) {
    std::map<int, std::pair<PageFormat, size_t>> runs;
    for (const auto& format : list.formats) {
      if (!format) continue;
      auto& run = runs[static_cast<int>(format->key) * kNumCodecs + static_cast<int>(format->value)];
      run.first = *format, ++run.second;
    }
    for (const auto& [key, run] : runs) size += BytesOf(shape, run.first, run.second);
  }
  return size;
}

void FitPages(std::span<const ListCosts> costs, const PlanShape& shape, const SphericalLimits& limits, int64_t size,
              std::vector<HeldList>* lists) {
  std::vector<Page> pages;
  std::vector<ListOptions> options;
  for (size_t i = 0; i < lists->size(); ++i) {
    for (Page& page : PagesOf(static_cast<int>(i), (*lists)[i])) {
      const PageFormat now = *(*lists)[i].formats[static_cast<size_t>(page.entries[0])];
      options.push_back(OptionsOf(page, now, costs.empty() ? kTypical : costs[i], shape, limits));
      pages.push_back(std::move(page));
    }
  }
  if (pages.empty()) return;
  int64_t left = 0;
  for (const ListOptions& page : options) left += page[0].bytes;
  // Pages that are not full may cost more together than one by one; then less is left than it seemed.
  for (int64_t over = SizeOf(*lists, shape) - size; over > 0 && left > 0; over = SizeOf(*lists, shape) - size) {
    left = std::max<int64_t>(0, left - over);
    const std::vector<int> chosen = ChooseOptions(options, left);
    for (size_t i = 0; i < pages.size(); ++i) {
      const SphericalOption& option = options[i][static_cast<size_t>(chosen[i])];
      for (const int32_t entry : pages[i].entries) {
        auto& format = (*lists)[static_cast<size_t>(pages[i].list)].formats[static_cast<size_t>(entry)];
        format = option.kept > 0 ? std::optional(option.format) : std::nullopt;
      }
    }
  }
}

}  // namespace loupe
