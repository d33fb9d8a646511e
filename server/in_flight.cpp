#include "server/in_flight.h"

namespace loupe {

std::shared_ptr<void> InFlight::Add(const std::vector<std::string>& ids, const Streams& streams) {
  auto group = std::make_shared<Group>(Group{ids, {streams.begin(), streams.end()}});
  std::vector<Entries::iterator> added;
  const std::lock_guard lock(mutex_);
  for (const std::string& id : ids) {
    Forget(id);
    added.push_back(entries_.emplace(id, group));
  }
  return std::shared_ptr<void>(group.get(), [this, added = std::move(added)](void*) {
    const std::lock_guard erasing(mutex_);
    for (const auto entry : added) entries_.erase(entry);
  });
}

bool InFlight::Cancel(const std::string& id) {
  std::vector<std::shared_ptr<ResponseStream>> running;
  const std::lock_guard lock(mutex_);
  for (auto [entry, end] = entries_.equal_range(id); entry != end; ++entry) {
    bool any = false;
    for (const auto& weak : entry->second->streams) {
      auto stream = weak.lock();
      if (stream == nullptr || stream->done()) continue;
      stream->Cancel();
      any = true;
      running.push_back(std::move(stream));
    }
    if (!any) continue;
    for (const std::string& known : entry->second->ids) Remember(known);
  }
  return !running.empty() || cancelled_at_.contains(id);
}

void InFlight::Remember(const std::string& id) {
  Forget(id);
  cancelled_at_[id] = cancelled_.insert(cancelled_.end(), id);
  if (cancelled_.size() > kMaxCancelled) Forget(std::string(cancelled_.front()));
}

void InFlight::Forget(const std::string& id) {
  const auto found = cancelled_at_.find(id);
  if (found == cancelled_at_.end()) return;
  cancelled_.erase(found->second);
  cancelled_at_.erase(found);
}

}  // namespace loupe
