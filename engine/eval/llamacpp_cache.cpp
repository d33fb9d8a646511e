#include "engine/eval/llamacpp_cache.h"

#include <algorithm>
#include <cmath>

#include "kernels/half.h"

namespace loupe {
namespace {

constexpr size_t kBlock = 32;

float ToHalfAndBack(float x) { return HalfToFloat(FloatToHalf(x)); }

// d = largest / 127, codes round(x / d).
void RoundQ8(std::span<float> x) {
  float largest = 0;
  for (const float v : x) largest = std::max(largest, std::abs(v));
  const float d = largest / 127, inverse = d > 0 ? 1 / d : 0, stored = ToHalfAndBack(d);
  for (float& v : x) v = stored * std::round(v * inverse);
}

// d = the value of largest magnitude / -8, codes floor(x / d + 8.5) in [0, 15].
void RoundQ4(std::span<float> x) {
  float largest = 0;
  for (const float v : x) {
    if (std::abs(v) > std::abs(largest)) largest = v;
  }
  const float d = largest / -8, inverse = d != 0 ? 1 / d : 0, stored = ToHalfAndBack(d);
  for (float& v : x) v = stored * (std::min(15.f, std::floor(v * inverse + 8.5f)) - 8);
}

}  // namespace

std::optional<RivalBlock> RivalOf(const std::string& policy) {
  if (policy == "llamacpp-q8_0") return RivalBlock::kQ8_0;
  if (policy == "llamacpp-q4_0") return RivalBlock::kQ4_0;
  return std::nullopt;
}

double BytesRatio(RivalBlock block) { return block == RivalBlock::kQ8_0 ? 34.0 / 64 : 18.0 / 64; }

void RoundBlocks(RivalBlock block, std::span<float> x) {
  for (size_t at = 0; at < x.size(); at += kBlock) {
    const auto part = x.subspan(at, std::min(kBlock, x.size() - at));
    block == RivalBlock::kQ8_0 ? RoundQ8(part) : RoundQ4(part);
  }
}

absl::Status RoundCache(RivalBlock block, const std::vector<std::vector<float>>& keys, const std::vector<std::vector<float>>& values,
                        SeqId seq, KvCache& cache, Stream& stream) {
  const KvShape& shape = cache.shape();
  const size_t dim = static_cast<size_t>(shape.head_dim), stride = static_cast<size_t>(shape.num_kv_heads) * dim;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int g = 0; g < shape.num_kv_heads; ++g) {
      std::vector<float> rows[2];
      for (const auto& [from, to] : {std::pair{&keys, &rows[0]}, {&values, &rows[1]}}) {
        const std::vector<float>& all = (*from)[static_cast<size_t>(layer)];
        to->reserve(all.size() / static_cast<size_t>(shape.num_kv_heads));
        for (size_t at = static_cast<size_t>(g) * dim; at < all.size(); at += stride) {
          to->insert(to->end(), all.begin() + static_cast<std::ptrdiff_t>(at), all.begin() + static_cast<std::ptrdiff_t>(at + dim));
          RoundBlocks(block, std::span(*to).last(dim));
        }
      }
      if (absl::Status s = cache.Rewrite(seq, layer, g, rows[0], rows[1], stream); !s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

}  // namespace loupe
