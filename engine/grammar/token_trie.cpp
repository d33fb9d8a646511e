#include "engine/grammar/token_trie.h"

#include <algorithm>
#include <utility>

namespace loupe::grammar {
namespace {

constexpr size_t kLongestToken = 255;  // bytes

}  // namespace

TokenTrie::TokenTrie(const Tokenizer& tokenizer, int vocab_size)
    : tokenizer_(tokenizer), vocab_size_(vocab_size), plain_tokens_(mask_words()), control_tokens_(mask_words()) {
  std::vector<std::pair<std::string_view, int32_t>> sorted;
  for (int32_t id = 0; id < vocab_size; ++id) {
    if (tokenizer.IsEndOfGeneration(id)) {
      end_tokens_.push_back(id);
      continue;
    }
    const std::string_view bytes = tokenizer.TokenBytes(id);
    if (bytes.empty() || bytes.size() > kLongestToken) continue;
    if (tokenizer.IsControl(id)) SetToken(control_tokens_.data(), id);
    if (std::all_of(bytes.begin(), bytes.end(), [](char c) { return IsPlain(static_cast<uint8_t>(c)); })) {
      SetToken(plain_tokens_.data(), id);
    }
    sorted.emplace_back(bytes, id);
  }
  std::sort(sorted.begin(), sorted.end());
  std::vector<size_t> path;  // open nodes, one a byte
  std::string_view last;
  const auto close = [&](size_t depth) {
    for (; path.size() > depth; path.pop_back()) nodes_[path.back()].end = static_cast<int32_t>(nodes_.size());
  };
  for (const auto& [bytes, id] : sorted) {
    size_t shared = 0;
    while (shared < std::min(bytes.size(), last.size()) && bytes[shared] == last[shared]) ++shared;
    close(shared);
    for (size_t depth = shared; depth < bytes.size(); ++depth) {
      Node node;
      node.byte = static_cast<uint8_t>(bytes[depth]);
      node.depth = static_cast<uint8_t>(depth);
      node.plain_path = IsPlain(node.byte) && (depth == 0 || nodes_[path.back()].plain_path);
      node.tokens_end = static_cast<int32_t>(tokens_.size());
      path.push_back(nodes_.size());
      nodes_.push_back(node);
    }
    tokens_.push_back(id);
    nodes_[path.back()].tokens_end = static_cast<int32_t>(tokens_.size());
    last = bytes;
  }
  close(0);
  for (size_t i = nodes_.size(); i-- > 0;) {
    nodes_[i].plain = true;
    for (auto child = static_cast<int32_t>(i) + 1; child < nodes_[i].end && nodes_[i].plain;
         child = nodes_[static_cast<size_t>(child)].end) {
      nodes_[i].plain = IsPlain(nodes_[static_cast<size_t>(child)].byte) && nodes_[static_cast<size_t>(child)].plain;
    }
  }
}

}  // namespace loupe::grammar
