#include "engine/side_work.h"

#include <utility>

namespace loupe {

SideWork::~SideWork() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void SideWork::Begin(std::vector<std::function<void()>> jobs) {
  if (jobs.empty()) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  {
    const std::lock_guard lock(mutex_);
    jobs_ = std::move(jobs);
    next_ = 0;
    wanted_ = true;
  }
  changed_.notify_all();
}

void SideWork::DoJobs() {
  for (size_t i = next_++; i < jobs_.size(); i = next_++) jobs_[i]();
}

void SideWork::Finish() {
  if (jobs_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    wanted_ = false;  // a helper that has not woken up stays away
  }
  DoJobs();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !working_; });
  jobs_.clear();
}

void SideWork::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return wanted_ || stop_; });
    if (stop_) return;
    wanted_ = false;
    working_ = true;
    lock.unlock();
    DoJobs();
    lock.lock();
    working_ = false;
    changed_.notify_all();
  }
}

}  // namespace loupe
