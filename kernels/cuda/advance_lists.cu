// A decode step's arrays become the next one's without the host.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 256;

struct Advance {
  int32_t* positions;
  PageRef* slots;
  int32_t* visible_end;
  const int32_t* list_begin;
  int32_t* list_end;
  PageRef* pages;
  const TailPage* tails;
  int rows, lists, all_lists, num_tails;  // lists: of a layer
};

__global__ void AdvanceKernel(const Advance p) {
  GridWait();
  GridLaunch();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < p.rows) ++p.positions[i];
  if (i >= p.all_lists) return;
  ++p.visible_end[i];
  const auto slot = static_cast<uint16_t>(p.slots[i].count + 1);
  p.slots[i].count = slot;
  p.pages[p.list_end[i] - 1].count = static_cast<uint16_t>(slot + 1);
}

__global__ void TailKernel(const Advance p) {
  GridWait();
  GridLaunch();
  const int tail = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (tail >= p.num_tails) return;
  const TailPage t = p.tails[tail];
  const int i = t.list;
  PageRef slot = t.page;
  slot.count = static_cast<uint16_t>(t.page.count - 1);
  p.slots[i] = slot;
  const int32_t last = p.list_begin[i + i / p.lists] + (p.visible_end[i] - 1) / kPageEntries;
  if (last > 0 && last == p.list_end[i]) p.pages[last - 1].count = kPageEntries;
  p.pages[last] = t.page;
  p.list_end[i] = last + 1;
}

}  // namespace

void AdvanceListsCuda(const AdvanceListsArgs& args, CudaContext context) {
  Advance p = {};
  p.positions = args.positions.as<int32_t>();
  p.slots = args.slots.as<PageRef>();
  p.visible_end = args.visible_end.as<int32_t>();
  p.list_begin = args.list_begin.as<int32_t>();
  p.list_end = args.list_end.as<int32_t>();
  p.pages = args.pages.as<PageRef>();
  p.rows = static_cast<int>(args.slots.shape[1]);
  p.lists = static_cast<int>(args.slots.shape[1] * args.slots.shape[2]);
  p.all_lists = static_cast<int>(args.slots.shape[0]) * p.lists;
  if (p.all_lists == 0) return;
  Launch(AdvanceKernel, Blocks(p.all_lists, kThreads), kThreads, 0, context.stream, p);
  if (!args.tails.defined() || args.tails.rows() == 0) return;
  p.tails = args.tails.as<TailPage>(), p.num_tails = static_cast<int>(args.tails.rows());
  Launch(TailKernel, Blocks(p.num_tails, kThreads), kThreads, 0, context.stream, p);
}

}  // namespace loupe::cuda
