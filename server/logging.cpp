#include "server/logging.h"

#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>

#include "nlohmann/json.hpp"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

std::array<std::atomic<int64_t>, kLogLevels.size()> message_counts;

// Fields of the line that this thread is writing. spdlog 1.10 has no structured fields; its logger is synchronous here,
// so the formatter runs inside LogEvent's call.
thread_local const Json* current_fields = nullptr;

size_t LevelIndex(spdlog::level::level_enum level) {
  if (level <= spdlog::level::debug) return 0;
  if (level == spdlog::level::info) return 1;
  return level == spdlog::level::warn ? 2 : 3;
}

std::string Timestamp(spdlog::log_clock::time_point time) {
  const auto since_epoch = time.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_epoch);
  const auto millis = std::chrono::duration_cast<std::chrono::milliseconds>(since_epoch - seconds);
  const std::time_t unix_s = seconds.count();
  std::tm utc{};
  gmtime_r(&unix_s, &utc);
  char text[40];
  const size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
  std::snprintf(text + length, sizeof text - length, ".%03dZ", static_cast<int>(millis.count()));
  return text;
}

class JsonLines : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const size_t level = LevelIndex(message.level);
    message_counts[level].fetch_add(1, std::memory_order_relaxed);
    Json line = {{"ts", Timestamp(message.time)},
                 {"level", kLogLevels[level]},
                 {"msg", std::string(message.payload.data(), message.payload.size())}};
    if (current_fields != nullptr) line.update(*current_fields);
    // Bytes of clients may be in the text: what is not UTF-8 is replaced, never thrown at.
    const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<JsonLines>(); }
};

}  // namespace

void InitLogging(const std::string& level) {
  auto logger = std::make_shared<spdlog::logger>("loupe", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(std::make_unique<JsonLines>());
  const spdlog::level::level_enum parsed = spdlog::level::from_str(level);
  const bool known = parsed != spdlog::level::off || level == "off";
  logger->set_level(known ? parsed : spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  if (!known) {
    spdlog::warn("unknown log level '{}', using info; known are trace, debug, info, warning, error, critical, off",
                 level);
  }
}

void LogEvent(const std::string& message, const Json& fields) {
  current_fields = &fields;
  spdlog::info("{}", message);
  current_fields = nullptr;
}

std::array<int64_t, kLogLevels.size()> LogMessageCounts() {
  std::array<int64_t, kLogLevels.size()> counts{};
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = message_counts[i].load(std::memory_order_relaxed);
  return counts;
}

}  // namespace loupe
