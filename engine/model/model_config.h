// The shape of a decoder-only model, checked once at load. Everything the pass and the cache need to know.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace loupe {

struct ModelConfig {
  std::string architecture;  // llama
  std::string name;
  int num_layers = 0;
  int width = 0;             // E
  int feed_forward = 0;      // F
  int num_heads = 0;         // H
  int num_kv_heads = 0;      // G
  int head_dim = 0;          // D
  int vocab_size = 0;        // V
  int max_context = 0;
  float norm_eps = 1e-5f;
  float rope_base = 10000.0f;
  int rope_dims = 0;                    // rotated dimensions of a head
  bool rope_interleaved = true;         // GGUF llama order
  std::vector<float> rope_factors;      // divisors of the frequencies [rope_dims / 2]; empty: 1
  bool tied_embeddings = false;         // LM head = embedding table
  std::vector<int> windows;             // per layer, see KvShape; empty: none
  std::vector<std::vector<float>> sinks;  // per layer, see KvShape; empty: none
  int64_t parameters = 0;
};

}  // namespace loupe
