// A model with a cache of its own, driven row by row for evaluation: prompts in chunks, then one decode row of many
// sequences in one step, so that policies compared on one text share the passes over the weights. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/load/load_model.h"
#include "kernels/mirrored_buffer.h"
#include "kvcache/kv_cache.h"

namespace loupe {

// One --kv object: what it asks for, and how it is shown in results.
struct EvalPolicy {
  KvOptions options;
  std::string label;  // the object as JSON, defaults filled in: part of a cell's key
};

// Called now and then with the share done, 0 to 1, and what is under way.
using EvalProgress = std::function<void(double, const std::string&)>;

class EvalRunner {
 public:
  // Room for `sequences` sequences of up to `tokens` tokens each. RESOURCE_EXHAUSTED says what does not fit.
  static absl::StatusOr<std::unique_ptr<EvalRunner>> Create(LoadedModel& model, int sequences, int tokens,
                                                            int max_step_tokens);
  ~EvalRunner();

  KvCache& cache() { return *cache_; }
  Stream& stream() { return *stream_; }
  int vocab_size() const { return model_.config.vocab_size; }

  // Appends prompt rows in chunks of `chunk`. Logits of the last row.
  absl::StatusOr<std::span<const float>> Prefill(SeqId seq, std::span<const int32_t> ids, int chunk);
  // One decode row a sequence. Logits [n][V], valid until the next call.
  absl::StatusOr<std::span<const float>> Decode(std::span<const SeqId> seqs, std::span<const int32_t> ids);

  // Rows that go on after a complete prompt, in one step. Logits of the rows `wanted`, or of all if it is empty, [n][V], valid
  // until the next call. `residuals` as in DecoderStep: a pass from layer 0 fills them, another from
  // `first_layer` on reads them; null: neither.
  enum class Rows : uint8_t {
    kStay,    // prompt rows, which become part of the sequence; its policy acts as at the end of a prompt
    kPrompt,  // prompt rows; the sequence is as before
    kDecode,  // computed as generated tokens are, whose activations are rounded finer; the sequence is as before
  };
  absl::StatusOr<std::span<const float>> Continue(SeqId seq, std::span<const int32_t> ids, Rows rows, int first_layer,
                                                  std::vector<std::vector<char>>* residuals, std::span<const int32_t> wanted);

  // One sequence a policy, each holding what its policy makes of the same prompt; the first is the full cache, for
  // which `policies` needs no entry. The prompt is computed once for all policies that can share its signals. `bytes`
  // gets the report of each at the end of prefill. Close all of them afterwards. INVALID_ARGUMENT from a policy names
  // its field.
  absl::StatusOr<std::vector<SeqId>> OpenAll(std::span<const EvalPolicy> policies, std::span<const int32_t> prompt,
                                             int chunk, std::vector<KvSequenceReport>* reports);
  void CloseAll(std::vector<SeqId>* seqs);

 private:
  class SharedSignals;
  class Rival;
  EvalRunner(LoadedModel& model, int max_step_tokens);
  // A policy of the registry, or one that only evaluation knows (llamacpp_cache.h).
  absl::StatusOr<std::unique_ptr<Policy>> MakeOne(const KvOptions& options, const PolicyContext& context) const;
  absl::Status Step(std::span<const KvStepItem> items, std::span<const int32_t> ids,
                    std::span<const int32_t> logit_rows, const std::function<void()>& before_commit = {});
  absl::Status Compute(std::span<const KvStepItem> items, std::span<const int32_t> ids, std::span<const int32_t> logit_rows,
                       DecoderStep step);

  LoadedModel& model_;
  const int max_step_tokens_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  KvBatch batch_;
  MirroredBuffer ids_, logit_rows_, device_logits_;
  std::vector<float> logits_;
  std::vector<std::unique_ptr<Policy>> made_;  // by OpenAll, until CloseAll
};

}  // namespace loupe
