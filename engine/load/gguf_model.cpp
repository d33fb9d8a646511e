#include "engine/load/gguf_model.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"
#include "engine/model/weights.h"

namespace loupe {
namespace {

absl::Status Invalid(const std::string& text) { return absl::InvalidArgumentError(text); }

std::optional<WeightType> SupportedType(const GgufTensorType& type) {
  const std::string_view name = type.name;
  for (WeightType t : {WeightType::kF32, WeightType::kF16, WeightType::kBF16, WeightType::kQ8_0, WeightType::kQ4_0,
                       WeightType::kQ4_1}) {
    if (name == WeightTypeName(t)) return t;
  }
  return std::nullopt;
}

// Reads several keys and keeps the first error, so that a list of keys reads like one.
class KeyReader {
 public:
  KeyReader(const Gguf& gguf, std::string prefix) : gguf_(gguf), prefix_(std::move(prefix)) {}

  int Int(const char* key) {
    return static_cast<int>(Keep(gguf_.Int(prefix_ + key, 1, std::numeric_limits<int>::max())));
  }
  int IntOr(const char* key, int missing) {
    return static_cast<int>(Keep(gguf_.IntOr(prefix_ + key, missing, 0, std::numeric_limits<int>::max())));
  }
  float NumberOr(const char* key, double missing) {
    return static_cast<float>(Keep(gguf_.NumberOr(prefix_ + key, missing)));
  }
  float Number(const char* key) { return static_cast<float>(Keep(gguf_.Number(prefix_ + key))); }
  std::string StringOr(const char* key, const char* missing) { return Keep(gguf_.StringOr(prefix_ + key, missing)); }
  // Some writers give a value per layer even where all are equal.
  int IntOrEqualInts(const char* key, int missing);

  const absl::Status& status() const { return status_; }

 private:
  template <class T>
  T Keep(absl::StatusOr<T> value) {
    if (value.ok()) return *std::move(value);
    if (status_.ok()) status_ = value.status();
    return T{};
  }

