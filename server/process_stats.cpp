#include "server/process_stats.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace loupe {
namespace {

// Fields of /proc/self/stat after the command's name, which may itself hold spaces and brackets.
void ReadStat(ProcessStats* stats) {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const size_t end_of_name = text.rfind(')');
  if (end_of_name == std::string::npos) return;
  std::istringstream fields(text.substr(end_of_name + 1));
  std::string skipped;
  for (int field = 3; field < 14; ++field) fields >> skipped;  // numbered as in proc(5)
  double user_ticks = 0, system_ticks = 0, start_ticks = 0;
  fields >> user_ticks >> system_ticks;
  for (int field = 16; field < 22; ++field) fields >> skipped;
  int64_t resident_pages = 0;
  fields >> start_ticks >> stats->virtual_bytes >> resident_pages;
  const double ticks_per_s = static_cast<double>(sysconf(_SC_CLK_TCK));
  stats->cpu_seconds = (user_ticks + system_ticks) / ticks_per_s;
  stats->resident_bytes = resident_pages * sysconf(_SC_PAGESIZE);
  std::ifstream system_stat("/proc/stat");
  for (std::string key; system_stat >> key;) {
    double boot_unix_s = 0;
    if (key == "btime" && system_stat >> boot_unix_s) stats->start_unix_s = boot_unix_s + start_ticks / ticks_per_s;
  }
}

}  // namespace

ProcessStats ReadProcessStats() {
  ProcessStats stats;
  ReadStat(&stats);
  std::error_code error;
  for (std::filesystem::directory_iterator fd("/proc/self/fd", error), end; !error && fd != end; fd.increment(error)) {
    ++stats.open_fds;
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) stats.max_fds = static_cast<int64_t>(limit.rlim_cur);
  return stats;
}

}  // namespace loupe
