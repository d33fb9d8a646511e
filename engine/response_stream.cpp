#include "engine/response_stream.h"

#include <iterator>

namespace loupe {
namespace {

// The waiting delta that `delta` continues: nothing of the same sample came after it.
Delta* FindMergeable(std::deque<Event>& events, int index) {
  for (auto it = events.rbegin(); it != events.rend(); ++it) {
    auto* waiting = std::get_if<Delta>(&*it);
    if (waiting != nullptr && waiting->index == index) return waiting;
  }
  return nullptr;
}

void AppendTo(Delta* waiting, Delta&& delta) {
  waiting->text += delta.text;
  waiting->token_ids.insert(waiting->token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
  std::move(delta.logprobs.begin(), delta.logprobs.end(), std::back_inserter(waiting->logprobs));
}

}  // namespace

std::optional<Event> ResponseStream::TryNext() {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  if (std::holds_alternative<Finished>(event)) --unfinished_;
  return event;
}

std::optional<Event> ResponseStream::WaitNext(SteadyTime until) {
  {
    std::unique_lock lock(mutex_);
    ready_.wait_until(lock, until, [&] { return !events_.empty() || unfinished_ == 0; });
  }
  return TryNext();
}

bool ResponseStream::done() const {
  const std::lock_guard lock(mutex_);
  return unfinished_ == 0;
}

void ResponseStream::OnReady(std::function<void()> wake) {
  const std::lock_guard lock(wake_mutex_);
  wake_ = std::move(wake);
  if (!wake_) return;
  {
    const std::lock_guard events_lock(mutex_);
    if (events_.empty()) return;
  }
  wake_();
}

void ResponseStream::Push(Event event) {
  {
    const std::lock_guard lock(mutex_);
    if (auto* delta = std::get_if<Delta>(&event)) {
      if (Delta* waiting = FindMergeable(events_, delta->index)) {
        AppendTo(waiting, std::move(*delta));
        return;
      }
    }
    events_.push_back(std::move(event));
    // Someone was told of the events before this one.
    if (events_.size() > 1) return;
  }
  ready_.notify_all();
  const std::lock_guard lock(wake_mutex_);
  if (wake_) wake_();
}

}  // namespace loupe
