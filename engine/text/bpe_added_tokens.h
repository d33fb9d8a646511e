// Finds added tokens in text: leftmost first, of those the longest. Immutable after the last Add; any thread may
// search.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace loupe {

class AddedTokens {
 public:
  // Bounds the time of a search, which is at most the text's length times the longest token's.
  static constexpr size_t kLongestToken = 1024;  // bytes

  AddedTokens();

  // The first id of equal texts wins. `text` is neither empty nor longer than kLongestToken.
  void Add(std::string_view text, int32_t id);

  struct Match {
    size_t begin = 0;
    size_t end = 0;
    int32_t id = -1;  // -1: nothing found, begin and end are the end of the text
  };
  Match Find(std::string_view text, size_t from) const;

 private:
  struct Node {
    std::vector<std::pair<unsigned char, int32_t>> children;  // (byte, index of its node)
    int32_t id = -1;
  };
  int32_t Child(int32_t node, unsigned char byte) const;

  std::vector<Node> nodes_;              // [0] is the root, whose children are in first_
  std::array<int32_t, 256> first_ = {};  // node by first byte, -1 for none
};

}  // namespace loupe
