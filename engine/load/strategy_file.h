// Strategies of PolyKV as files: JSON that holds data only. Any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "kvcache/policies/strategy.h"
#include "nlohmann/json.hpp"

namespace loupe {

inline constexpr char kStrategyKind[] = "polykv-strategy";
inline constexpr int kStrategyVersion = 1;

// INVALID_ARGUMENT names the field and what is wrong with it. `name` is what requests call it.
absl::StatusOr<Strategy> ParseStrategy(const std::string& text, const std::string& name);

// The text of a file. `calibration` says how the numbers came about; nothing reads it.
std::string StrategyToText(const Strategy& strategy, const nlohmann::ordered_json& calibration);

}  // namespace loupe
