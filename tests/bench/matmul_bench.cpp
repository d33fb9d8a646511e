// Time of all matrices of a decoder of the default model's shape (30 layers of width 576, vocabulary 49,152) at several
// numbers of rows, beside what memory allows. Usage: matmul_bench [threads [isa [type]]], type one of F32 F16 BF16 Q8_0
// Q4_0 Q4_1. With one thread the time is CPU time. Not part of the tests: figures depend on the machine and on what
// else runs.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "tests/kernels/quantise_blocks.h"
#include "tests/kernels/reference.h"

namespace loupe::testing {
namespace {

// CPU time of the process: with one thread it is the time that the work would take on a machine without other load.
double CpuSeconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

bool g_cpu_time = false;

double Now() {
  if (g_cpu_time) return CpuSeconds();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double BestSeconds(const std::function<void()>& work, double budget_s) {
  double best = 1e9;
  double total = 0;
  for (int i = 0; i < 3 || total < budget_s; ++i) {
    const double begin = Now();
    work();
    const double seconds = Now() - begin;
    best = std::min(best, seconds);
    total += seconds;
  }
  return best;
}

// Bytes a second that the threads read from memory, over a buffer far larger than the caches.
double MemoryBandwidth(Backend& backend, int threads) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  auto buffer = backend.Allocate(kBytes);
  LOUPE_CHECK(buffer.ok()) << buffer.status().ToString();
  std::memset((*buffer)->data(), 1, kBytes);
  ThreadPool pool(threads);
  std::vector<uint64_t> sums(static_cast<size_t>(threads) * 8);
  const auto read = [&](int thread) {
    const auto [begin, end] = pool.Share(kBytes / 64, thread);
    const auto* words = static_cast<const uint64_t*>((*buffer)->data());
    uint64_t sum[8] = {};
    for (int64_t i = begin * 8; i < end * 8; i += 8) {
      __builtin_prefetch(words + i + 1024);  // as far ahead as the kernels do
      for (int j = 0; j < 8; ++j) sum[j] += words[i + j];
    }
    for (const uint64_t s : sum) sums[static_cast<size_t>(thread) * 8] += s;
  };
  return kBytes / BestSeconds([&] { pool.Run(read); }, .5);
}

struct Shape {
  int64_t rows, cols, layers;
};

int Main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  g_cpu_time = threads == 1;
  const std::string isa = argc > 2 ? argv[2] : "avx512";
  const char* const names[] = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"};
  WeightType type = WeightType::kQ4_1;
  for (int i = 0; i < 6; ++i) {
    if (argc > 3 && std::string(argv[3]) == names[i]) type = kAllWeightTypes[i];
  }
  const auto backend = *TryBackend(isa, false, threads);
  auto stream = backend->NewStream();
  std::mt19937 random(1);
  struct Layer {
    std::unique_ptr<Weight> weight;
  };
  std::vector<Layer> layers;
  int64_t bytes = 0, elements = 0;
  for (const Shape& s :
       {Shape{960, 576, 30}, Shape{576, 576, 30}, Shape{3072, 576, 30}, Shape{576, 1536, 30}, Shape{49152, 576, 1}}) {
    const OwnedMatrix m = Quantise(type, RandomFloats(s.rows * s.cols, random), s.rows, s.cols);
    for (int64_t i = 0; i < s.layers; ++i) {
      auto weight = backend->PackWeight(std::vector<HostMatrix>{m.view()});
      LOUPE_CHECK(weight.ok()) << weight.status().ToString();
      bytes += (*weight)->bytes();
      elements += s.rows * s.cols;
      layers.push_back({*std::move(weight)});
    }
  }
  const double bandwidth = MemoryBandwidth(*backend, threads);
  std::printf("%s, %s, %.1f MB of weights, memory %.1f GB/s\n", backend->Info().detail.c_str(),
              names[static_cast<int>(type)], static_cast<double>(bytes) / 1e6, bandwidth / 1e9);
  std::vector<float> x = RandomFloats(512 * 1536, random), out(512 * 49152);
  for (const bool prompt : {false, true}) {
    for (const int64_t rows : {1, 2, 4, 8, 16, 32, 128, 512}) {
      if (prompt && rows < 16) continue;
      const double seconds = BestSeconds(
          [&] {
            for (const Layer& layer : layers) {
              if (prompt && layer.weight->rows() == 49152) continue;  // prompts want the logits of one row only
              MatMulArgs args;
              args.weight = layer.weight.get();
              args.x = MakeTensor(x.data(), DType::kF32, rows, layer.weight->cols());
              args.out = MakeTensor(out.data(), DType::kF32, rows, layer.weight->rows());
              args.prompt_rows = prompt ? static_cast<int>(rows) : 0;
              backend->MatMul(args, *stream);
            }
          },
          .4);
      const double work =
          static_cast<double>(prompt ? elements - 49152 * 576 : elements) * 2 * static_cast<double>(rows);
      std::printf("%s %4d rows: %9.0f us, %7.0f rows/s, %6.1f GB/s (%3.0f %% of memory), %7.1f GFLOP/s\n",
                  prompt ? "prompt" : "decode", static_cast<int>(rows), seconds * 1e6,
                  static_cast<double>(rows) / seconds, static_cast<double>(bytes) / seconds / 1e9,
                  100 * static_cast<double>(bytes) / seconds / bandwidth, work / seconds / 1e9);
    }
  }
  return 0;
}

}  // namespace
}  // namespace loupe::testing

int main(int argc, char** argv) { return loupe::testing::Main(argc, argv); }
