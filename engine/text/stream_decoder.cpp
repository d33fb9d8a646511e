#include "engine/text/stream_decoder.h"

#include <utility>

namespace loupe {

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, std::vector<std::string> stop, bool include_stop)
    : tokenizer_(tokenizer), stop_(std::move(stop)), include_stop_(include_stop) {
  std::erase_if(stop_, [](const std::string& text) { return text.empty(); });
  if (!stop_.empty()) BuildAutomaton();
}

void StreamDecoder::BuildAutomaton() {
  nodes_.emplace_back();
  for (size_t i = 0; i < stop_.size(); ++i) {
    // Stop strings meet repaired text, so they are repaired too.
    std::string text;
    Utf8Repair repair;
    repair.Push(stop_[i], &text);
    repair.Finish(&text);
    lengths_.push_back(text.size());
    int32_t node = 0;
    for (const char c : text) {
      const unsigned char byte = static_cast<unsigned char>(c);
      int32_t child = Child(node, byte);
      if (child < 0) {
        child = static_cast<int32_t>(nodes_.size());
        Node fresh;
        fresh.next_sibling = nodes_[node].first_child;
        fresh.depth = nodes_[node].depth + 1;
        fresh.byte = byte;
        nodes_.push_back(fresh);
        nodes_[node].first_child = child;
      }
      node = child;
    }
    if (nodes_[node].stop < 0) nodes_[node].stop = static_cast<int32_t>(i);
  }
  // Breadth first, so that a node's suffix is finished before the node.
  std::vector<int32_t> order = {0};
  for (size_t i = 0; i < order.size(); ++i) {
    const int32_t parent = order[i];
    for (int32_t child = nodes_[parent].first_child; child >= 0; child = nodes_[child].next_sibling) {
      Node& node = nodes_[child];
      node.fail = parent == 0 ? 0 : Step(nodes_[parent].fail, node.byte);
      node.hold = node.first_child >= 0 ? node.depth : nodes_[node.fail].hold;
      if (node.stop < 0) node.stop = nodes_[node.fail].stop;
      order.push_back(child);
    }
  }
}

int32_t StreamDecoder::Child(int32_t node, unsigned char byte) const {
  for (int32_t child = nodes_[node].first_child; child >= 0; child = nodes_[child].next_sibling) {
    if (nodes_[child].byte == byte) return child;
  }
  return -1;
}

int32_t StreamDecoder::Step(int32_t node, unsigned char byte) const {
  while (true) {
    const int32_t child = Child(node, byte);
    if (child >= 0) return child;
    if (node == 0) return 0;
    node = nodes_[node].fail;
  }
}

std::string StreamDecoder::Scan(size_t from, bool allow_stop) {
  size_t certain = pending_.size();
  if (!nodes_.empty()) {
    for (size_t i = from; i < pending_.size(); ++i) {
      state_ = Step(state_, static_cast<unsigned char>(pending_[i]));
      const int32_t stop = nodes_[state_].stop;
      if (stop < 0 || !allow_stop) continue;
      stopped_ = true;
      matched_ = stop_[stop];
      certain = i + 1 - (include_stop_ ? 0 : lengths_[stop]);
      break;
    }
    if (!stopped_) certain -= nodes_[state_].hold;
  }
  std::string out = pending_.substr(emitted_, certain - emitted_);
  emitted_ = certain;
  // Moving the rest to the front only when it is the smaller half keeps the cost per byte constant.
  if (stopped_ || emitted_ * 2 >= pending_.size()) {
    pending_.erase(0, emitted_);
    emitted_ = 0;
  }
  return out;
}

std::string StreamDecoder::Push(int32_t token, bool allow_stop) {
  if (stopped_) return "";
  const size_t from = pending_.size();
  if (!tokenizer_.IsControl(token)) repair_.Push(tokenizer_.TokenBytes(token), &pending_);
  return Scan(from, allow_stop);
}

std::string StreamDecoder::Flush() {
  if (stopped_) return "";
  const size_t from = pending_.size();
  repair_.Finish(&pending_);
  std::string out = Scan(from, true);
  if (!stopped_) out.append(pending_, emitted_);
  pending_.clear();
  emitted_ = 0;
  state_ = 0;
  return out;
}

}  // namespace loupe
