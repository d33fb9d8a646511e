// Small jobs of a step that its thread does not wait for until it needs them: a thread of its own does them meanwhile.
// Used by the step thread; the helping thread starts with the first job.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace loupe {

class SideWork {
 public:
  SideWork() = default;
  ~SideWork();

  // The jobs do not depend on each other, and on nothing that the step thread changes before Finish.
  void Begin(std::vector<std::function<void()>> jobs);
  // All of them are done when this returns; the caller does those that nobody has begun.
  void Finish();

 private:
  void Run();
  void DoJobs();

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> jobs_;  // unchanged while the helper works
  std::atomic<size_t> next_{0};              // the first job that nobody has taken
  bool wanted_ = false, working_ = false, stop_ = false;  // guarded by mutex_
};

}  // namespace loupe
