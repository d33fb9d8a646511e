// The step loop without its thread: takes jobs, runs steps, sends events. Everything in here belongs to one thread.
// A step: end what is cancelled or late, plan, reserve (preempting if there is no room), run the model, commit, sample,
// send, end what is complete. Each sample gets exactly one Finished.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/step_model.h"

namespace loupe {

struct EngineLimits {
  int max_context = 0;
  int max_sequences = 0;
  int max_step_tokens = 0;
};

// What the loop works with; all outlive it.
struct EngineParts {
  StepModel* model = nullptr;
  KvCache* cache = nullptr;
  Backend* backend = nullptr;
  const Tokenizer* tokenizer = nullptr;
  const Clock* clock = nullptr;
  EngineObserver* observer = nullptr;                // may be null
  std::function<void(const std::string&)> on_ended;  // a request's last sample ended; may be empty
};

class EngineCore {
 public:
  // RESOURCE_EXHAUSTED if the logits buffer cannot be had.
  static absl::StatusOr<std::unique_ptr<EngineCore>> Create(const EngineParts& parts, const EngineLimits& limits);
  ~EngineCore();

  // The request was validated and given a seed.
  void Add(std::unique_ptr<Job> job);
  // One step. False if there was nothing to compute.
  bool Step();
  // Ends everything with kCancelled and this stop_reason.
  void CancelAll(const std::string& reason);

  bool idle() const { return waiting_.empty() && running_.empty(); }
  EngineStats Stats() const;

 private:
  using SequencePtr = std::unique_ptr<Sequence>;

  EngineCore(const EngineParts& parts, const EngineLimits& limits);

  // engine_core.cpp: planning and computing
  void Reap();
  void Plan();
  void Admit(int count);
  bool ReserveOrPreempt();
  void Preempt(size_t index);
  void BuildRows();
  void RunModel();
  void AfterModel(double started_s);
  void Insert(std::vector<SequencePtr>& list, SequencePtr sequence);
  SequenceView View(const Sequence& sequence) const;
  void Report(double seconds);

  // engine_emit.cpp: what a computed row leads to
  bool TakeToken(Sequence& sequence, std::span<float> logits);
  void ForkSiblings(Sequence& first, std::span<const float> logits);
  bool CheckEnd(Sequence& sequence, int32_t token, Delta* delta, FinishReason* reason, std::string* why);
  void SendDelta(Sequence& sequence, Delta delta);
  void Finish(Sequence& sequence, FinishReason reason, const std::string& why, absl::Status error = absl::OkStatus());
  void FinishJobPart(Sequence& sequence, FinishReason reason, const std::string& why, absl::Status error = absl::OkStatus());
  KvReport MakeKvReport(const Sequence& sequence) const;

  const EngineParts parts_;
  const EngineLimits limits_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<DeviceBuffer> logits_;
  std::vector<int32_t> endings_;  // ids that end an answer

  std::vector<SequencePtr> waiting_, running_;  // both in order of precedence
  uint64_t next_order_ = 0;

  // Of the step at hand; memory is reused.
  StepPlan plan_;
  std::vector<SequenceView> running_views_, waiting_views_;
  std::vector<KvStepItem> items_;
  std::vector<int32_t> ids_, logit_rows_;
  std::vector<int> logit_owner_;  // index into running_ of each wanted row
  SamplerScratch sampler_scratch_;
  std::vector<float> row_copy_;   // logits that siblings share
  KvBatch batch_;

  EngineStats stats_;
};

}  // namespace loupe
