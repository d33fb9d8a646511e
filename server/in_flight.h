// Which streams the ids that clients know stand for, so that they can be cancelled. An id is what a client chose or was
// shown; several requests may carry the same one, and the engine knows none of them. Thread-safe.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/response_stream.h"

namespace loupe {

class InFlight {
 public:
  using Streams = std::vector<std::shared_ptr<ResponseStream>>;

  // Ids of cancelled requests that are remembered; the oldest go first.
  static constexpr size_t kMaxCancelled = 4096;

  // Each of `ids` stands for `streams` until the returned handle goes. This outlives the handle.
  [[nodiscard]] std::shared_ptr<void> Add(const std::vector<std::string>& ids, const Streams& streams);
  // Ends every request that carries `id`. Idempotent: true if one of them was still running, or was cancelled before and
  // no request has taken the id since; false if nobody carries the id, or only requests that ended by themselves.
  bool Cancel(const std::string& id);

 private:
  struct Group {
    std::vector<std::string> ids;
    // Not owners: when its reader's last copy goes, a request is cancelled.
    std::vector<std::weak_ptr<ResponseStream>> streams;
  };
  using Entries = std::multimap<std::string, std::shared_ptr<Group>>;

  void Remember(const std::string& id);
  void Forget(const std::string& id);

  std::mutex mutex_;
  Entries entries_;                   // guarded by mutex_
  std::list<std::string> cancelled_;  // guarded by mutex_; the oldest first
  std::unordered_map<std::string, std::list<std::string>::iterator> cancelled_at_;  // guarded by mutex_
};

}  // namespace loupe
