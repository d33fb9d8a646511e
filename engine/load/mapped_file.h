// A file mapped read-only into memory. Owned by whoever reads it; any thread may read the bytes while it lives. The
// pages belong to the page cache: Release gives a range back, a later read brings it in again. A file that another
// process shortens while it is mapped raises SIGBUS, so the loader reads each byte once and drops the mapping.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace loupe {

class MappedFile {
 public:
  // NOT_FOUND: no such file. INVALID_ARGUMENT: a directory, or empty. PERMISSION_DENIED, UNAVAILABLE: what the system
  // said.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {data_, static_cast<size_t>(size_)}; }
  int64_t size() const { return size_; }
  // The bytes will not be read again soon: their pages no longer count as resident.
  void Release(int64_t offset, int64_t length) const;

 private:
  MappedFile(const char* data, int64_t size) : data_(data), size_(size) {}

  const char* data_;
  int64_t size_;
};

}  // namespace loupe
