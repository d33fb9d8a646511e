#include "engine/eval/result_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/load/read_text.h"

namespace loupe {

absl::StatusOr<ResultFile> ResultFile::Open(const std::string& path) {
  ResultFile results;
  results.path_ = path;
  if (path.empty()) return results;
  std::string text;
  if (std::error_code ignored; std::filesystem::exists(path, ignored)) {
    auto read = ReadText("results file", path);
    if (!read.ok()) return read.status();
    text = *std::move(read);
  }
  size_t whole = 0;
  for (int number = 1; whole < text.size(); ++number) {
    const size_t end = text.find('\n', whole);
    if (end == std::string::npos) break;  // cut off while it was written
    const auto line = nlohmann::json::parse(text.substr(whole, end - whole), nullptr, false);
    if (line.is_discarded() || !line.is_object() || !line.contains("cell") || !line["cell"].is_string() ||
        !line.contains("result")) {
      return absl::InvalidArgumentError(
          absl::StrCat("results file ", path, ": line ", number,
                       " is no cell of an evaluation; give another file or remove the line"));
    }
    results.cells_[line["cell"].get<std::string>()] = line["result"];
    whole = end + 1;
  }
  results.file_ = std::fopen(path.c_str(), "ab");
  if (results.file_ == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("results file ", path, " cannot be written: ", std::strerror(errno)));
  }
  if (whole < text.size() && ftruncate(fileno(results.file_), static_cast<off_t>(whole)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("results file ", path, " cannot be shortened: ", std::strerror(errno)));
  }
  return results;
}

ResultFile::ResultFile(ResultFile&& other) noexcept
    : file_(std::exchange(other.file_, nullptr)), path_(std::move(other.path_)), cells_(std::move(other.cells_)) {}
std::string Fingerprint(std::string_view bytes) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return absl::StrFormat("%016x", hash);
}

std::string Fingerprint(std::span<const int32_t> ids) {
  return Fingerprint(std::string_view(reinterpret_cast<const char*>(ids.data()), ids.size_bytes()));
}

ResultFile::~ResultFile() {
  if (file_ != nullptr) std::fclose(file_);
}

const nlohmann::json* ResultFile::Find(const std::string& key) const {
  const auto it = cells_.find(key);
  return it == cells_.end() ? nullptr : &it->second;
}

absl::Status ResultFile::Add(const std::string& key, const nlohmann::json& result) {
  cells_[key] = result;
  if (file_ == nullptr) return absl::OkStatus();
  const std::string line = nlohmann::json{{"cell", key}, {"result", result}}.dump() + "\n";
  if (std::fwrite(line.data(), 1, line.size(), file_) != line.size() || std::fflush(file_) != 0) {
    return absl::InternalError(absl::StrCat("results file ", path_, " cannot be written: ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace loupe
