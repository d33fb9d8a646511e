// Column sums of attention: looks pages up and shares the query heads out to the threads. Each head's column belongs to one
// thread, and rows are added in order, so threads and chunks cannot change a bit. Flops 2 * D a (row, head, entry); compute
// is the limit. Step thread; cannot fail.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/attend_kernels.h"
#include "kernels/cpu/cpu_ops.h"

namespace loupe {
namespace {

using attend::Kernels;
using attend::PageView;

const Kernels& KernelsOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return attend::Avx512Kernels();
  if (isa == Isa::kAvx2) return attend::Avx2Kernels();
#endif
  (void)isa;
  return attend::PortableKernels();
}

// The pages of one list; entries are numbered through them.
void ViewPages(const SumAttentionArgs& args, int g, int head_dim, std::vector<PageView>* views) {
  const int32_t* list = args.list_begin.as<int32_t>() + g;
  views->clear();
  for (int32_t page = list[0], first = 0; page < list[1]; ++page, first += kPageEntries) {
    const PageRef& ref = args.pages.as<PageRef>()[page];
    const auto* data = static_cast<const uint8_t*>(args.arena) + int64_t{ref.unit} * kPageAlignment;
    const PageLayout layout = MakePageLayout(ref.page_class(), head_dim);
    PageView view;
    view.keys = data;
    view.values = data + layout.value_offset;
    if (ref.log_weights) view.log_weights = reinterpret_cast<const float*>(data + layout.log_weight_offset);
    view.key_scales = reinterpret_cast<const uint16_t*>(data + layout.key_scale_offset);
    view.count = ref.count;
    view.first = first;
    view.key_codec = ref.key_codec;
    view.value_codec = ref.value_codec;
    views->push_back(view);
  }
}

float* Scratch(int64_t floats) {
  static thread_local std::vector<float> memory;
  if (floats + 16 > static_cast<int64_t>(memory.size())) memory.resize(static_cast<size_t>(floats + floats / 2 + 16));
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

}  // namespace

void SumAttentionCpu(const SumAttentionArgs& args, CpuContext context) {
  const int heads = static_cast<int>(args.q.shape[1]), dim = static_cast<int>(args.q.shape[2]);
  const int groups = static_cast<int>(args.visible_begin.shape[1]);
  LOUPE_CHECK(dim > 0 && dim % 8 == 0 && dim <= attend::kMaxHeadDim) << "head size " << dim;
  LOUPE_CHECK(groups > 0 && heads % groups == 0) << heads << " query heads, " << groups << " kv heads";
  LOUPE_CHECK_EQ(args.visible_begin.row_stride, args.visible_end.row_stride);
  std::vector<std::vector<PageView>> pages(static_cast<size_t>(groups));
  for (int g = 0; g < groups; ++g) ViewPages(args, g, dim, &pages[static_cast<size_t>(g)]);
  const Kernels& kernels = KernelsOf(context.isa);
  std::atomic<int> next{0};
  context.pool.Run([&](int) {
    for (int h; (h = next.fetch_add(1, std::memory_order_relaxed)) < heads;) {
      const int g = h / (heads / groups);
      const std::vector<PageView>& views = pages[static_cast<size_t>(g)];
      if (views.empty()) continue;
      attend::ColumnJob job;
      job.q = args.q.as<float>() + int64_t{h} * dim;
      job.q_stride = args.q.row_stride;
      job.rows = static_cast<int>(args.q.rows());
      job.head_dim = dim;
      job.scale_log2e = args.scale * 1.44269504088896341f;
      job.pages = views.data();
      job.num_pages = static_cast<int>(views.size());
      job.visible_begin = args.visible_begin.as<int32_t>() + g;
      job.visible_end = args.visible_end.as<int32_t>() + g;
      job.visible_stride = args.visible_end.row_stride;
      if (args.sinks.defined()) job.sink = args.sinks.as<float>() + h;
      job.coded = std::any_of(views.begin(), views.end(), [](const PageView& v) { return IsCoded(static_cast<Codec>(v.key_codec)); });
      if (args.mean_keys.defined()) job.mean = args.mean_keys.row<float>(g);
      job.scratch = Scratch(attend::ColumnScratchFloats(job.num_pages));
      job.column = args.columns[h];
      kernels.columns(job);
    }
  });
}

}  // namespace loupe
