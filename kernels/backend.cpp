#include "kernels/backend.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/backend_cpu.h"
#ifdef LOUPE_WITH_CUDA
#include "kernels/cuda/backend_cuda.h"
#endif

namespace loupe {

const char* BuiltDevices() {
#ifdef LOUPE_WITH_CUDA
  return "auto, cpu, cuda, cuda:N";
#else
  return "auto, cpu";
#endif
}

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const BackendOptions& options) {
#ifdef LOUPE_WITH_CUDA
  if (absl::StartsWith(options.device, "cuda") || (options.device == "auto" && CudaDeviceIsThere())) return MakeCudaBackend(options);
#endif
  if (options.device == "auto" || options.device == "cpu") return MakeCpuBackend(options);
  return absl::InvalidArgumentError(
      absl::StrCat("device '", options.device, "' is not in this build; it has: ", BuiltDevices()));
}

}  // namespace loupe
