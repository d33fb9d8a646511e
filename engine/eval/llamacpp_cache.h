// The 8- and 4-bit KV caches of llama.cpp as rivals in `loupe eval`: what their blocks make of keys and values, simulated on a
// dense cache. Policies llamacpp-q8_0 and llamacpp-q4_0 exist in eval alone. The prompt is computed exactly and rounded at its
// end, generated entries stay exact: both flatter them. Pure but for RoundCache, any thread.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvcache/kv_cache.h"

namespace loupe {

// Blocks of 32 values with one fp16 scale, as GGUF defines them.
enum class RivalBlock : uint8_t { kQ8_0, kQ4_0 };

// Nothing for other policies.
std::optional<RivalBlock> RivalOf(const std::string& policy);
// Of a value of 16 bits, scales included.
double BytesRatio(RivalBlock block);
// `x` becomes what its blocks stand for.
void RoundBlocks(RivalBlock block, std::span<float> x);

// Rounds all entries of a sequence whose lists are complete and dense. `keys` and `values`: [layers][entries, G, D] as they were
// appended.
absl::Status RoundCache(RivalBlock block, const std::vector<std::vector<float>>& keys, const std::vector<std::vector<float>>& values,
                        SeqId seq, KvCache& cache, Stream& stream);

}  // namespace loupe
