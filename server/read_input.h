// Whole files and standard input as one string, for flags that name a file (config, templates, prompts). Every way in
// which that can fail comes back as a status that names the file. Stateless, any thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace loupe {

inline constexpr int64_t kMaxInputBytes = int64_t{256} << 20;

// `what` says in messages what the file is ("config file"). NOT_FOUND, PERMISSION_DENIED, INVALID_ARGUMENT for a
// directory and for more than `max_bytes`.
absl::StatusOr<std::string> ReadFile(const std::string& what, const std::string& path, int64_t max_bytes = kMaxInputBytes);
absl::StatusOr<std::string> ReadStandardInput(int64_t max_bytes = kMaxInputBytes);

}  // namespace loupe
