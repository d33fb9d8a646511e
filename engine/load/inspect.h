// What `loupe inspect` says about a model file, without packing a weight. Works for every GGUF file that can be parsed:
// one that cannot be served is summed up as far as its metadata goes, with the reason. Stateless.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"

namespace loupe {

struct TensorTypeSummary {
  int64_t count = 0;
  int64_t bytes = 0;
};

struct ModelSummary {
  std::string kind = "model";
  std::string format;  // "gguf v3"
  std::string architecture;
  std::string name;
  // Zero where the file does not say.
  int64_t parameters = 0;
  int64_t layers = 0, heads = 0, kv_heads = 0, head_dim = 0, width = 0, feed_forward = 0, vocab = 0, context = 0;
  bool tied_embeddings = false;
  std::string tokenizer;  // model and pre-tokenizer: "gpt2/smollm"
  bool chat_template = false;
  std::map<std::string, TensorTypeSummary> tensor_types;
  int64_t file_bytes = 0;
  int64_t kv_bytes_per_token = 0;  // dense
  std::map<std::string, int64_t> kv_bytes_per_token_by_format;
  bool supported = false;
  std::string reason;  // why not; empty if supported
};

// Errors as LoadModel's, for a file that is missing or no GGUF file at all.
absl::StatusOr<ModelSummary> InspectModel(const std::string& path);

}  // namespace loupe
