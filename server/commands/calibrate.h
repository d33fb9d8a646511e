// What the calibrations share.
#pragma once

#include <string>

#include "server/commands/command.h"

namespace loupe {

// loupe calibrate spherical.
Command AddCalibrateSpherical(CLI::App* calibrate);

// What would come to nothing at the end is refused at the start: INVALID_ARGUMENT if `out` cannot be written.
absl::Status CheckOut(const std::string& out);
absl::Status WriteArtifact(const std::string& out, const std::string& text);

}  // namespace loupe
