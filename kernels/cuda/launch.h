// How every kernel of this folder is launched: as a programmatic dependent of the one before it in the stream, so that
// its start overlaps the other's end. In return every kernel calls GridWait before it touches what another kernel
// writes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "kernels/cuda/cuda_status.h"

namespace loupe::cuda {

// Blocks that follow each other in clusters of `cluster`, which see each other's shared memory.
template <class... Parameters, class... Arguments>
void LaunchClusters(void (*kernel)(Parameters...), dim3 grid, unsigned cluster, dim3 block, size_t shared_bytes,
                    cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  LOUPE_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...));
}

template <class... Parameters, class... Arguments>
void Launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            Arguments&&... arguments) {
  LaunchClusters(kernel, grid, 1, block, shared_bytes, stream, std::forward<Arguments>(arguments)...);
}

inline unsigned Blocks(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

}  // namespace loupe::cuda
