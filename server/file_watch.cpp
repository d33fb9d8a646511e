#include "server/file_watch.h"

#include <sys/stat.h>

#include <utility>

namespace loupe {

FileWatch::FileWatch(std::vector<std::string> paths, std::chrono::steady_clock::duration interval)
    : paths_(std::move(paths)), interval_(interval), next_look_(std::chrono::steady_clock::now() + interval), stamps_(Look()) {}

bool FileWatch::Changed(std::chrono::steady_clock::time_point now) {
  if (now < next_look_) return false;
  next_look_ = now + interval_;
  std::vector<Stamp> found = Look();
  if (found == stamps_) return false;
  stamps_ = std::move(found);
  return true;
}

std::vector<FileWatch::Stamp> FileWatch::Look() const {
  std::vector<Stamp> found;
  for (const std::string& path : paths_) {
    struct stat info {};
    Stamp& stamp = found.emplace_back();
    if (stat(path.c_str(), &info) != 0) continue;
    stamp = {static_cast<int64_t>(info.st_dev), static_cast<int64_t>(info.st_ino), info.st_size, info.st_mtim.tv_sec,
             info.st_mtim.tv_nsec};
  }
  return found;
}

}  // namespace loupe
