// Runs a prompt whose queries and keys are given through a cache with a policy, in any chunks, and goes on with random
// tokens. What a policy keeps is then read from the lists. One thread, exact arithmetic.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "kvcache/kv_cache.h"
#include "kvcache/policies/strategy.h"
#include "tests/support/profiles.h"
#include "tests/support/strategies.h"

namespace loupe {

struct PolicyShape {
  int layers = 2, heads = 4, groups = 2, dim = 16;
  std::vector<int> windows = {};  // [layers]
};

// Queries [layers][rows, H, D] and keys [layers][rows, G, D].
struct Rows {
  std::vector<std::vector<float>> q, k;
};

inline Rows RandomRows(const PolicyShape& shape, int rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1.2f);
  Rows out;
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (auto [to, heads] : {std::pair{&out.q, shape.heads}, {&out.k, shape.groups}}) {
      std::vector<float>& values = to->emplace_back(static_cast<size_t>(rows * heads * shape.dim));
      for (float& x : values) x = normal(random);
    }
  }
  return out;
}

class PolicyRun {
 public:
  explicit PolicyRun(const PolicyShape& shape, int64_t arena_bytes = int64_t{64} << 20) : shape_(shape) {
    backend_ = MakeBackend({.device = "cpu", .num_threads = 1, .exact = true, .isa = ""}).value();
    stream_ = backend_->NewStream();
    KvShape kv;
    kv.num_layers = shape.layers, kv.num_heads = shape.heads, kv.num_kv_heads = shape.groups, kv.head_dim = shape.dim;
    kv.windows = shape.windows;
    KvConfig config;
    config.device_bytes = arena_bytes;
    cache_ = KvCache::Create(config, kv, *backend_).value();
    strategies_ = {testing::RandomStrategy(shape.layers, shape.groups)};
  }

  absl::StatusOr<std::unique_ptr<Policy>> Make(const KvOptions& options, int prompt) const {
    PolicyContext context = cache_->policy_context(prompt);
    context.allow_baselines = true;
    context.strategies = strategies_;
    context.profiles = profiles_;
    return MakePolicy(options, context);
  }

  // `policy` outlives the sequence.
  SeqId Prefill(const Policy& policy, const Rows& rows, int prompt, int chunk) {
    const SeqId seq = cache_->Open(policy).value();
    for (int at = 0; at < prompt; at += chunk) {
      const int n = std::min(chunk, prompt - at);
      Step({seq, n, 0, at + n == prompt}, rows, at);
    }
    return seq;
  }
  // `rows` from `at` on become the sequence's next ones. Attention's output in the last layer.
  std::vector<float> Step(const KvStepItem& item, const Rows& rows, int at) {
    const int n = item.num_prompt_rows + item.num_decode_rows;
    KvBatch batch;
    const absl::Status status = cache_->Reserve(std::span(&item, 1), &batch);
    LOUPE_CHECK(status.ok()) << status.ToString();
    std::vector<float> out(static_cast<size_t>(n * shape_.heads * shape_.dim));
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const auto tensor = [&](const std::vector<float>& values, int heads) {
        Tensor t = MakeTensor(const_cast<float*>(values.data()) + int64_t{at} * heads * shape_.dim, DType::kF32, n, heads, shape_.dim);
        t.rank = 3;
        return t;
      };
      const Tensor k = tensor(rows.k[static_cast<size_t>(layer)], shape_.groups);
      cache_->Append(batch, layer, k, k, *stream_);
      cache_->Attend(batch, layer, tensor(rows.q[static_cast<size_t>(layer)], shape_.heads),
                     MakeTensor(out.data(), DType::kF32, n, shape_.heads, shape_.dim), *stream_);
    }
    cache_->Commit(batch, *stream_);
    cache_->Audit();
    return out;
  }

  // [layers][groups] positions, ascending.
  std::vector<std::vector<std::vector<int32_t>>> Kept(SeqId seq) const {
    std::vector<std::vector<std::vector<int32_t>>> kept(static_cast<size_t>(shape_.layers));
    for (int layer = 0; layer < shape_.layers; ++layer) {
      for (int g = 0; g < shape_.groups; ++g) {
        kept[static_cast<size_t>(layer)].push_back(cache_->ListPositions(seq, layer, g));
        std::sort(kept[static_cast<size_t>(layer)].back().begin(), kept[static_cast<size_t>(layer)].back().end());
      }
    }
    return kept;
  }
  KvCache& cache() { return *cache_; }
  std::vector<SeqId> TakeFaults() { return cache_->TakeFaults(*stream_); }
  Stream& stream() { return *stream_; }
  // For polykv; a random one unless said otherwise.
  void Use(std::shared_ptr<const Strategy> strategy) { strategies_ = {std::move(strategy)}; }
  // For spherical; none unless said otherwise.
  void Use(std::shared_ptr<const SphericalProfile> profile) { profiles_ = {std::move(profile)}; }
  const PolicyShape& shape() const { return shape_; }

 private:
  PolicyShape shape_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  std::vector<std::shared_ptr<const Strategy>> strategies_;
  std::vector<std::shared_ptr<const SphericalProfile>> profiles_;
};

}  // namespace loupe
