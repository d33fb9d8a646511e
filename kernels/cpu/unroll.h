// LOUPE_UNROLL before a loop over an array of registers: it must be unrolled, or the compiler keeps the array in
// memory. Not under clang's sanitizers, whose checks make such loops take minutes to compile.
#pragma once

#if defined(__clang__)
#if __has_feature(address_sanitizer) || __has_feature(undefined_behavior_sanitizer)
#define LOUPE_UNROLL
#else
#define LOUPE_UNROLL _Pragma("unroll")
#endif
#else
#define LOUPE_UNROLL _Pragma("GCC unroll 16")
#endif
