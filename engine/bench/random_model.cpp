#include "engine/bench/random_model.h"

#include <algorithm>
#include <bit>
#include <map>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/weights.h"

namespace loupe {
namespace {

constexpr float kDeviation = 0.02f;  // of a weight: what such models are initialised with

// Every matrix is a piece of one series of random bf16 numbers; norm vectors are ones.
class RandomWeights : public WeightSource {
 public:
  explicit RandomWeights(const ModelConfig& config) {
    int64_t largest = 0;
    for (TensorSpec& spec : ExpectedTensors(config)) {
      largest = std::max(largest, spec.rows * spec.cols);
      ones_.resize(std::max<size_t>(ones_.size(), spec.rows == 1 ? static_cast<size_t>(spec.cols) : 0), 1.0f);
      specs_.emplace(spec.name, spec);
    }
    series_.resize(static_cast<size_t>(largest + kShift * static_cast<int64_t>(specs_.size())));
    std::mt19937_64 random(1);
    // Sums of four bytes are close to normal, and cheap.
    for (size_t i = 0; i + 2 <= series_.size(); i += 2) {
      const uint64_t bits = random();
      for (size_t half = 0; half < 2; ++half) {
        int sum = 0;
        for (int byte = 0; byte < 4; ++byte) sum += static_cast<int>(bits >> (32 * half + 8 * byte) & 255);
        const float value = (static_cast<float>(sum) - 510.0f) / 148.0f * kDeviation;
        series_[i + half] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
      }
    }
  }

  std::optional<HostMatrix> Find(std::string_view name) const override {
    const auto found = specs_.find(name);
    if (found == specs_.end()) return std::nullopt;
    const TensorSpec& spec = found->second;
    if (spec.rows == 1) return HostMatrix{WeightType::kF32, 1, spec.cols, ones_.data()};
    const auto begin = static_cast<size_t>(kShift * std::distance(specs_.begin(), found));
    return HostMatrix{WeightType::kBF16, spec.rows, spec.cols, series_.data() + begin};
  }
  void Release(std::string_view) const override {}

 private:
  static constexpr int64_t kShift = 1016;  // numbers between the pieces of two matrices

  std::map<std::string, TensorSpec, std::less<>> specs_;
  std::vector<uint16_t> series_;
  std::vector<float> ones_;
};

}  // namespace

absl::StatusOr<ModelConfig> ShapeByName(const std::string& name) {
  ModelConfig c;
  c.architecture = "llama";
  c.name = name;
  if (name == "llama-3.1-8b") {
    c.num_layers = 32, c.width = 4096, c.feed_forward = 14336, c.num_heads = 32, c.num_kv_heads = 8, c.head_dim = 128;
    c.vocab_size = 128256, c.max_context = 131072, c.rope_base = 500000.0f;
  } else if (name == "llama-3.2-1b") {
    c.num_layers = 16, c.width = 2048, c.feed_forward = 8192, c.num_heads = 32, c.num_kv_heads = 8, c.head_dim = 64;
    c.vocab_size = 128256, c.max_context = 131072, c.rope_base = 500000.0f, c.tied_embeddings = true;
  } else if (name == "smollm2-135m") {
    c.num_layers = 30, c.width = 576, c.feed_forward = 1536, c.num_heads = 9, c.num_kv_heads = 3, c.head_dim = 64;
    c.vocab_size = 49152, c.max_context = 8192, c.rope_base = 100000.0f, c.tied_embeddings = true;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("shape '", name, "' is unknown; known are llama-3.1-8b, llama-3.2-1b and smollm2-135m"));
  }
  c.rope_dims = c.head_dim;
  return c;
}

absl::StatusOr<LoadedModel> MakeRandomModel(const std::string& shape, const EngineConfig& config) {
  auto known = ShapeByName(shape);
  if (!known.ok()) return known.status();
  LoadedModel model;
  model.config = *std::move(known);
  auto backend = MakeBackend(config.backend);
  if (!backend.ok()) return backend.status();
  model.backend = *std::move(backend);
  const RandomWeights weights(model.config);
  auto decoder = Decoder::Create(model.config, weights, *model.backend, config.max_step_tokens);
  if (!decoder.ok()) return decoder.status();
  model.decoder = *std::move(decoder);
  return model;
}

}  // namespace loupe
