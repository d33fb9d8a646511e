// The instructions that kernels of this folder share, by names. Fragment letters: a warp's lane is (g, t) = (lane / 4,
// lane % 4), as in the PTX manual's figures of mma.m16n8k16.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace loupe::cuda {

inline constexpr float kLog2e = 1.44269504088896341f;
inline constexpr float kLargestHalf = 65504;
// Exponentials are kept up to 2^kHeadroom times one, since fp16 ends at 2^-24: so 2^-32 of the largest still counts.
inline constexpr float kHeadroom = 8;

// Waits until all kernels before this one have finished and their writes are visible.
__device__ __forceinline__ void GridWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start (and wait in its GridWait).
__device__ __forceinline__ void GridLaunch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// Zeros where `in` is false; `global` must be readable memory all the same.
__device__ __forceinline__ void CopyAsync16OrZero(uint32_t shared, const void* global, bool in) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(in ? 16 : 0) : "memory");
}
__device__ __forceinline__ void CopyCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void CopyWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// 16 bytes that are read once.
__device__ __forceinline__ uint4 LoadOnce(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t PackHalf(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float LowHalf(uint32_t pair) { return __low2float(*reinterpret_cast<const __half2*>(&pair)); }
__device__ __forceinline__ float HighHalf(uint32_t pair) { return __high2float(*reinterpret_cast<const __half2*>(&pair)); }

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }
template <class T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
// Never infinite: what lies beyond fp16 becomes its largest number.
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x > kLargestHalf ? kLargestHalf : x < -kLargestHalf ? -kLargestHalf : x);
}
// What a library has written and may have made infinite.
__device__ __forceinline__ float ToFinite(float x) { return x; }
__device__ __forceinline__ float ToFinite(__half x) { return ToFloat(FromFloat<__half>(ToFloat(x))); }

// Two neighbours as an fp16 pair.
__device__ __forceinline__ uint32_t LoadPair(const float* p) { return PackHalf(p[0], p[1]); }
__device__ __forceinline__ uint32_t LoadPair(const __half* p) { return *reinterpret_cast<const uint32_t*>(p); }

}  // namespace loupe::cuda
