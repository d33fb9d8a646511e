#include "engine/load/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

absl::Status OpenError(const std::string& path, int error) {
  const std::string text = absl::StrCat("cannot open '", path, "': ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(text);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(text);
  return absl::UnavailableError(text);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MappedFile>> MappedFile::Open(const std::string& path) {
  // O_NONBLOCK: a FIFO given in place of a file must not hang the loader.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return OpenError(path, errno);
  struct stat info = {};
  if (fstat(fd, &info) != 0) {
    const int error = errno;
    close(fd);
    return OpenError(path, error);
  }
  if (!S_ISREG(info.st_mode) || info.st_size == 0) {
    close(fd);
    const char* what = S_ISDIR(info.st_mode)   ? "is a directory"
                       : S_ISREG(info.st_mode) ? "is empty (0 bytes)"
                                               : "is no regular file";
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' ", what));
  }
  void* data = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  close(fd);
  if (data == MAP_FAILED) {
    return absl::UnavailableError(
        absl::StrCat("cannot map ", info.st_size, " bytes of '", path, "': ", std::strerror(error)));
  }
  return std::unique_ptr<MappedFile>(new MappedFile(static_cast<const char*>(data), info.st_size));
}

MappedFile::~MappedFile() { munmap(const_cast<char*>(data_), static_cast<size_t>(size_)); }

void MappedFile::Release(int64_t offset, int64_t length) const {
  // Rounded outwards: a page shared with a neighbour is read again if need be, which is cheap.
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t begin = std::clamp<int64_t>(offset, 0, size_) / page * page;
  const int64_t end = std::clamp<int64_t>(offset + length, begin, size_);
  if (end > begin) madvise(const_cast<char*>(data_) + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
}

}  // namespace loupe
