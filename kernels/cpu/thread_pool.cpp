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
// One vain wait weighs as much as this many good ones; at the limit the pool stops spinning for a while. The pause between
// two requests is one vain wait, and the hundreds of barriers of the next step outweigh it.
constexpr int kVainWeight = 4, kVainLimit = 16;
constexpr std::chrono::milliseconds kNoSpinTime{20};

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
  try {
    for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { Work(thread); });
  } catch (...) {
    start_ = kGiveUp;
    start_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    throw;
  }
  start_ = kGo;
  start_.notify_all();
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
  start_.wait(kWaiting);
  if (start_ == kGiveUp) return;
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

bool ThreadPool::SpinWhile(uint32_t generation) {
  const auto now = std::chrono::steady_clock::now();
  if (std::chrono::nanoseconds(now.time_since_epoch()).count() < no_spin_until_.load(std::memory_order_relaxed)) return false;
  const auto end = now + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (generation_.load(std::memory_order_acquire) != generation) {
        if (vain_spins_.load(std::memory_order_relaxed) > 0) vain_spins_.fetch_sub(1, std::memory_order_relaxed);
        return true;
      }
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  if (vain_spins_.fetch_add(kVainWeight, std::memory_order_relaxed) + kVainWeight >= kVainLimit) {
    vain_spins_.store(0, std::memory_order_relaxed);
    const auto until = std::chrono::steady_clock::now() + kNoSpinTime;
    no_spin_until_.store(std::chrono::nanoseconds(until.time_since_epoch()).count(), std::memory_order_relaxed);
  }
  return false;
}

}  // namespace loupe
