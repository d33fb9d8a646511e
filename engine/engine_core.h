// The engine without its thread: everything a step does, callable step by step, so that simulations run it on one thread
// with their own clock and model. Engine (engine.h) adds the thread.
//
// Submit and queue() may be used from any thread; all else belongs to the step thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/batch.h"
#include "engine/clock.h"
#include "engine/engine_observer.h"
#include "engine/kv_chooser.h"
#include "engine/request_queue.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/step_model.h"
#include "kvcache/kv_cache.h"

namespace loupe {

// Resolved limits: nothing is automatic any more.
struct CoreLimits {
  int64_t kv_device_bytes = 0;
  int max_context = 0;
  int max_sequences = 0;    // lowered to max_step_rows, so that every running sample gets a row
  int max_step_rows = 0;
  int max_queue = 0;
};

// What the core works with; all of it outlives the core. `observer` may be null.
struct CoreParts {
  Backend* backend = nullptr;
  StepModel* model = nullptr;
  const Tokenizer* tokenizer = nullptr;
  EngineObserver* observer = nullptr;
  const Clock* clock = nullptr;
  uint64_t seed = 0;  // of requests that bring none
  KvDefaults kv = {};
};

class EngineCore {
 public:
  // RESOURCE_EXHAUSTED (memory) and INVALID_ARGUMENT (limits) with numbers.
  static absl::StatusOr<std::unique_ptr<EngineCore>> Create(const CoreLimits& limits, const CoreParts& parts);
  // Ends everything in flight with kCancelled.
  ~EngineCore();

  // ---- any thread
  // As Engine's. A handle cancels its request when its last copy goes.
  absl::StatusOr<std::shared_ptr<ResponseStream>> Submit(Request request);
  absl::StatusOr<std::vector<std::shared_ptr<ResponseStream>>> SubmitAll(std::vector<Request> requests);
  RequestQueue& queue() { return queue_; }
  // Positions of one sample: the asked limit, or less if the arena holds less.
  int max_context() const { return limits_.max_context; }
  int vocab_size() const { return vocab_size_; }
  const CoreLimits& limits() const { return limits_; }

  // ---- step thread
  enum class Outcome { kWorked, kIdle, kStopped };
  // One step: collect, plan, reserve, compute, sample, tell. kIdle: nothing is in flight; kStopped: the queue was
  // stopped, and everything has ended.
  Outcome Step();
  const KvCache& cache() const { return *cache_; }
  int num_running() const { return static_cast<int>(running_.size()); }
  int num_waiting() const { return static_cast<int>(waiting_.size()); }

 private:
  using SequencePtr = std::unique_ptr<EngineSequence>;
  using End = EngineSequence::End;
  struct Outgoing {
    std::shared_ptr<ResponseStream> stream;
    Event event;
  };

  EngineCore(const CoreLimits& limits, const CoreParts& parts);
  absl::Status LimitContextToArena();

  // engine_admission.cpp: requests in
  absl::Status Check(const Request& request) const;
  void AddRequest(Submission submission);
  void Enqueue(SequencePtr sequence);

  // engine_core.cpp: collecting and ending
  bool Collect();
  void EndExpired();
  void EndAll(const End& end);
  void EndWithSiblings(EngineSequence& sequence, const End& end, const absl::Status& error = absl::OkStatus());
  void Finish(EngineSequence& sequence, const End& end, absl::Status error = absl::OkStatus());
  void RemoveRetired();
  void Tell();
  void PublishStats();

  // engine_step.cpp: computing
  StepPlan Plan() const;
  void Apply(const StepPlan& plan);
  bool StartSequence(EngineSequence& sequence);
  void Preempt(EngineSequence& sequence, Preemption::Cause cause);
  bool ReserveStep();
  EngineSequence* LowestRunning() const;
  void GiveUp(EngineSequence& sequence, const absl::Status& status);
  absl::Status Compute();
  void FailDevice(const absl::Status& status);
  void MakeRoomForPolicies();
  void EndFaulty();
  void AfterCommit();
  void TakeScores();
  void SampleAll();
  void TakeToken(EngineSequence& sequence, const SampledRow& choice);
  void FinishBroken(EngineSequence& sequence, absl::Status error);
  void ForkSiblings(EngineSequence& parent, std::span<const SampledRow> choices);
  int64_t HeldBytes(const EngineSequence& sequence) const;
  int64_t NeededBytes(const EngineSequence& sequence) const;
  void Report(double seconds);

  CoreLimits limits_;
  CoreParts parts_;
  int vocab_size_ = 0;
  std::vector<int32_t> end_ids_;  // every id that ends an answer
  RequestQueue queue_;
  std::atomic<uint64_t> submitted_{0};

  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<KvChooser> chooser_;
  KvBatch kv_batch_;
  std::unique_ptr<StepBatch> batch_;
  uint64_t next_order_ = 0;
  std::vector<SequencePtr> waiting_;  // by rank
  std::vector<SequencePtr> running_;  // in order of admission
  std::vector<BatchItem> items_;      // of the step
  std::vector<KvStepItem> kv_items_;
  SteadyTime step_end_{};
  std::vector<Outgoing> outbox_;      // told at the end of the step, after the numbers are published
  std::vector<std::string> ended_ids_;
  StepReport report_;
  EngineStats counters_;
};

}  // namespace loupe
