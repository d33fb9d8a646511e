// Choosing tokens alone, from random logits. Nothing else should run meanwhile.
#pragma once

#include "absl/status/statusor.h"
#include "engine/bench/bench.h"
#include "kernels/backend.h"

namespace loupe {

struct SampleCase {
  int rows = 64;
  int vocab = 128256;
  float spread = 3;  // standard deviation of the logits: 3 leaves a few thousand tokens to top_p, 1 most of them
  float temperature = 1, top_p = 0.9f;
  int repeat = 10;
};

// Bytes: the logits, once.
absl::StatusOr<BenchResult> BenchSample(Backend& backend, const SampleCase& c);

}  // namespace loupe
