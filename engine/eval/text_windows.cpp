#include "engine/eval/text_windows.h"

#include <algorithm>
#include <filesystem>
#include <random>

#include "absl/strings/str_cat.h"
#include "engine/load/read_text.h"

namespace loupe {
namespace {

namespace fs = std::filesystem;

absl::StatusOr<std::vector<fs::path>> TextFiles(const std::string& folder) {
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->is_regular_file() && it->path().extension() == ".txt") files.push_back(it->path());
  }
  if (error)
    return absl::InvalidArgumentError(
        absl::StrCat("--text ", folder, ": ", error.message(), "; give a folder of .txt files"));
  if (files.empty()) return absl::InvalidArgumentError(absl::StrCat("--text ", folder, " holds no .txt file"));
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

absl::StatusOr<std::vector<TextWindow>> CutWindows(const std::string& folder, const Tokenizer& tokenizer, int tokens,
                                                   int count, uint64_t seed) {
  const auto files = TextFiles(folder);
  if (!files.ok()) return files.status();
  // Every text's windows in random order; they are dealt round robin, so that no long book crowds out the others.
  std::vector<std::vector<TextWindow>> by_file;
  std::mt19937_64 random(seed);
  int64_t there = 0;
  for (const fs::path& path : *files) {
    const auto text = ReadText("--text", path.string());
    if (!text.ok()) return text.status();
    const std::vector<int32_t> ids = tokenizer.Encode(*text, false, false);
    std::vector<TextWindow> windows;
    for (size_t first = 0; first + static_cast<size_t>(tokens) <= ids.size(); first += static_cast<size_t>(tokens)) {
      const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(first);
      windows.push_back({path.filename().string(), static_cast<int64_t>(first), {begin, begin + tokens}});
    }
    std::shuffle(windows.begin(), windows.end(), random);
    there += static_cast<int64_t>(windows.size());
    by_file.push_back(std::move(windows));
  }
  if (there < count) {
    return absl::InvalidArgumentError(absl::StrCat("--text ", folder, " holds ", there, " windows of ", tokens,
                                                   " tokens, ", count,
                                                   " are asked for; lower --windows or --context, or add text"));
  }
  std::vector<TextWindow> chosen;
  for (size_t round = 0; chosen.size() < static_cast<size_t>(count); ++round) {
    for (std::vector<TextWindow>& windows : by_file) {
      if (round < windows.size() && chosen.size() < static_cast<size_t>(count))
        chosen.push_back(std::move(windows[round]));
    }
  }
  return chosen;
}

}  // namespace loupe
