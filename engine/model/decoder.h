// One forward pass of a decoder-only model of the Llama family (RMSNorm, RoPE, grouped-query attention, SiLU gate),
// over a batch of prompt and decode rows. Owns the packed weights and the activations. Used by the step thread.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/load/weight_source.h"
#include "engine/model/model_config.h"
#include "kernels/backend.h"
#include "kvcache/kv_cache.h"

namespace loupe {

// Tokens of the prompt of which the logits before them are asked: ids[i] by the row rows[i].
struct PromptTargets {
  Tensor rows;       // [m] i32, rows of phase prompt; undefined: none
  Tensor ids;        // [m] i32
  Tensor block;      // [b, V] f32 working memory: the logits of so many rows at a time
  Tensor surprisal;  // [m] f32 out: -log p(ids[i]) in nats; undefined: not wanted
  // Choices, as for tokens to come (ops.h); undefined: not wanted. choices[i] reads logits row i mod b.
  Tensor choices;    // [m] SampleRow
  Tensor changes;    // LogitChange
  Tensor chosen;     // [m] SampledRow out
  int vocab_size = 0;  // ids to choose from
};

struct DecoderStep {
  Tensor ids;  // [T] i32, rows in the order of the batch
  KvCache* cache = nullptr;
  KvBatch* batch = nullptr;    // reserved; not committed by the pass
  Tensor logit_rows;           // [n] i32: rows whose logits are wanted, ascending, n <= T; undefined: none
  int logit_prompt_rows = -1;  // how many of them are prompt rows; -1: counted here, which reads logit_rows on the host
  Tensor logits;               // [n, V] f32 out
  PromptTargets targets;
  // For measurements that change one layer of a step that was run before.
  int first_layer = 0;  // the pass begins here, with residuals[first_layer] in place of embeddings
  // [layers] host memory: the rows before each layer as the backend keeps them, written by a pass from layer 0; null: not
  // wanted. Complete when the stream has run.
  std::vector<std::vector<char>>* residuals = nullptr;
};

// Asks the logits for the step's targets, one block at a time, so that no [T, V] is ever held. `logits_of` writes the
// logits of a step's logit_rows.
void AskTargets(const DecoderStep& step, Backend& backend, Stream& stream, const std::function<void(const DecoderStep&)>& logits_of);

class Decoder {
 public:
  // Packs all weights and takes activations for `max_rows` rows. INVALID_ARGUMENT names a missing tensor or a shape
  // that does not fit, with both shapes. `progress`: share of bytes packed.
  static absl::StatusOr<std::unique_ptr<Decoder>> Create(const ModelConfig& config, const WeightSource& source,
                                                         Backend& backend, int max_rows,
                                                         const std::function<void(double)>& progress = {});
  ~Decoder();
  // The rows' keys and values go into the cache, the wanted logits into step.logits.
  void Forward(const DecoderStep& step, Stream& stream);

  KvShape kv_shape() const;
  const ModelConfig& config() const;
  int64_t weight_bytes() const;           // resident
  int64_t weight_bytes_per_step() const;  // read by a step of one row
  int64_t activation_bytes() const;

 private:
  Decoder();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace loupe
