// Results of a grid, kept cell by cell in a JSONL file, so that an interrupted run goes on where it stopped: each line
// is
// {"cell": KEY, "result": {...}}. The key says everything that the result depends on. One writer at a time.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace loupe {

// 16 hex digits (FNV-1a) for what is too long to stand in a key: a name alone does not say what was measured.
std::string Fingerprint(std::string_view bytes);
std::string Fingerprint(std::span<const int32_t> ids);

class ResultFile {
 public:
  // Reads what is there; an empty path keeps results in memory only. A last line that was cut off by an interruption is
  // dropped; any other line that is not a cell is INVALID_ARGUMENT with its number.
  static absl::StatusOr<ResultFile> Open(const std::string& path);
  ResultFile(ResultFile&& other) noexcept;
  ResultFile& operator=(ResultFile&&) = delete;
  ~ResultFile();

  const nlohmann::json* Find(const std::string& key) const;
  // Appends the line and flushes it.
  absl::Status Add(const std::string& key, const nlohmann::json& result);
  size_t size() const { return cells_.size(); }

 private:
  ResultFile() = default;
  std::FILE* file_ = nullptr;
  std::string path_;
  std::unordered_map<std::string, nlohmann::json> cells_;
};

}  // namespace loupe
