// Times attention alone: `attend_bench [threads] [instruction set] [format]`, over dense pages and pages of each format of
// spherical codes; with a format its decode rows alone. Decode prints the bytes of the visible pages over the time, beside
// what a plain read of memory reaches in the same run; prefill prints flops over the time. Inputs are random, and many
// layers' worth of pages are rotated, so that decode reads memory and not the cache. A time is the one that nine of ten
// runs exceed, since neighbours on the machine only ever make a run slower.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_ops.h"

namespace loupe {
namespace {

constexpr int kDim = 64, kHeads = 9, kGroups = 3;
constexpr std::pair<const char*, PageFormat> kFormats[] = {
    {"dense", {}},
    {"s8", {Codec::kS8, Codec::kS8}},
    {"s4", {Codec::kS4, Codec::kS4}},
    {"s4v2", {Codec::kS4, Codec::kS2}},
    {"s3", {Codec::kS3, Codec::kS3}},
    {"s2", {Codec::kS2, Codec::kS2}},
};

double Seconds(const std::function<void(int)>& work, int repeats) {
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work(i);
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return times[static_cast<size_t>(repeats / 10)];
}

// Lists of `entries` entries, `copies` times over.
struct Pages {
  std::unique_ptr<DeviceBuffer> arena;
  std::vector<std::vector<PageRef>> tables;  // a copy's lists behind each other
  std::vector<int32_t> list_begin;
};

Pages MakePages(Backend& backend, const PageFormat& format, int entries, int copies) {
  Pages pages;
  const PageClass page_class{format, false, false};
  const int per_list = (entries + kPageEntries - 1) / kPageEntries;
  const int64_t bytes = MakePageLayout(page_class, kDim).bytes;
  auto arena = backend.Allocate(bytes * per_list * kGroups * copies);
  if (!arena.ok()) {
    std::fprintf(stderr, "%s\n", arena.status().ToString().c_str());
    std::exit(1);
  }
  pages.arena = std::move(*arena);
  auto* at = static_cast<uint64_t*>(pages.arena->data());
  std::mt19937_64 random(1);
  // Halfs of magnitude 1 to 2, or any codes; of these only scales have to be halfs, which as such are no special numbers.
  for (int64_t i = 0, n = pages.arena->bytes() / 8; i < n; ++i) {
    at[i] = 0x3c003c003c003c00u | (random() & 0x83ff83ff83ff83ffu);
  }
  uint32_t unit = 0;
  for (int copy = 0; copy < copies; ++copy) {
    std::vector<PageRef> table;
    for (int g = 0; g < kGroups; ++g) {
      for (int i = 0; i < per_list; ++i, unit += static_cast<uint32_t>(bytes / kPageAlignment)) {
        table.push_back(MakePageRef(unit, std::min(kPageEntries, entries - i * kPageEntries), page_class));
      }
    }
    std::shuffle(table.begin(), table.end(), random);
    pages.tables.push_back(table);
  }
  for (int g = 0; g <= kGroups; ++g) pages.list_begin.push_back(g * per_list);
  return pages;
}

void Attend(const Pages& pages, int copy, int rows, bool prompt, int entries, CpuContext context) {
  static std::vector<float> q, out;
  static std::vector<int32_t> sequence, begin, end;
  const auto count = static_cast<size_t>(rows);
  q.resize(count * kHeads * kDim, 0.1f), out.resize(q.size());
  sequence.assign(count, 0), begin.assign(count * kGroups, 0), end.clear();
  for (int row = 0; row < rows; ++row) end.insert(end.end(), kGroups, entries - rows + row + 1);
  const std::vector<PageRef>& table = pages.tables[static_cast<size_t>(copy)];
  AttendArgs args;
  args.q = MakeTensor(q.data(), DType::kF32, rows, kHeads, kDim);
  args.out = MakeTensor(out.data(), DType::kF32, rows, kHeads, kDim);
  args.row_sequence = MakeTensor(sequence.data(), DType::kI32, rows);
  args.pages = MakeTensor(const_cast<PageRef*>(table.data()), DType::kBytes, static_cast<int64_t>(table.size()));
  args.list_begin = MakeTensor(const_cast<int32_t*>(pages.list_begin.data()), DType::kI32, kGroups + 1);
  args.visible_begin = MakeTensor(begin.data(), DType::kI32, rows, kGroups);
  args.visible_end = MakeTensor(end.data(), DType::kI32, rows, kGroups);
  args.arena = pages.arena->data();
  args.scale = 0.125f;
  args.coded = IsCoded(table[0].page_class().format.key);
  args.prompt_rows = prompt ? rows : 0;
  AttendCpu(args, context);
}

double ReadBandwidth(const DeviceBuffer& buffer, ThreadPool& pool) {
  std::vector<uint64_t> sums(static_cast<size_t>(pool.size()) * 8);
  const double seconds = Seconds([&](int) {
    pool.Run([&](int thread) {
      const auto [from, to] = pool.Share(buffer.bytes() / 64, thread);
      const auto* at = static_cast<const uint64_t*>(buffer.data());
      uint64_t a = 0, b = 0, c = 0, d = 0;
      for (int64_t i = from; i < to; ++i, a += at[i * 8], b += at[i * 8 + 2], c += at[i * 8 + 4], d += at[i * 8 + 6]) {
      }
      sums[static_cast<size_t>(thread) * 8] = a + b + c + d;
    });
  }, 5);
  return static_cast<double>(buffer.bytes()) / seconds * 1e-9;
}

void Run(int threads, const std::string& only, const std::string& only_format) {
  BackendOptions options;
  options.num_threads = threads;
  auto backend = MakeBackend(options);
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    std::exit(1);
  }
  ThreadPool pool(threads);
  for (const Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kPortable}) {
    if (isa > DetectIsa() || (!only.empty() && only != IsaName(isa))) continue;
    const CpuContext context{pool, isa, false};
    std::printf("%s, %d threads, %d query and %d kv heads of %d\n", IsaName(isa), threads, kHeads, kGroups, kDim);
    for (const auto& [name, format] : kFormats) {
      if (!only_format.empty() && only_format != name) continue;
      for (const int entries : {2048, 8000}) {
        const int copies = std::max(2, 800000 / entries);
        const Pages pages = MakePages(**backend, format, entries, copies);
        const double limit = ReadBandwidth(*pages.arena, pool);
        const double seconds = Seconds([&](int i) { Attend(pages, i % copies, 1, false, entries, context); }, 400);
        const double bytes = static_cast<double>(CodecBytes(format.key, kDim) + CodecBytes(format.value, kDim)) * kGroups * entries;
        std::printf("  decode %5s at %4d: %7.1f us, %5.2f MB, %5.1f GB/s of %5.1f (%.0f %%)\n", name, entries, seconds * 1e6, bytes * 1e-6,
                    bytes / seconds * 1e-9, limit, bytes / seconds * 1e-7 / limit);
      }
    }
    if (!only_format.empty()) continue;
    for (const auto& [name, format] : kFormats) {
      const int rows = 2048;
      const Pages pages = MakePages(**backend, format, rows, 1);
      const double seconds = Seconds([&](int) { Attend(pages, 0, rows, true, rows, context); }, isa == Isa::kPortable ? 1 : 15);
      const double flops = 4.0 * kDim * kHeads * (0.5 * rows * (rows + 1));
      std::printf("  prefill %5s of %d: %7.2f ms, %.0f GFLOP/s\n", name, rows, seconds * 1e3, flops / seconds * 1e-9);
    }
    for (const bool exact : {false, true}) {
      const int rows = 2048;
      const Pages pages = MakePages(**backend, {}, rows, 1);
      const double seconds = Seconds([&](int) { Attend(pages, 0, rows, true, rows, {pool, isa, exact}); }, isa == Isa::kPortable ? 1 : 15);
      const double flops = 4.0 * kDim * kHeads * (0.5 * rows * (rows + 1));
      std::printf("  prefill of %d%s: %7.2f ms, %.0f GFLOP/s\n", rows, exact ? " exact" : "", seconds * 1e3, flops / seconds * 1e-9);
    }
  }
}

}  // namespace
}  // namespace loupe

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  if (threads < 1 || threads > 512) {
    std::fprintf(stderr, "error: %s threads; usage: attend_bench [threads, 1 to 512] [avx512 | avx2 | portable] [format]\n", argv[1]);
    return 2;
  }
  loupe::Run(threads, argc > 2 ? argv[2] : "", argc > 3 ? argv[3] : "");
  return 0;
}
