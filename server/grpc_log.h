// gRPC's own log lines, which it would print to stderr in a format of its own: they become lines of our log.
#pragma once

namespace loupe {

// Once, before the first use of gRPC; thread-safe, later calls do nothing.
void RouteGrpcLog();

// While one lives, what gRPC says on this thread is only worth a debug line: the caller reports the failure itself.
class QuietGrpcLog {
 public:
  QuietGrpcLog();
  ~QuietGrpcLog();
  QuietGrpcLog(const QuietGrpcLog&) = delete;
  QuietGrpcLog& operator=(const QuietGrpcLog&) = delete;
};

}  // namespace loupe
