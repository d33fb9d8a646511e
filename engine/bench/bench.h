// The speed yardsticks behind `loupe bench`: decode and prefill drive the model pass and the cache directly, serve
// drives the whole engine with concurrent streams. The results of the first two carry what moved and how far that is from
// the memory limit of the same machine: its read bandwidth, measured before and after, the better of the two.
// Single-threaded callers; nothing else should run meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/load/load_model.h"
#include "kvcache/policies/policy.h"

namespace loupe {

struct BenchOptions {
  int context = 0;  // tokens in the cache before the measured part (decode), or of the prompt (prefill, serve)
  int tokens = 64;  // measured decode steps, or tokens generated a stream
  int batch = 1;    // sequences side by side, or concurrent streams
  int repeat = 3;
  int max_step_tokens = 512;
  std::string format = "dense";  // of all entries (decode)
  const Policy* policy = &FullPolicy();  // whose signals are collected (prefill)
};

struct BenchResult {
  std::string name;         // decode, prefill, serve
  double time_us = 0;       // of a step (decode), of the prompt (prefill), of the whole run (serve): median of repeats
  double tokens_per_s = 0;
  // decode, prefill
  double host_us = 0;       // of a step, until the device had been told everything (decode)
  double bytes = 0;         // read from memory in that time, modelled
  double flops = 0;         // multiply-adds count two
  double gbps = 0;          // bytes / time
  double limit_gbps = 0;    // measured read bandwidth
  double share_of_limit = 0;  // beyond 1 where caches hold what was read, or the machine was busy while its limit was measured
  // serve
  double first_token_ms_p50 = 0, first_token_ms_p95 = 0;
};

// Read bandwidth in GB/s of the backend over a buffer far larger than the caches, best of a few passes.
absl::StatusOr<double> MeasureReadBandwidth(Backend& backend);

// INVALID_ARGUMENT: a format that is none, or that the model's heads cannot have. Of all three: more tokens than the
// model's context holds, with both numbers.
absl::StatusOr<BenchResult> BenchDecode(LoadedModel& model, const BenchOptions& options);
absl::StatusOr<BenchResult> BenchPrefill(LoadedModel& model, const BenchOptions& options);
// Consumes the model.
absl::StatusOr<BenchResult> BenchServe(LoadedModel model, EngineConfig config, const BenchOptions& options);

}  // namespace loupe
