// The CPU as a device: memory from the system in 2 MiB pages, a fixed team of threads, kernels chosen once by the
// instruction set. Ops run before the call returns. Used by one thread at a time.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace loupe {

// INVALID_ARGUMENT for an instruction set that is unknown or that this machine lacks, and for a thread count out of
// range.
absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const BackendOptions& options);

}  // namespace loupe
