// Log lines as JSON objects on stderr: {"ts", "level", "msg", fields...}. Everyone logs through spdlog; a line that has
// fields (an access log line) goes through LogEvent. Thread-safe; set up once, before other threads start.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "nlohmann/json_fwd.hpp"

namespace loupe {

inline constexpr std::array<const char*, 4> kLogLevels = {"debug", "info", "warning", "error"};

// `level` is trace, debug, info, warning, error, critical or off; anything else is taken as info, with a warning.
void InitLogging(const std::string& level);

// One line at level info whose object carries `fields` beside ts, level and msg.
void LogEvent(const std::string& message, const nlohmann::ordered_json& fields);

// Lines written since start, by index into kLogLevels (trace counts as debug, critical as error).
std::array<int64_t, kLogLevels.size()> LogMessageCounts();

}  // namespace loupe
