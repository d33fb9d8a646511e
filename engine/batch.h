// From a plan to the flat arrays of a step: token ids in the order of the cache's rows (all prompt rows, then all decode
// rows) and the rows whose logits are wanted. Owned by the engine core, reused from step to step; step thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/decoder.h"
#include "engine/sequence.h"
#include "engine/side_work.h"
#include "kernels/backend.h"
#include "kernels/mirrored_buffer.h"
#include "kvcache/kv_cache.h"

namespace loupe {

// What one sample computes in a step: rows of one phase.
struct BatchItem {
  EngineSequence* sequence = nullptr;
  int prompt_rows = 0;
  int decode_rows = 0;
  int rows() const { return prompt_rows + decode_rows; }
};

// Prompt tokens are asked so many rows at a time, at least: fewer would read the whole head for little.
inline constexpr int kMinBlockRows = 32;

class StepBatch {
 public:
  // Takes memory for the largest step: ids and rows of `max_rows`, logits of `max_sequences` rows and at least kMinBlockRows.
  static absl::StatusOr<std::unique_ptr<StepBatch>> Create(Backend& backend, int max_rows, int max_sequences, int vocab_size);

  // The items as the cache wants them.
  static void FillKvItems(const std::vector<BatchItem>& items, std::vector<KvStepItem>* kv_items);
  // Fills the arrays. Samples whose known tokens are all in the cache after the step, and that want a token, get logits.
  void Build(const std::vector<BatchItem>& items);
  // Asks for what is wanted of the prompt tokens that follow this step's rows of these items, which are part of the batch:
  // their surprisal for the cache, their log-probabilities for the request.
  void BuildTargets(const std::vector<BatchItem>& items, const KvCache& cache);
  // How the samples that want a token choose it, and up to `places` siblings that may go on from the same logits. Masks of
  // grammars are begun, and found while the pass is computed. The backend's RESOURCE_EXHAUSTED if penalties and biases need
  // more memory than there is.
  absl::Status BuildChoices(int places);
  // To the device, where the pass works.
  void Upload(Stream& stream);
  // The tokens, once the logits are there: `vocab_size` ids to choose from. Read on the host after the step.
  void Choose(int vocab_size, Stream& stream);

  int num_rows() const { return num_rows_; }
  int prompt_rows() const { return prompt_rows_; }
  // What was asked, on the device; the block is the logits' memory. `vocab_size` ids are told.
  PromptTargets targets(int vocab_size) const;
  // The log-probabilities that were asked, on their way to the host; read after the step.
  void FetchScores(Stream& stream) const;
  struct Score {
    EngineSequence* sequence = nullptr;
    int position = 0;  // of the row
    int target = 0;
  };
  const std::vector<Score>& scores() const { return scores_; }
  const SampledRow& scored(const Score& score) const { return known_.host<SampledRow>()[score.target]; }
  // Hands the surprisal to the cache, before the step is committed; waits for the device if any was asked.
  void GiveSurprisal(const std::vector<BatchItem>& items, KvCache& cache, Stream& stream) const;

  // Whose logits row i holds.
  const std::vector<EngineSequence*>& sampled() const { return sampled_; }
  // What was chosen: for each of sampled(), its own token, then those of num_siblings(i) siblings.
  const SampledRow* choices() const { return choices_.host<SampledRow>(); }
  int num_siblings(size_t i) const { return num_siblings_[i]; }
  int logit_prompt_rows() const { return logit_prompt_rows_; }
  Tensor ids() const;          // [T] i32 on the device
  Tensor logit_rows() const;   // [n] i32 on the device, undefined if n = 0
  Tensor logits() const;       // [n, V] f32 on the device

 private:
  int64_t mask_words() const { return (int64_t{vocab_size_} + 31) / 32; }
  StepBatch() = default;

  Backend* backend_ = nullptr;
  int max_rows_ = 0, max_sequences_ = 0, vocab_size_ = 0;
  int block_rows_ = 0;  // logits at a time
  std::unique_ptr<DeviceBuffer> logits_;
  MirroredBuffer ids_, logit_rows_, target_rows_, targets_, surprisal_;
  MirroredBuffer known_rows_, known_changes_, known_;  // choices of prompt tokens
  MirroredBuffer choice_rows_, changes_, masks_, choices_;
  SideWork mask_work_;
  int num_masks_ = 0;
  std::vector<LogitChange> all_changes_;
  std::vector<int> num_siblings_;
  int num_choices_ = 0;
  int num_targets_ = 0;
  bool wants_surprisal_ = false;
  std::vector<int> surprisal_at_;  // first target of an item whose surprisal the cache wants
  std::vector<Score> scores_;
  std::vector<EngineSequence*> sampled_;
  int num_rows_ = 0, prompt_rows_ = 0, logit_prompt_rows_ = 0;
};

}  // namespace loupe
