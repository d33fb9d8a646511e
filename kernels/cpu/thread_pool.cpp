#include "kernels/cpu/thread_pool.h"

#include <sched.h>

#include <chrono>

#include "kernels/check.h"

namespace loupe {
namespace {

// A layer needs a barrier every 10 to 30 us, a wake-up from sleep takes 50: waiting threads spin for the length of a
// few jobs, then sleep.
constexpr std::chrono::microseconds kSpinTime{200};
constexpr int kPausesPerClockRead = 32;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// With more threads than cores, spinning would keep the thread that everybody waits for from running.
bool MaySpin(int num_threads) {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) != 0 || num_threads <= CPU_COUNT(&set);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), may_spin_(MaySpin(num_threads)) {
  LOUPE_CHECK_GE(num_threads, 1);
  for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { Work(thread); });
}

ThreadPool::~ThreadPool() {
  job_ = nullptr;
  Barrier();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::RunErased(ErasedJob job, void* context) {
  if (num_threads_ == 1) return job(context, 0);
  job_ = job;
  context_ = context;
  Barrier();
  job(context, 0);
  Barrier();
}

void ThreadPool::Work(int thread) {
  for (;;) {
    Barrier();
    if (job_ == nullptr) return;
    job_(context_, thread);
    Barrier();
  }
}

void ThreadPool::Barrier() {
  if (num_threads_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);  // nobody arrives again before the generation has changed
    generation_.store(generation + 1);
    if (sleepers_.load() > 0) generation_.notify_all();
    return;
  }
  if (may_spin_ && SpinWhile(generation)) return;
  // Sleeper and waker each write first and read the other's variable second (sequentially consistent), so one of them
  // always sees the other.
  sleepers_.fetch_add(1);
  while (generation_.load() == generation) generation_.wait(generation);
  sleepers_.fetch_sub(1);
}

bool ThreadPool::SpinWhile(uint32_t generation) const {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (generation_.load(std::memory_order_acquire) != generation) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace loupe
