// Which streams the ids that clients know stand for, so that they can be cancelled. An id is what a client chose or was
// shown; several requests may carry the same one, and the engine knows none of them. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/response_stream.h"

namespace loupe {

class InFlight {
 public:
  using Streams = std::vector<std::shared_ptr<ResponseStream>>;

  // Each of `ids` stands for `streams` until the returned handle goes. This outlives the handle.
  [[nodiscard]] std::shared_ptr<void> Add(const std::vector<std::string>& ids, const Streams& streams);
  // Ends every request that carries `id`; false if none of them is still running.
  bool Cancel(const std::string& id);

 private:
  // Not owners: when its reader's last copy goes, a request is cancelled.
  using Entries = std::multimap<std::string, std::weak_ptr<ResponseStream>>;
  std::mutex mutex_;
  Entries entries_;  // guarded by mutex_
};

}  // namespace loupe
