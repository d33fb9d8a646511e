#include "kernels/backend.h"

#include "absl/strings/str_cat.h"
#include "kernels/cpu/backend_cpu.h"

namespace loupe {

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const BackendOptions& options) {
  if (options.device == "auto" || options.device == "cpu") return MakeCpuBackend(options);
  return absl::InvalidArgumentError(
      absl::StrCat("device '", options.device, "' is not in this build; it has: auto, cpu"));
}

}  // namespace loupe
