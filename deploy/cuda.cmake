# The CUDA compiler: from PATH, CUDACXX or /usr/local/cuda, or from the wheels that tests/run.sh installs. cuBLAS is looked up
# when the program runs, so it is not needed here.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
  set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a)
endif()
enable_language(CUDA)
# CMake 3.25 does not know that this compiler speaks C++20.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
find_package(CUDAToolkit 13.0 REQUIRED)
