// The NVIDIA GPU as a device. Included by kernels/backend.cpp alone.
#pragma once

#include "kernels/backend.h"

namespace loupe {

// FAILED_PRECONDITION: no usable GPU, driver or cuBLAS, with the reason; RESOURCE_EXHAUSTED: its memory is full.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const BackendOptions& options);

// Whether a GPU that this build has code for is there; asks the driver, makes nothing.
bool CudaDeviceIsThere();

}  // namespace loupe
