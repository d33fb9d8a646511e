// A whole llama model of two small random layers as a GGUF file, tokenizer and chat template included: what tests of
// the loader, the pass, the engine and the server run on when they need no sense from the answer. The same seed gives
// the same file.
#pragma once

#include <cmath>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/quantise.h"

namespace loupe::testing {

struct TinyOptions {
  uint32_t seed = 1;
  WeightType type = WeightType::kF32;  // of matrices; vectors are F32
  int layers = 2;
  int width = 96;  // not heads * head_dim, so that mixing them up shows
  int heads = 4;
  int kv_heads = 2;
  int head_dim = 32;
  int feed_forward = 160;
  int context = 512;
  float rope_base = 10000.0f;
  float norm_eps = 1e-5f;
  bool tied = true;
  bool rope_factors = false;  // a rope_freqs.weight tensor
  bool fine_values = false;   // attn_v in Q8_0, whatever `type` says
  int window = 0;             // last positions that a row sees; 0: all
};

struct TinyModel {
  TinyOptions options;
  GgufWriter writer;
  std::map<std::string, std::vector<double>> values;  // of every tensor, decoded, row-major
  std::vector<std::string> tokens;

  int vocab_size() const { return static_cast<int>(tokens.size()); }
  std::string file() const { return writer.Build(); }
  void Write(const std::string& path) const {
    const std::string bytes = file();
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
};

inline constexpr int kTinyEndOfText = 0, kTinyImStart = 1, kTinyImEnd = 2;
inline constexpr int kTinyFirstByte = 3;  // tokens of the 256 bytes, in the order of the alphabet below

inline constexpr const char* kTinyChatTemplate =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

// The byte-level alphabet of GPT-2: printable bytes stand for themselves, the rest for code points from 256 on.
inline std::vector<std::string> ByteAlphabet() {
  const auto utf8 = [](int code) {
    std::string out;
    if (code < 0x80) return out += static_cast<char>(code);
    out += static_cast<char>(0xc0 | code >> 6);
    return out += static_cast<char>(0x80 | (code & 0x3f));
  };
  std::vector<std::string> letters(256);
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    letters[static_cast<size_t>(byte)] = utf8(printable ? byte : next++);
  }
  return letters;
}

namespace internal {

inline void AddTokenizer(TinyModel* model) {
  GgufWriter& w = model->writer;
  std::vector<std::string> merges;
  std::vector<int32_t> kinds(3, 3);
  model->tokens = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
  for (const std::string& letter : ByteAlphabet()) model->tokens.push_back(letter), kinds.push_back(1);
  // Ġ is the space of the alphabet.
  for (const char* merge :
       {"t h", "th e", "i n", "e r", "a n", "o n", "r e", "a t", "e n",  "o r", "Ġ t", "Ġ a", "Ġ the",
        "Ġ s", "in g", "l l", "o u", "Ġ w", "e d", "i s", "Ġ o", "Ġo n", "h e", "l o", "1 2"}) {
    const std::string text = merge;
    const size_t space = text.find(' ');
    merges.push_back(text);
    model->tokens.push_back(text.substr(0, space) + text.substr(space + 1));
    kinds.push_back(1);
  }
  w.String("tokenizer.ggml.model", "gpt2");
  w.String("tokenizer.ggml.pre", "smollm");
  w.Strings("tokenizer.ggml.tokens", model->tokens);
  w.Ints("tokenizer.ggml.token_type", kinds);
  w.Strings("tokenizer.ggml.merges", merges);
  w.U32("tokenizer.ggml.bos_token_id", kTinyImStart);
  w.U32("tokenizer.ggml.eos_token_id", kTinyImEnd);
  w.U32("tokenizer.ggml.unknown_token_id", kTinyEndOfText);
  w.U32("tokenizer.ggml.padding_token_id", kTinyImEnd);
  w.Bool("tokenizer.ggml.add_bos_token", false);
  w.String("tokenizer.chat_template", kTinyChatTemplate);
}

inline void AddMetadata(TinyModel* model) {
  const TinyOptions& o = model->options;
  GgufWriter& w = model->writer;
  w.String("general.architecture", "llama");
  w.String("general.name", "Tiny random");
  w.U32("llama.block_count", static_cast<uint32_t>(o.layers));
  w.U32("llama.context_length", static_cast<uint32_t>(o.context));
  w.U32("llama.embedding_length", static_cast<uint32_t>(o.width));
  w.U32("llama.feed_forward_length", static_cast<uint32_t>(o.feed_forward));
  w.U32("llama.attention.head_count", static_cast<uint32_t>(o.heads));
  w.U32("llama.attention.head_count_kv", static_cast<uint32_t>(o.kv_heads));
  w.U32("llama.attention.key_length", static_cast<uint32_t>(o.head_dim));
  w.U32("llama.attention.value_length", static_cast<uint32_t>(o.head_dim));
  w.U32("llama.rope.dimension_count", static_cast<uint32_t>(o.head_dim));
  w.F32("llama.rope.freq_base", o.rope_base);
  w.F32("llama.attention.layer_norm_rms_epsilon", o.norm_eps);
  if (o.window > 0) w.U32("llama.attention.sliding_window", static_cast<uint32_t>(o.window));
  AddTokenizer(model);
  w.U32("llama.vocab_size", static_cast<uint32_t>(model->vocab_size()));
}

}  // namespace internal

inline TinyModel MakeTinyModel(const TinyOptions& options = {}) {
  TinyModel model;
  model.options = options;
  internal::AddMetadata(&model);
  std::mt19937 random(options.seed);
  std::normal_distribution<float> normal;
  const auto add = [&](const std::string& name, int64_t rows, int64_t cols, double scale) {
    const bool vector = rows == 1;
    std::vector<float> x(static_cast<size_t>(rows * cols));
    for (float& v : x) v = static_cast<float>(scale) * normal(random) + (vector ? 1.0f : 0.0f);
    const WeightType type = vector                                                   ? WeightType::kF32
                            : options.fine_values && name.ends_with("attn_v.weight") ? WeightType::kQ8_0
                                                                                     : options.type;
    Encoded encoded = Encode(x, type);
    model.values[name] = std::move(encoded.values);
    model.writer.Tensor(name, vector ? std::vector<int64_t>{cols} : std::vector<int64_t>{cols, rows},
                        GgufTypeNumber(type), std::move(encoded.bytes));
  };
  const int64_t width = options.width, inner = options.feed_forward, vocab = model.vocab_size();
  const int64_t q_rows = int64_t{options.heads} * options.head_dim,
                kv_rows = int64_t{options.kv_heads} * options.head_dim;
  const double width_scale = 1 / std::sqrt(static_cast<double>(width));
  add("token_embd.weight", vocab, width, 0.3);
  for (int layer = 0; layer < options.layers; ++layer) {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    add(prefix + "attn_norm.weight", 1, width, 0.2);
    add(prefix + "attn_q.weight", q_rows, width, 1.2 * width_scale);  // attention neither flat nor a choice
    add(prefix + "attn_k.weight", kv_rows, width, 1.2 * width_scale);
    add(prefix + "attn_v.weight", kv_rows, width, width_scale);
    add(prefix + "attn_output.weight", width, q_rows, 1 / std::sqrt(static_cast<double>(q_rows)));
    add(prefix + "ffn_norm.weight", 1, width, 0.2);
    add(prefix + "ffn_gate.weight", inner, width, width_scale);
    add(prefix + "ffn_up.weight", inner, width, width_scale);
    add(prefix + "ffn_down.weight", width, inner, 1 / std::sqrt(static_cast<double>(inner)));
  }
  add("output_norm.weight", 1, width, 0.2);
  if (!options.tied) add("output.weight", vocab, width, 0.3);
  if (options.rope_factors) {
    std::vector<float> factors(static_cast<size_t>(options.head_dim / 2));
    for (size_t i = 0; i < factors.size(); ++i) factors[i] = 1.0f + static_cast<float>(i % 5);
    Encoded encoded = Encode(factors, WeightType::kF32);
    model.values["rope_freqs.weight"] = std::move(encoded.values);
    model.writer.Tensor("rope_freqs.weight", {options.head_dim / 2}, 0, std::move(encoded.bytes));
  }
  return model;
}

}  // namespace loupe::testing
