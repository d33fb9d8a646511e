// Windows of tokens cut from a folder of texts, for teacher-forced evaluation. Windows do not overlap, lie inside one
// text and are spread over all of them. The same folder, sizes and seed give the same windows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer.h"

namespace loupe {

struct TextWindow {
  std::string file;   // name inside the folder
  int64_t first = 0;  // token of the file at which it starts
  std::vector<int32_t> ids;
};

// `count` windows of `tokens` tokens from the .txt files of `folder`, in file order. INVALID_ARGUMENT if the folder
// cannot be read or holds fewer windows, with both numbers.
absl::StatusOr<std::vector<TextWindow>> CutWindows(const std::string& folder, const Tokenizer& tokenizer, int tokens,
                                                   int count, uint64_t seed);

}  // namespace loupe
