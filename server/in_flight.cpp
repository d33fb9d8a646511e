#include "server/in_flight.h"

namespace loupe {

std::shared_ptr<void> InFlight::Add(const std::vector<std::string>& ids, const Streams& streams) {
  auto added = std::make_unique<std::vector<Entries::iterator>>();
  const std::lock_guard lock(mutex_);
  for (const std::string& id : ids) {
    for (const auto& stream : streams) added->push_back(entries_.emplace(id, stream));
  }
  return std::shared_ptr<void>(added.get(), [this, keep = std::shared_ptr<std::vector<Entries::iterator>>(std::move(added))](void*) {
    const std::lock_guard erasing(mutex_);
    for (const auto entry : *keep) entries_.erase(entry);
  });
}

bool InFlight::Cancel(const std::string& id) {
  std::vector<std::shared_ptr<ResponseStream>> found;
  {
    const std::lock_guard lock(mutex_);
    for (auto [entry, end] = entries_.equal_range(id); entry != end; ++entry) {
      if (auto stream = entry->second.lock()) found.push_back(std::move(stream));
    }
  }
  bool running = false;
  for (const auto& stream : found) {
    if (stream->done()) continue;
    running = true;
    stream->Cancel();
  }
  return running;
}

}  // namespace loupe
