// Attention alone, on random pages: `loupe bench attention`. Also the read speed of a device's memory, which every other
// figure is held against. Nothing else should run meanwhile.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/bench/bench.h"
#include "kernels/backend.h"
#include "kvcache/kv_config.h"

namespace loupe {

// Of a list's pages, this share is stored so.
struct FormatShare {
  PageFormat format;
  double share = 1;
};

// By name: dense (none), s8, s4, s3, s2, s4v2 and the like (kvcache/page_format.h), or mixed: 25 % s8, 60 % s4, 15 % s2.
// INVALID_ARGUMENT for others.
absl::StatusOr<std::vector<FormatShare>> FormatSharesByName(const std::string& name);

struct AttentionCase {
  int num_heads = 32, num_kv_heads = 8, head_dim = 128;
  int batch = 1;
  int context = 1024;   // entries of a list
  int prompt_rows = 0;  // 0: one decode row a sequence; else that many last positions as prompt rows
  int repeat = 10;
  std::vector<FormatShare> formats;  // none: all dense; else a run of pages each, which the device itself has coded
};

// Bytes: the pages' entries in sight with their scales, once. Flops: 4 D a (query head, entry in sight).
absl::StatusOr<BenchResult> BenchAttention(Backend& backend, const AttentionCase& c);

}  // namespace loupe
