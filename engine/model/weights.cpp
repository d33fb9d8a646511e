#include "engine/model/weights.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace loupe {
namespace {

bool IsQuantised(WeightType type) {
  return type == WeightType::kQ8_0 || type == WeightType::kQ4_0 || type == WeightType::kQ4_1;
}

float HalfToFloat(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int fraction = half & 1023;
  float value = 0;
  if (exponent == 31) {
    value = fraction ? std::nanf("") : INFINITY;
  } else {
    value = exponent ? std::ldexp(static_cast<float>(fraction + 1024), exponent - 25)
                     : std::ldexp(static_cast<float>(fraction), -24);
  }
  return half & 0x8000 ? -value : value;
}

absl::Status OutOfRange(const char* what, int64_t value, int64_t max) {
  return absl::InvalidArgumentError(absl::StrCat("the model's ", what, " is ", value, "; supported are 1 to ", max));
}

}  // namespace

std::string LayerTensorName(int layer, const char* part) { return absl::StrCat("blk.", layer, ".", part, ".weight"); }

std::vector<TensorSpec> ExpectedTensors(const ModelConfig& c) {
  std::vector<TensorSpec> specs;
  const int64_t q_rows = int64_t{c.num_heads} * c.head_dim;
  const int64_t kv_rows = int64_t{c.num_kv_heads} * c.head_dim;
  specs.push_back({"token_embd.weight", c.vocab_size, c.width});
  for (int layer = 0; layer < c.num_layers; ++layer) {
    specs.push_back({LayerTensorName(layer, "attn_norm"), 1, c.width});
    specs.push_back({LayerTensorName(layer, "attn_q"), q_rows, c.width});
    specs.push_back({LayerTensorName(layer, "attn_k"), kv_rows, c.width});
    specs.push_back({LayerTensorName(layer, "attn_v"), kv_rows, c.width});
    specs.push_back({LayerTensorName(layer, "attn_output"), c.width, q_rows});
    specs.push_back({LayerTensorName(layer, "ffn_norm"), 1, c.width});
    specs.push_back({LayerTensorName(layer, "ffn_gate"), c.feed_forward, c.width});
    specs.push_back({LayerTensorName(layer, "ffn_up"), c.feed_forward, c.width});
    specs.push_back({LayerTensorName(layer, "ffn_down"), c.width, c.feed_forward});
  }
  specs.push_back({"output_norm.weight", 1, c.width});
  if (!c.tied_embeddings) specs.push_back({"output.weight", c.vocab_size, c.width});
  return specs;
}

absl::Status CheckWeights(const ModelConfig& config, const WeightSource& source) {
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    const std::optional<HostMatrix> found = source.Find(spec.name);
    if (!found) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", spec.name, "' is missing; wanted is a shape of [", spec.rows, ", ", spec.cols, "]"));
    }
    if (found->rows != spec.rows || found->cols != spec.cols) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", spec.name, "' has shape [", found->rows, ", ",
                                                     found->cols, "]; the configuration demands [", spec.rows, ", ",
                                                     spec.cols, "]"));
    }
    if (spec.rows == 1 && IsQuantised(found->type)) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", spec.name, "' is a norm vector of type ",
                                                     WeightTypeName(found->type), "; supported are F32, F16, BF16"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckConfig(const ModelConfig& c) {
  struct Range {
    const char* what;
    int64_t value, max;
  };
  // The limits are far above any model of this family; they keep products of dimensions inside 64 bits.
  const Range ranges[] = {{"layer count", c.num_layers, 1024},
                          {"width", c.width, 1 << 17},
                          {"feed-forward width", c.feed_forward, 1 << 20},
                          {"head count", c.num_heads, 1024},
                          {"kv head count", c.num_kv_heads, 1024},
                          {"head size", c.head_dim, 256},
                          {"vocabulary size", c.vocab_size, 1 << 22},
                          {"context length", c.max_context, 1 << 30}};
  for (const Range& r : ranges) {
    if (r.value < 1 || r.value > r.max) return OutOfRange(r.what, r.value, r.max);
  }
  if (c.num_heads % c.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model's ", c.num_heads, " heads cannot be shared by ", c.num_kv_heads, " kv heads evenly"));
  }
  // Kernels keep the queries that share a kv head in registers.
  if (c.num_heads / c.num_kv_heads > 16) {
    return absl::InvalidArgumentError(absl::StrCat("the model's ", c.num_heads / c.num_kv_heads,
                                                   " query heads share a kv head; supported are up to 16"));
  }
  // Pages store keys and values in planes of 128 bytes, 16 dimensions being the smallest unit that kernels read.
  if (c.head_dim % 16 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model's head size is ", c.head_dim, "; supported are multiples of 16"));
  }
  if (c.rope_dims < 2 || c.rope_dims > c.head_dim || c.rope_dims % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("the model rotates ", c.rope_dims, " dimensions of a head of ",
                                                   c.head_dim, "; supported is an even number up to the head size"));
  }
  if (!c.rope_factors.empty() && static_cast<int>(c.rope_factors.size()) != c.rope_dims / 2) {
    return absl::InvalidArgumentError(absl::StrCat("the model has ", c.rope_factors.size(),
                                                   " rotary frequency factors for ", c.rope_dims / 2, " frequencies"));
  }
  for (float factor : c.rope_factors) {
    if (!(factor > 0) || !std::isfinite(factor)) {
      return absl::InvalidArgumentError(absl::StrCat("a rotary frequency factor is ", factor, "; it must be positive"));
    }
  }
  if (!(c.norm_eps >= 0) || !(c.norm_eps < 1) || !(c.rope_base > 0) || !std::isfinite(c.rope_base)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model's norm epsilon ", c.norm_eps, " or rotary base ", c.rope_base, " is out of range"));
  }
  return absl::OkStatus();
}

int64_t HostMatrixBytes(const HostMatrix& m) {
  const int64_t elements = m.rows * m.cols;
  switch (m.type) {
    case WeightType::kF32:
      return elements * 4;
    case WeightType::kF16:
    case WeightType::kBF16:
      return elements * 2;
    case WeightType::kQ8_0:
      return elements / 32 * 34;
    case WeightType::kQ4_0:
      return elements / 32 * 18;
    case WeightType::kQ4_1:
      return elements / 32 * 20;
  }
  return 0;
}

const char* WeightTypeName(WeightType type) {
  static constexpr const char* kNames[] = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"};
  return kNames[static_cast<uint8_t>(type)];
}

std::vector<float> ReadVector(const HostMatrix& vector) {
  LOUPE_CHECK(!IsQuantised(vector.type)) << "a vector of type " << WeightTypeName(vector.type);
  std::vector<float> out(static_cast<size_t>(vector.rows * vector.cols));
  if (vector.type == WeightType::kF32) {
    std::memcpy(out.data(), vector.data, out.size() * sizeof(float));
    return out;
  }
  const auto* bytes = static_cast<const char*>(vector.data);
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes + 2 * i, sizeof(bits));
    out[i] = vector.type == WeightType::kF16 ? HalfToFloat(bits) : std::bit_cast<float>(uint32_t{bits} << 16);
  }
  return out;
}

}  // namespace loupe
