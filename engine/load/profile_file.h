// Profiles of policy spherical as files: JSON that holds data only. Any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "kvcache/policies/spherical_profile.h"
#include "nlohmann/json.hpp"

namespace loupe {

inline constexpr char kProfileKind[] = "spherical-profile";
inline constexpr int kProfileVersion = 1;

// INVALID_ARGUMENT names the field and what is wrong with it. `name` is what requests call it.
absl::StatusOr<SphericalProfile> ParseProfile(const std::string& text, const std::string& name);

// The text of a file, numbers rounded to what they can tell. `calibration` says how they came about; nothing reads it.
std::string ProfileToText(const SphericalProfile& profile, const nlohmann::ordered_json& calibration);

}  // namespace loupe
