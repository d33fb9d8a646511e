// What a KV cache is made from: the shape that the model dictates and the limits that the operator sets. Defaults are
// written here and nowhere else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/page_layout.h"

namespace loupe {

struct KvShape {
  int num_layers = 0;
  int num_heads = 0;     // H query heads
  int num_kv_heads = 0;  // G
  int head_dim = 0;      // D
  std::string model;     // its name, for messages
  float scale = 0;       // of q . k; 0 means 1 / sqrt(D)
  // Per layer: how many of the last positions a row sees, itself included; 0 means all. Empty: 0 for every layer.
  std::vector<int> windows;
  // Per layer and query head a logit without a value, [L][H]; empty: none.
  std::vector<std::vector<float>> sinks;
};

struct KvConfig {
  int64_t device_bytes = 0;  // the whole device arena; carved into slabs of 2 MiB
  int max_sequences = 64;    // open at a time
  int max_step_rows = 512;   // rows of a step: sizes the metadata tensors
};

inline constexpr int64_t kSlabBytes = int64_t{2} << 20;

}  // namespace loupe
