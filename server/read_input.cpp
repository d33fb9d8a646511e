#include "server/read_input.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

absl::Status Unreadable(const std::string& source, int error) {
  const std::string message = absl::StrCat("cannot read ", source, ": ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(message);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(message);
  return absl::InvalidArgumentError(message);
}

absl::StatusOr<std::string> ReadAll(int fd, const std::string& source, int64_t max_bytes) {
  std::string text;
  char buffer[64 << 10];
  for (;;) {
    const ssize_t count = read(fd, buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Unreadable(source, errno);
    if (count == 0) return text;
    text.append(buffer, static_cast<size_t>(count));
    if (static_cast<int64_t>(text.size()) > max_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(source, " has more than ", max_bytes, " bytes, which is the limit"));
    }
  }
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& what, const std::string& path, int64_t max_bytes) {
  const std::string source = absl::StrCat(what, " '", path, "'");
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Unreadable(source, errno);
  const absl::Cleanup close_fd = [fd] { close(fd); };
  return ReadAll(fd, source, max_bytes);
}

absl::StatusOr<std::string> ReadStandardInput(int64_t max_bytes) { return ReadAll(STDIN_FILENO, "standard input", max_bytes); }

}  // namespace loupe
