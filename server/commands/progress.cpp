#include "server/commands/progress.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>

namespace loupe {

std::function<void(double, const std::string&)> ProgressOnStderr() {
  const bool terminal = isatty(STDERR_FILENO) != 0;
  const auto start = std::chrono::steady_clock::now();
  auto last = std::make_shared<int>(-1);
  return [terminal, start, last](double share, const std::string& what) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const int tenth = static_cast<int>(share * 10);
    if (!terminal && tenth == *last) return;
    *last = tenth;
    const double left = share > 0 ? seconds * (1 - share) / share : 0;
    std::fprintf(stderr, "%s%3.0f %%  %-48s %5.0f s, about %.0f s left%s", terminal ? "\r" : "", 100 * share,
                 what.c_str(), seconds, left, terminal && share < 1 ? "" : "\n");
    std::fflush(stderr);
  };
}

}  // namespace loupe
