// Where client threads and the step thread meet: requests on their way in, who is in flight, drain and abort, and the
// last numbers that the step thread has published. All mutexes of the engine are here and in ResponseStream; the step
// thread holds this one for moments only. Bounded: at most `max_waiting` requests that have not started.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/clock.h"
#include "engine/engine_stats.h"
#include "engine/kv_chooser.h"
#include "engine/request.h"
#include "engine/response_stream.h"

namespace loupe {

// A request that was accepted, and where its answer goes.
struct Submission {
  Request request;
  std::shared_ptr<ResponseStream> stream;
  KvChoice kv;
};

class RequestQueue {
 public:
  // `clock` outlives the queue.
  RequestQueue(int max_waiting, const Clock& clock);

  // ---- any thread
  // All or none. ALREADY_EXISTS: an id is in flight; RESOURCE_EXHAUSTED: full; INVALID_ARGUMENT: more than ever fit;
  // UNAVAILABLE: draining, or the device has failed.
  absl::Status Push(std::vector<Submission> submissions);
  bool Cancel(const std::string& id);
  void BeginDrain();
  void AbortAll();
  // The step thread shall end everything and return.
  void Stop();
  bool WaitIdle(SteadyTime until);
  EngineStats Stats() const;

  // ---- step thread
  struct Inbox {
    std::vector<Submission> arrived;
    bool abort = false;  // end everything, what arrived included
    bool stop = false;
  };
  Inbox Take();
  // Sleeps until there is something to take.
  void WaitForWork();
  // The request no longer counts as waiting.
  void OnStarted(const std::string& id);
  // The id may be used again. Called before the client can see the end of its request.
  void OnEnding(const std::string& id);
  // `count` requests have told their clients the end.
  void OnEnded(int count);
  // What only the step thread knows of the statistics; the rest is filled in by Stats.
  void Publish(const EngineStats& stats);
  // The device has failed: from now on Push answers with this status.
  void Fail(const absl::Status& status);

 private:
  struct InFlight {
    std::shared_ptr<ResponseStream> stream;
    SteadyTime arrival;
    int64_t prompt_tokens = 0;
    bool waiting = true;
  };

  const int max_waiting_;
  const Clock& clock_;
  mutable std::mutex mutex_;
  // All below are guarded by mutex_.
  std::condition_variable work_;
  std::condition_variable idle_;
  std::vector<Submission> arrived_;
  std::map<std::string, InFlight> in_flight_;  // by id
  int num_waiting_ = 0;
  int num_unended_ = 0;  // accepted and not yet told the end
  bool draining_ = false, abort_ = false, stop_ = false;
  absl::Status failure_;
  EngineStats published_;
  SteadyTime last_progress_{};  // end of a step, or the moment work came to an idle engine
};

}  // namespace loupe
