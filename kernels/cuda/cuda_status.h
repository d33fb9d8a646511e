// What CUDA calls say, as statuses and as checks. Launches cannot report faults of the kernel itself: those are sticky,
// show at the next synchronisation, and end the device for this process (Stream::Synchronize says UNAVAILABLE).
#pragma once

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace loupe::cuda {

// UNAVAILABLE with the device's words, for faults that no retry in this process can mend.
inline absl::Status DeviceFault(const char* what, cudaError_t error) {
  return absl::UnavailableError(absl::StrCat("the GPU failed in ", what, ": ", cudaGetErrorName(error), ", ",
                                             cudaGetErrorString(error), "; restart the process"));
}

}  // namespace loupe::cuda

// For calls that fail only by our own mistake, or on a device that has failed already: in the latter case the error
// stays, and the next synchronisation reports it.
#define LOUPE_CUDA(call)                                                                       \
  do {                                                                                         \
    const cudaError_t loupe_cuda_error = (call);                                               \
    LOUPE_CHECK(loupe_cuda_error == cudaSuccess || ::loupe::cuda::IsSticky(loupe_cuda_error))  \
        << cudaGetErrorName(loupe_cuda_error) << ", " << cudaGetErrorString(loupe_cuda_error); \
  } while (0)

namespace loupe::cuda {

// Errors after which every further call on the device fails the same way.
inline bool IsSticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

}  // namespace loupe::cuda
