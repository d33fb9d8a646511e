#include "kernels/cpu/huge_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

// First integer in a file of one number; -1 if the file is missing or says "max".
int64_t ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

// Path of this process in the unified control group hierarchy ("/" inside most containers).
std::string ControlGroup() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::", 0) == 0) return line.substr(3);
  }
  return "/";
}

// A limit may be set at any level above the process, and the tightest one counts.
void BoundByControlGroups(SystemMemory& memory) {
  std::string group = ControlGroup();
  for (;;) {
    const std::string folder = "/sys/fs/cgroup" + (group == "/" ? "" : group);
    const int64_t limit = ReadNumber(folder + "/memory.max");
    if (limit >= 0) {
      const int64_t used = std::max<int64_t>(ReadNumber(folder + "/memory.current"), 0);
      memory.total_bytes = std::min(memory.total_bytes, limit);
      memory.available_bytes = std::min(memory.available_bytes, std::max<int64_t>(limit - used, 0));
    }
    const size_t slash = group.rfind('/');
    if (group.empty() || group == "/" || slash == std::string::npos) return;
    group = slash == 0 ? "/" : group.substr(0, slash);
  }
}

}  // namespace

SystemMemory ReadSystemMemory() {
  SystemMemory memory;
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("MemTotal:", 0) == 0) memory.total_bytes = std::strtoll(line.c_str() + 9, nullptr, 10) * 1024;
    if (line.rfind("MemAvailable:", 0) == 0)
      memory.available_bytes = std::strtoll(line.c_str() + 13, nullptr, 10) * 1024;
  }
  if (memory.total_bytes == 0) {  // no /proc: ask the C library
    memory.total_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
    memory.available_bytes = int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  }
  BoundByControlGroups(memory);
  return memory;
}

absl::StatusOr<std::unique_ptr<HugeMemory>> HugeMemory::Create(int64_t bytes) {
  const int64_t total = ReadSystemMemory().total_bytes;
  if (bytes < 0 || bytes > total) {  // the system would promise more than it has, and end the process later
    return absl::ResourceExhaustedError(absl::StrCat(
        bytes, " bytes asked, the memory of this machine or its control group is ", total, " bytes; ask for less"));
  }
  const int64_t mapped = std::max<int64_t>((bytes + kHugePageBytes - 1) / kHugePageBytes, 1) * kHugePageBytes;
  const size_t with_slack = static_cast<size_t>(mapped + kHugePageBytes);
  void* raw = mmap(nullptr, with_slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat(bytes, " bytes asked, the system answered '", std::strerror(errno),
                                                     "' (memory ", total, " bytes); ask for less or raise the limit"));
  }
  uint8_t* begin = static_cast<uint8_t*>(raw);
  const uintptr_t address = reinterpret_cast<uintptr_t>(raw);
  const int64_t before = static_cast<int64_t>((kHugePageBytes - address % kHugePageBytes) % kHugePageBytes);
  if (before > 0) munmap(begin, static_cast<size_t>(before));
  if (before < kHugePageBytes) munmap(begin + before + mapped, static_cast<size_t>(kHugePageBytes - before));
  madvise(begin + before, static_cast<size_t>(mapped), MADV_HUGEPAGE);  // a wish: without it everything works, slower
  return std::unique_ptr<HugeMemory>(new HugeMemory(begin + before, bytes, mapped));
}

HugeMemory::~HugeMemory() { munmap(data_, static_cast<size_t>(mapped_bytes_)); }

}  // namespace loupe
