// The team of threads: every thread runs every job once, barriers order writes, sleep and wake-up lose nothing. Also
// built with the thread sanitizer.
#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

namespace loupe {
namespace {

TEST(ThreadPool, EveryThreadRunsEveryJobOnce) {
  for (const int size : {1, 2, 3, 5}) {
    ThreadPool pool(size);
    ASSERT_EQ(pool.size(), size);
    std::vector<int> calls(static_cast<size_t>(size));
    const int jobs = 2000;
    for (int i = 0; i < jobs; ++i) pool.Run([&](int thread) { ++calls[static_cast<size_t>(thread)]; });
    for (const int count : calls) EXPECT_EQ(count, jobs);
  }
}

TEST(ThreadPool, TheCallerIsThreadZero) {
  ThreadPool pool(3);
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<std::thread::id> ids(3);
  pool.Run([&](int thread) { ids[static_cast<size_t>(thread)] = std::this_thread::get_id(); });
  EXPECT_EQ(ids[0], caller);
  EXPECT_NE(ids[1], caller);
  EXPECT_NE(ids[1], ids[2]);
}

// Plain memory on purpose: if the barrier did not order it, the sums would be wrong and the sanitizer would say so.
TEST(ThreadPool, BarriersInsideAJobOrderWrites) {
  for (const int size : {2, 4}) {
    ThreadPool pool(size);
    std::vector<int64_t> written(static_cast<size_t>(size)), seen(static_cast<size_t>(size));
    for (int round = 1; round <= 300; ++round) {
      pool.Run([&](int thread) {
        written[static_cast<size_t>(thread)] = round + thread;
        pool.Barrier();
        seen[static_cast<size_t>(thread)] = std::accumulate(written.begin(), written.end(), int64_t{0});
        pool.Barrier();
        written[static_cast<size_t>(thread)] = -1;
      });
      for (const int64_t sum : seen) ASSERT_EQ(sum, int64_t{size} * round + size * (size - 1) / 2) << "round " << round;
    }
  }
}

TEST(ThreadPool, WakesThreadsThatFellAsleep) {
  ThreadPool pool(3);
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // ten times the spinning
    std::atomic<int> calls{0};
    pool.Run([&](int) { calls.fetch_add(1); });
    EXPECT_EQ(calls.load(), 3);
  }
}

// A member that is late makes the others sleep inside the job.
TEST(ThreadPool, WaitsForSlowMembers) {
  ThreadPool pool(2);
  for (int slow = 0; slow < 2; ++slow) {
    int value = 0;
    pool.Run([&](int thread) {
      if (thread == slow) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        value = 7;
      }
      pool.Barrier();
      EXPECT_EQ(value, 7);
    });
  }
}

TEST(ThreadPool, SharesCoverEverythingOnce) {
  ThreadPool pool(3);
  for (const int64_t items : {0, 1, 2, 3, 7, 100, 49153}) {
    int64_t next = 0;
    for (int thread = 0; thread < 3; ++thread) {
      const auto [begin, end] = pool.Share(items, thread);
      EXPECT_EQ(begin, next);
      EXPECT_LE(end - begin, items / 3 + 1);
      next = end;
    }
    EXPECT_EQ(next, items);
  }
}

TEST(ThreadPool, EndsWithoutHavingRun) {
  for (int i = 0; i < 20; ++i) ThreadPool pool(4);
}

}  // namespace
}  // namespace loupe
