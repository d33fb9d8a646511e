#include "engine/response_stream.h"

#include <utility>

namespace loupe {

namespace {

void MergeDelta(Delta& into, Delta&& more) {
  into.text += more.text;
  into.token_ids.insert(into.token_ids.end(), more.token_ids.begin(), more.token_ids.end());
  for (TokenLogprobs& logprobs : more.logprobs) into.logprobs.push_back(std::move(logprobs));
}

}  // namespace

std::optional<Event> ResponseStream::TakeLocked() {
  if (events_.empty()) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  if (std::holds_alternative<Finished>(event)) --unfinished_;
  return event;
}

std::optional<Event> ResponseStream::TryNext() {
  std::lock_guard<std::mutex> lock(mutex_);
  return TakeLocked();
}

std::optional<Event> ResponseStream::WaitNext(SteadyTime until) {
  std::unique_lock<std::mutex> lock(mutex_);
  ready_.wait_until(lock, until, [this] { return !events_.empty() || unfinished_ == 0; });
  return TakeLocked();
}

bool ResponseStream::done() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return unfinished_ == 0;
}

void ResponseStream::OnReady(std::function<void()> wake) {
  std::lock_guard<std::mutex> wake_lock(wake_mutex_);
  wake_ = std::move(wake);
  bool waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting = !events_.empty();
  }
  if (wake_ && waiting) wake_();
}

void ResponseStream::Push(Event event) {
  bool was_empty;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    was_empty = events_.empty();
    auto* delta = std::get_if<Delta>(&event);
    Delta* last = nullptr;
    if (delta != nullptr) {
      // The newest waiting delta of the same sample, unless that sample's end lies behind it. n samples leave at most
      // n deltas, one Started and n ends waiting.
      for (auto it = events_.rbegin(); it != events_.rend() && last == nullptr; ++it) {
        auto* waiting = std::get_if<Delta>(&*it);
        if (waiting != nullptr && waiting->index == delta->index) last = waiting;
      }
    }
    if (last != nullptr) {
      MergeDelta(*last, std::move(*delta));
    } else {
      events_.push_back(std::move(event));
    }
  }
  ready_.notify_all();
  if (!was_empty) return;
  std::lock_guard<std::mutex> wake_lock(wake_mutex_);
  if (wake_) wake_();
}

}  // namespace loupe
