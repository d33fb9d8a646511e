// The score of SnapKV (Li et al., arXiv 2404.14469), which AdaKV, PyramidKV and ChunkKV share: what an entry gets from the
// last rows of the prompt, pooled over its neighbours.
#pragma once

#include <memory>
#include <vector>

#include "kvcache/policies/eviction.h"

namespace loupe {

struct SnapOptions {
  int window = 64;       // query rows
  int kernel = 5;        // entries that are pooled, odd
  bool max_pool = false;
};

// The parameters window, kernel and pool.
std::vector<ParamSpec> SnapParams();
SnapOptions SnapOptionsOf(const KvOptions& options);

// score(t) = mean over the heads of a group of pool(mean over the rows that can see t of p(row, t)). Entries among the
// `recent` last positions are protected by the caller: they score 0 and are no neighbours.
std::unique_ptr<Scorer> MakeSnapScorer(const SnapOptions& options, int recent);

}  // namespace loupe
