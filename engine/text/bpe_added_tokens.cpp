#include "engine/text/bpe_added_tokens.h"

#include "kernels/check.h"

namespace loupe {

AddedTokens::AddedTokens() : nodes_(1) { first_.fill(-1); }

int32_t AddedTokens::Child(int32_t node, unsigned char byte) const {
  if (node == 0) return first_[byte];
  for (const auto& [label, child] : nodes_[node].children) {
    if (label == byte) return child;
  }
  return -1;
}

void AddedTokens::Add(std::string_view text, int32_t id) {
  LOUPE_CHECK(!text.empty() && text.size() <= kLongestToken) << "an added token of " << text.size() << " bytes";
  int32_t node = 0;
  for (const char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    int32_t child = Child(node, byte);
    if (child < 0) {
      child = static_cast<int32_t>(nodes_.size());
      nodes_.emplace_back();
      if (node == 0) {
        first_[byte] = child;
      } else {
        nodes_[node].children.emplace_back(byte, child);
      }
    }
    node = child;
  }
  if (nodes_[node].id < 0) nodes_[node].id = id;
}

AddedTokens::Match AddedTokens::Find(std::string_view text, size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    int32_t node = first_[static_cast<unsigned char>(text[begin])];
    Match longest;
    for (size_t end = begin + 1; node >= 0; ++end) {
      if (nodes_[node].id >= 0) longest = {begin, end, nodes_[node].id};
      if (end == text.size()) break;
      node = Child(node, static_cast<unsigned char>(text[end]));
    }
    if (longest.id >= 0) return longest;
  }
  return {text.size(), text.size(), -1};
}

}  // namespace loupe
