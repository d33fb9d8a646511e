// A file as text, for what a user names on the command line. Stateless.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace loupe {

// INVALID_ARGUMENT "<what> <path>: <why>": a directory, missing, unreadable. An empty file gives an empty text.
absl::StatusOr<std::string> ReadText(const std::string& what, const std::string& path);

}  // namespace loupe
