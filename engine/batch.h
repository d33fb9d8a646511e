// From a plan to the flat arrays of a step: token ids in the order of the cache's rows (all prompt rows, then all decode
// rows) and the rows whose logits are wanted. Owned by the engine core, reused from step to step; step thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/sequence.h"
#include "kernels/backend.h"
#include "kvcache/kv_cache.h"

namespace loupe {

// What one sample computes in a step: rows of one phase.
struct BatchItem {
  EngineSequence* sequence = nullptr;
  int prompt_rows = 0;
  int decode_rows = 0;
  int rows() const { return prompt_rows + decode_rows; }
};

class StepBatch {
 public:
  // Takes memory for the largest step: ids and rows of `max_rows`, logits of `max_sequences` rows.
  static absl::StatusOr<std::unique_ptr<StepBatch>> Create(Backend& backend, int max_rows, int max_sequences, int vocab_size);

  // The items as the cache wants them.
  static void FillKvItems(const std::vector<BatchItem>& items, std::vector<KvStepItem>* kv_items);
  // Fills the arrays. Samples whose known tokens are all in the cache after the step, and that want a token, get logits.
  void Build(const std::vector<BatchItem>& items);

  int num_rows() const { return num_rows_; }
  int prompt_rows() const { return prompt_rows_; }
  // Asks for the surprisal of the prompt tokens that follow this step's rows of these items, which are part of the batch.
  void BuildTargets(const std::vector<BatchItem>& items, const KvCache& cache);
  // What was asked: rows, the tokens that follow them, and where the surprisal goes; and working memory for it.
  Tensor target_rows() const;  // [m] i32, undefined if m = 0
  const std::vector<int32_t>& targets() const { return targets_; }
  std::vector<float>& surprisal() { return surprisal_; }
  Tensor logit_block() const;  // all of the logits' memory
  // Hands the surprisal to the cache, before the step is committed.
  void GiveSurprisal(const std::vector<BatchItem>& items, KvCache& cache) const;

  // Whose logits row i holds.
  const std::vector<EngineSequence*>& sampled() const { return sampled_; }
  int logit_prompt_rows() const { return logit_prompt_rows_; }
  Tensor ids() const;         // [T] i32
  Tensor logit_rows() const;  // [n] i32, undefined if n = 0
  Tensor logits() const;      // [n, V] f32

 private:
  StepBatch() = default;

  int max_rows_ = 0, max_sequences_ = 0, vocab_size_ = 0;
  std::unique_ptr<DeviceBuffer> ids_, logit_rows_, logits_, target_rows_;
  std::vector<int32_t> targets_;
  std::vector<float> surprisal_;
  std::vector<EngineSequence*> sampled_;
  int num_rows_ = 0, prompt_rows_ = 0, logit_prompt_rows_ = 0;
};

}  // namespace loupe
