#include "server/grpc_log.h"

#include <grpc/support/log.h>

#include <mutex>

#include "spdlog/spdlog.h"

namespace loupe {
namespace {

thread_local int quiet = 0;

void Log(gpr_log_func_args* args) {
  const bool debug = quiet > 0 || args->severity == GPR_LOG_SEVERITY_DEBUG;
  const auto level = debug                                         ? spdlog::level::debug
                     : args->severity == GPR_LOG_SEVERITY_ERROR ? spdlog::level::warn
                                                                : spdlog::level::info;
  spdlog::log(level, "grpc: {}", args->message);
}

}  // namespace

void RouteGrpcLog() {
  static std::once_flag once;
  std::call_once(once, [] { gpr_set_log_function(Log); });
}

QuietGrpcLog::QuietGrpcLog() { ++quiet; }
QuietGrpcLog::~QuietGrpcLog() { --quiet; }

}  // namespace loupe
