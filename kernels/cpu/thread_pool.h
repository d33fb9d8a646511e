// A fixed team of threads that runs one job at a time, the caller included. Made for steps of a few hundred short jobs:
// members spin for a moment after a job and sleep after that, so an idle server burns nothing. Where others want the cores
// too, spinning only takes them from the member that everybody waits for: after a few vain waits the pool sleeps at once
// for a while. Used by one thread at a time (the step thread).
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace loupe {

class ThreadPool {
 public:
  // Throws std::system_error if the system refuses a thread.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Calls job(thread) on every thread, thread 0 being the caller; returns when all are done.
  template <class Job>
  void Run(Job&& job) {
    using Type = std::remove_reference_t<Job>;
    RunErased([](void* context, int thread) { (*static_cast<Type*>(context))(thread); },
              const_cast<std::remove_const_t<Type>*>(&job));
  }

  // Inside a job: all threads wait for each other. Every thread must call it equally often.
  void Barrier();

  // Contiguous share of `items` for a thread, so that each thread reads one sequential stream.
  std::pair<int64_t, int64_t> Share(int64_t items, int thread) const {
    return {items * thread / num_threads_, items * (thread + 1) / num_threads_};
  }

 private:
  using ErasedJob = void (*)(void*, int);
  void RunErased(ErasedJob job, void* context);
  void Work(int thread);
  bool SpinWhile(uint32_t generation);  // true once the generation has changed

  const int num_threads_;
  const bool may_spin_;
  std::vector<std::thread> threads_;
  enum Start { kWaiting, kGo, kGiveUp };
  std::atomic<int> start_{kWaiting};
  ErasedJob job_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<int> vain_spins_{0};        // rises with waits that spun in vain, falls with those that did not
  std::atomic<int64_t> no_spin_until_{0};  // nanoseconds of the steady clock
};

}  // namespace loupe