  const Gguf& gguf_;
  const std::string prefix_;
  absl::Status status_;
};

int KeyReader::IntOrEqualInts(const char* key, int missing) {
  const GgufValue* value = gguf_.Find(prefix_ + key);
  if (!value) return missing;
  if (value->type != GgufType::kArray) return Int(key);
  const std::vector<int64_t> values = Keep(gguf_.Ints(prefix_ + key));
  const bool equal = !values.empty() && std::equal(values.begin() + 1, values.end(), values.begin());
  if (!equal || values[0] < 1 || values[0] > std::numeric_limits<int>::max()) {
    if (status_.ok()) {
      status_ = Invalid(absl::StrCat("key '", prefix_, key, "' differs from layer to layer, which is not supported"));
    }
    return 0;
  }
  return static_cast<int>(values[0]);
}

// Features that other members of the family have and this pass has not: a file that asks for one would load and then
// answer nonsense, so it is refused.
absl::Status CheckUnsupportedKeys(const Gguf& gguf) {
  struct Neutral {
    const char* key;
    double value;
  };
  static constexpr Neutral kKeys[] = {{"llama.expert_count", 0},
                                      {"llama.logit_scale", 1},
                                      {"llama.residual_scale", 1},
                                      {"llama.embedding_scale", 1},
                                      {"llama.attention.scale", 0},
                                      {"llama.attention.clamp_kqv", 0},
                                      {"llama.attn_logit_softcapping", 0},
                                      {"llama.final_logit_softcapping", 0},
                                      {"llama.rope.scaling.attn_factor", 1}};
  for (const Neutral& k : kKeys) {
    absl::StatusOr<double> value = gguf.NumberOr(k.key, k.value);
    if (!value.ok()) return value.status();
    if (*value != k.value)
      return Invalid(absl::StrCat("key '", k.key, "' is ", *value, "; supported is only ", k.value));
  }
  return absl::OkStatus();
}

// Linear scaling and Llama 3's factors both divide the frequencies; YaRN is refused.
absl::Status ReadRope(const Gguf& gguf, std::string_view file_bytes, ModelConfig* config) {
  KeyReader keys(gguf, "llama.rope.");
  config->rope_base = keys.NumberOr("freq_base", 10000.0);
  config->rope_dims = keys.IntOr("dimension_count", config->head_dim);
  const std::string scaling = keys.StringOr("scaling.type", "none");
  float factor = keys.NumberOr("scaling.factor", keys.NumberOr("scale_linear", 1.0));
  if (!keys.status().ok()) return keys.status();
  const bool linear = scaling == "linear" || !gguf.Find("llama.rope.scaling.type");
  if (scaling != "none" && scaling != "linear") {
    return Invalid(absl::StrCat("key 'llama.rope.scaling.type' is ", QuoteName(scaling), "; supported: none, linear"));
  }
  if (factor == 0 || !linear) factor = 1;
  const size_t half = static_cast<size_t>(std::clamp(config->rope_dims, 0, config->head_dim)) / 2;
  if (factor != 1) config->rope_factors.assign(half, factor);
  const GgufTensor* factors = gguf.FindTensor("rope_freqs.weight");
  if (!factors) return absl::OkStatus();
  if (std::string_view(factors->type->name) != "F32" || factors->elements != static_cast<int64_t>(half)) {
    return Invalid(absl::StrCat("tensor 'rope_freqs.weight' holds ", factors->elements, " values of type ",
                                factors->type->name, "; wanted are ", half, " of F32"));
  }
  config->rope_factors.resize(half, 1.0f);
  for (size_t i = 0; i < half; ++i) {
    float value = 0;
    std::memcpy(&value, file_bytes.data() + factors->offset + static_cast<int64_t>(i * sizeof(float)), sizeof(float));
    config->rope_factors[i] *= value;
  }
  return absl::OkStatus();
}

bool IsRopeTensor(std::string_view name) { return name == "rope_freqs.weight"; }

}  // namespace

absl::StatusOr<ModelConfig> ReadModelConfig(const Gguf& gguf, std::string_view file_bytes) {
  ModelConfig config;
  absl::StatusOr<std::string> architecture = gguf.String("general.architecture");
  if (!architecture.ok()) return architecture.status();
  if (*architecture != "llama") {
    return Invalid(absl::StrCat("unsupported architecture ", QuoteName(*architecture), "; supported: llama"));
  }
  config.architecture = *architecture;
  if (absl::Status s = CheckUnsupportedKeys(gguf); !s.ok()) return s;
  KeyReader general(gguf, "general.");
  config.name = general.StringOr("name", "");
  if (!IsUtf8(config.name)) return Invalid("key 'general.name' is no UTF-8 text");
  KeyReader keys(gguf, "llama.");
  config.num_layers = keys.Int("block_count");
  config.width = keys.Int("embedding_length");
  config.feed_forward = keys.IntOrEqualInts("feed_forward_length", 0);
  config.num_heads = keys.IntOrEqualInts("attention.head_count", 0);
  config.num_kv_heads = keys.IntOrEqualInts("attention.head_count_kv", config.num_heads);
  config.max_context = keys.Int("context_length");
  config.norm_eps = keys.Number("attention.layer_norm_rms_epsilon");
  config.head_dim = keys.IntOr("attention.key_length", config.num_heads > 0 ? config.width / config.num_heads : 0);
  const int value_dim = keys.IntOr("attention.value_length", config.head_dim);
  const int window = keys.IntOr("attention.sliding_window", 0);
  const int declared_vocab = keys.IntOr("vocab_size", 0);
  if (absl::Status s = general.status().ok() ? keys.status() : general.status(); !s.ok()) return s;
  if (value_dim != config.head_dim) {
    return Invalid(absl::StrCat("keys of ", config.head_dim, " and values of ", value_dim,
                                " dimensions; both must have the same size"));
  }
  if (window > 0) config.windows.assign(static_cast<size_t>(std::min(config.num_layers, 1024)), window);
  if (absl::Status s = ReadRope(gguf, file_bytes, &config); !s.ok()) return s;

  const GgufTensor* embedding = gguf.FindTensor("token_embd.weight");
  if (!embedding) return Invalid("tensor 'token_embd.weight' is missing");
  config.vocab_size = static_cast<int>(std::min<int64_t>(embedding->shape[1], std::numeric_limits<int>::max()));
  if (declared_vocab != 0 && declared_vocab != config.vocab_size) {
    return Invalid(absl::StrCat("key 'llama.vocab_size' is ", declared_vocab, ", but tensor 'token_embd.weight' has ",
                                embedding->shape[1], " rows"));
  }
  config.tied_embeddings = gguf.FindTensor("output.weight") == nullptr;
  for (const GgufTensor& t : gguf.tensors()) {
    if (!IsRopeTensor(t.name)) config.parameters += t.elements;
  }
  if (absl::Status s = CheckConfig(config); !s.ok()) return s;
  return config;
}

absl::StatusOr<std::string> ReadChatTemplate(const Gguf& gguf) {
  absl::StatusOr<std::string> text = gguf.StringOr("tokenizer.chat_template", "");
  if (text.ok() && !IsUtf8(*text)) return Invalid("key 'tokenizer.chat_template' is no UTF-8 text");
  return text;
}

absl::Status CheckTensors(const Gguf& gguf, const ModelConfig& config) {
  std::set<std::string, std::less<>> known;
  for (const TensorSpec& spec : ExpectedTensors(config)) known.insert(spec.name);
  for (const GgufTensor& t : gguf.tensors()) {
    if (IsRopeTensor(t.name)) continue;
    if (known.find(t.name) == known.end()) {
      return Invalid(absl::StrCat("tensor ", QuoteName(t.name), " is not part of a llama model of ", config.num_layers,
                                  " layers as this version knows it"));
    }
    if (!SupportedType(*t.type)) {
      return Invalid(absl::StrCat("tensor ", QuoteName(t.name), " has type ", t.type->name,
                                  "; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1"));
    }
    if (t.shape[2] != 1 || t.shape[3] != 1) {
      return Invalid(absl::StrCat("tensor ", QuoteName(t.name), " has ", t.rank, " dimensions; supported are 1 and 2"));
    }
  }
  return absl::OkStatus();
}

std::optional<HostMatrix> GgufWeightSource::Find(std::string_view name) const {
  const GgufTensor* tensor = gguf_.FindTensor(name);
  const std::optional<WeightType> type = tensor ? SupportedType(*tensor->type) : std::nullopt;
  if (!type) return std::nullopt;
  HostMatrix matrix;
  matrix.type = *type;
  matrix.rows = tensor->shape[1];
  matrix.cols = tensor->shape[0];
  matrix.data = file_.bytes().data() + tensor->offset;
  return matrix;
}

void GgufWeightSource::Release(std::string_view name) const {
  if (const GgufTensor* tensor = gguf_.FindTensor(name)) file_.Release(tensor->offset, tensor->bytes);
}

}  // namespace loupe
