#include "server/stop_source.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>

#include "kernels/check.h"

namespace loupe {

StopSource::StopSource() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal_fd_ = signalfd(-1, &signals, SFD_NONBLOCK | SFD_CLOEXEC);
  request_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  LOUPE_CHECK(signal_fd_ >= 0 && request_fd_ >= 0) << "no descriptors for signals";
}

StopSource::~StopSource() {
  close(signal_fd_);
  close(request_fd_);
}

void StopSource::Request() {
  const uint64_t one = 1;
  const ssize_t written = write(request_fd_, &one, sizeof one);
  LOUPE_CHECK_EQ(written, static_cast<ssize_t>(sizeof one));
}

bool StopSource::Wait(std::chrono::steady_clock::time_point until) {
  using std::chrono::milliseconds;
  for (;;) {
    const auto left = until - std::chrono::steady_clock::now();
    // Rounded up, so that it does not spin through the last millisecond.
    const int64_t wait_ms = std::clamp<int64_t>(std::chrono::ceil<milliseconds>(left).count(), 0, 60'000);
    pollfd fds[] = {{signal_fd_, POLLIN, 0}, {request_fd_, POLLIN, 0}};
    poll(fds, 2, static_cast<int>(wait_ms));
    bool came = false;
    signalfd_siginfo info;
    while (read(signal_fd_, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) ++num_signals_, came = true;
    uint64_t requests = 0;
    if (read(request_fd_, &requests, sizeof requests) == static_cast<ssize_t>(sizeof requests)) came = true;
    if (came || std::chrono::steady_clock::now() >= until) return came;
  }
}

}  // namespace loupe
