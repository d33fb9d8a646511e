#include "engine/bench/sample.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <vector>

#include "kernels/mirrored_buffer.h"

namespace loupe {
namespace {

constexpr int kLaunches = 20;  // of a timed run

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

absl::StatusOr<BenchResult> BenchSample(Backend& backend, const SampleCase& c) {
  const int64_t values = int64_t{c.rows} * c.vocab;
  MirroredBuffer logits, rows, out;
  absl::Status s = logits.Ensure(backend, values * 4);
  if (s.ok()) s = rows.Ensure(backend, c.rows * int64_t{sizeof(SampleRow)});
  if (s.ok()) s = out.Ensure(backend, c.rows * int64_t{sizeof(SampledRow)});
  if (!s.ok()) return s;
  const std::unique_ptr<Stream> stream = backend.NewStream();
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, c.spread);
  for (int64_t i = 0; i < values; ++i) logits.host<float>()[i] = normal(random);
  for (int i = 0; i < c.rows; ++i) {
    SampleRow row;
    row.logits = i;
    row.temperature = c.temperature, row.top_p = c.top_p;
    row.u = static_cast<double>(random()) / 4294967296.0;
    rows.host<SampleRow>()[i] = row;
  }
  logits.Upload(backend, 0, logits.bytes(), *stream);
  rows.Upload(backend, 0, rows.bytes(), *stream);
  SampleArgs args;
  args.logits = MakeTensor(logits.device<float>(), DType::kF32, c.rows, c.vocab);
  args.rows = MakeTensor(rows.device<char>(), DType::kBytes, c.rows);
  args.out = MakeTensor(out.device<char>(), DType::kBytes, c.rows);
  const auto run = [&] {
    for (int i = 0; i < kLaunches; ++i) backend.Sample(args, *stream);
  };
  backend.Sample(args, *stream);
  if (s = stream->Synchronize(); !s.ok()) return s;
  const std::unique_ptr<OpGraph> graph = backend.Record(run, *stream);
  std::vector<double> times;
  for (int i = 0; i <= c.repeat; ++i) {
    const double start = Seconds();
    graph ? graph->Launch(*stream) : run();
    if (s = stream->Synchronize(); !s.ok()) return s;
    if (i > 0) times.push_back((Seconds() - start) / kLaunches);
  }
  std::sort(times.begin(), times.end());
  BenchResult result;
  result.name = "sample";
  result.time_us = times[times.size() / 2] * 1e6;
  result.bytes = static_cast<double>(values) * 4;
  result.gbps = result.bytes / result.time_us * 1e-3;
  return result;
}

}  // namespace loupe
