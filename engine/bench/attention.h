// Attention alone, on random pages: `loupe bench attention`. Also the read speed of a device's memory, which every other
// figure is held against. Nothing else should run meanwhile.
#pragma once

#include "absl/status/statusor.h"
#include "engine/bench/bench.h"
#include "kernels/backend.h"
#include "kvcache/kv_config.h"

namespace loupe {

struct AttentionCase {
  int num_heads = 32, num_kv_heads = 8, head_dim = 128;
  int batch = 1;
  int context = 1024;   // entries of a list
  int prompt_rows = 0;  // 0: one decode row a sequence; else that many last positions as prompt rows
  int repeat = 10;
};

// Bytes: the pages' entries in sight, once. Flops: 4 D a (query head, entry in sight).
absl::StatusOr<BenchResult> BenchAttention(Backend& backend, const AttentionCase& c);

}  // namespace loupe
