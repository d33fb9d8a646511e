// Which build this is. The commit is filled in by CMake.
#pragma once

namespace loupe {

inline constexpr const char* kVersion = "0.1.0";
#ifdef LOUPE_COMMIT
inline constexpr const char* kCommit = LOUPE_COMMIT;
#else
inline constexpr const char* kCommit = "unknown";
#endif

}  // namespace loupe
