#include "engine/request_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace loupe {

RequestQueue::RequestQueue(int max_waiting, const Clock& clock) : max_waiting_(max_waiting), clock_(clock) {}

absl::Status RequestQueue::Push(std::vector<Submission> submissions) {
  const SteadyTime now = clock_.Now();
  const int count = static_cast<int>(submissions.size());
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
    if (draining_ || stop_) return absl::UnavailableError("the server is draining; send the request to another one");
    if (count > max_waiting_) {
      return absl::InvalidArgumentError(absl::StrCat("prompt: has ", count, " prompts, but at most ", max_waiting_,
                                                     " may wait at a time (--max-queue); send them in pieces"));
    }
    for (const Submission& submission : submissions) {
      if (!in_flight_.contains(submission.request.id)) continue;
      return absl::AlreadyExistsError(absl::StrCat("request id '", submission.request.id, "' is in flight; use another id"));
    }
    if (num_waiting_ + count > max_waiting_) {
      return absl::ResourceExhaustedError(absl::StrCat(num_waiting_, " requests wait, at most ", max_waiting_, " may, and ",
                                                       count, " would come; try again later"));
    }
    if (num_unended_ == 0) last_progress_ = now;
    for (Submission& submission : submissions) {
      const Request& request = submission.request;
      const InFlight entry{submission.stream, request.arrival, static_cast<int64_t>(request.prompt.size()), true};
      LOUPE_CHECK(in_flight_.emplace(request.id, entry).second) << "two requests of one call are called '" << request.id << "'";
      arrived_.push_back(std::move(submission));
    }
    num_waiting_ += count;
    num_unended_ += count;
  }
  work_.notify_one();
  return absl::OkStatus();
}

bool RequestQueue::Cancel(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = in_flight_.find(id);
  if (found == in_flight_.end()) return false;
  found->second.stream->Cancel();
  return true;
}

void RequestQueue::BeginDrain() {
  const std::lock_guard lock(mutex_);
  draining_ = true;
}

void RequestQueue::AbortAll() {
  {
    const std::lock_guard lock(mutex_);
    abort_ = num_unended_ > 0;
  }
  work_.notify_one();
}

void RequestQueue::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_one();
}

bool RequestQueue::WaitIdle(SteadyTime until) {
  std::unique_lock lock(mutex_);
  return idle_.wait_until(lock, until, [&] { return num_unended_ == 0; });
}

EngineStats RequestQueue::Stats() const {
  const SteadyTime now = clock_.Now();
  const std::lock_guard lock(mutex_);
  EngineStats stats = published_;
  stats.failure = std::string(failure_.message());
  stats.requests_waiting += num_waiting_;
  SteadyTime oldest = now;
  for (const auto& [id, entry] : in_flight_) {
    if (!entry.waiting) continue;
    stats.queue_prompt_tokens += entry.prompt_tokens;
    oldest = std::min(oldest, entry.arrival);
  }
  stats.queue_oldest_age_s = SecondsBetween(oldest, now);
  stats.last_step_age_s = num_unended_ == 0 ? 0 : std::max(0.0, SecondsBetween(last_progress_, now));
  return stats;
}

RequestQueue::Inbox RequestQueue::Take() {
  const std::lock_guard lock(mutex_);
  Inbox inbox;
  inbox.arrived = std::exchange(arrived_, {});
  inbox.abort = std::exchange(abort_, false);
  inbox.stop = stop_;
  return inbox;
}

void RequestQueue::WaitForWork() {
  std::unique_lock lock(mutex_);
  work_.wait(lock, [&] { return !arrived_.empty() || abort_ || stop_; });
}

void RequestQueue::OnStarted(const std::string& id) {
  const std::lock_guard lock(mutex_);
  InFlight& entry = in_flight_.at(id);
  num_waiting_ -= entry.waiting;
  entry.waiting = false;
}

void RequestQueue::OnEnding(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = in_flight_.find(id);
  LOUPE_CHECK(found != in_flight_.end()) << "request '" << id << "' ends twice";
  num_waiting_ -= found->second.waiting;
  in_flight_.erase(found);
}

void RequestQueue::OnEnded(int count) {
  {
    const std::lock_guard lock(mutex_);
    num_unended_ -= count;
    LOUPE_CHECK_GE(num_unended_, 0) << "more requests ended than were accepted";
    if (num_unended_ > 0) return;
  }
  idle_.notify_all();
}

void RequestQueue::Fail(const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  failure_ = status;
}

void RequestQueue::Publish(const EngineStats& stats) {
  const SteadyTime now = clock_.Now();
  const std::lock_guard lock(mutex_);
  published_ = stats;
  last_progress_ = now;
}

}  // namespace loupe
