// The way back from the step thread to whoever waits for a request. One writer (the step thread), one reader. Bounded:
// deltas that the reader has not taken are merged, so what waits is at most the request's own output; the step thread
// never blocks here. Destroying the reader's end cancels the request.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/request.h"

namespace loupe {

// The request left the queue and its prompt is about to be computed.
struct Started {
  int prompt_tokens = 0;
  int cached_tokens = 0;
};

using Event = std::variant<Started, PromptScored, Delta, Finished>;

class ResponseStream {
 public:
  explicit ResponseStream(std::string id, int num_samples) : id_(std::move(id)), unfinished_(num_samples) {}

  // ---- reader
  const std::string& id() const { return id_; }
  // The next event if there is one. After the Finished of every sample nothing follows and done() is true.
  std::optional<Event> TryNext();
  // Waits at most until `until`; nothing on time-out or when done.
  std::optional<Event> WaitNext(SteadyTime until);
  // Every Finished was taken.
  bool done() const;
  // Called (by the step thread, must not block or call the engine) whenever an event became available while none was
  // waiting. Called at once if some are waiting already. Empty: stop calling; after this returns no call is running.
  void OnReady(std::function<void()> wake);
  // Any thread, idempotent. The samples end with kCancelled within one step.
  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // ---- writer (step thread)
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  void Push(Event event);

 private:
  const std::string id_;
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Event> events_;      // guarded by mutex_
  std::function<void()> wake_;    // guarded by wake_mutex_
  std::mutex wake_mutex_;
  int unfinished_;                // guarded by mutex_: samples whose Finished was not taken
  std::atomic<bool> cancelled_{false};
};

}  // namespace loupe
