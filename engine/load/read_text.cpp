#include "engine/load/read_text.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"

namespace loupe {

absl::StatusOr<std::string> ReadText(const std::string& what, const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", path, ": ", why));
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return refuse("is a directory; give a file");
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in) return refuse(std::strerror(errno != 0 ? errno : EIO));
  std::ostringstream text;
  if (in.peek() != std::ifstream::traits_type::eof()) text << in.rdbuf();
  if (in.bad() || text.fail()) return refuse("cannot be read");
  return text.str();
}

}  // namespace loupe
