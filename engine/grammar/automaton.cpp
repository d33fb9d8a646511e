#include "engine/grammar/automaton.h"

#include <algorithm>
#include <bit>

namespace loupe::grammar {
namespace {

uint64_t Mix(uint64_t x) {
  x *= 0x9e3779b97f4a7c15u;
  return x ^ (x >> 32);
}

}  // namespace

Automaton::Automaton(const Program& program, const TokenTrie& trie, bool control_tokens)
    : program_(program),
      trie_(trie),
      control_tokens_(control_tokens),
      num_classes_(static_cast<size_t>(program.num_classes)),
      reads_(static_cast<size_t>(program.num_states())),
      frames_(1),
      first_config_{0},
      visited_(64),
      path_(257) {
  for (size_t s = 0; s < reads_.size(); ++s) {
    for (int32_t e = program.first_edge[s]; e < program.first_edge[s + 1]; ++e) {
      if (program.edges[static_cast<size_t>(e)].kind == Edge::Kind::kByte) reads_[s] = true;
    }
  }
  pending_.push_back({program.start, 0});
  start_ = Close();
}

int32_t Automaton::PushFrame(int32_t parent, StateId back) {
  const uint64_t key = uint64_t{static_cast<uint32_t>(parent)} << 32 | static_cast<uint32_t>(back);
  const auto [at, fresh] = frame_ids_.try_emplace(key, static_cast<int32_t>(frames_.size()));
  if (fresh) {
    frames_.push_back({parent, back});
    constexpr int64_t kCost = 20;  // as much as so many other steps
    Work(kCost);
  }
  return at->second;
}

bool Automaton::Visit(Config config) {
  if (2 * num_visited_ >= visited_.size()) {
    auto old = std::move(visited_);
    visited_.assign(old.size() * 2, {});
    num_visited_ = 0;
    for (const auto& [seen, stamp] : old) {
      if (stamp == stamp_) Visit(seen);
    }
  }
  const size_t last = visited_.size() - 1;
  size_t at = Mix(uint64_t{static_cast<uint32_t>(config.state)} << 32 | static_cast<uint32_t>(config.stack)) & last;
  for (; visited_[at].second == stamp_; at = (at + 1) & last) {
    if (visited_[at].first == config) return false;
  }
  visited_[at] = {config, stamp_};
  ++num_visited_;
  return true;
}

int32_t Automaton::Close() {
  closed_.clear();
  if (++stamp_ == 0) visited_.assign(visited_.size(), {}), stamp_ = 1;
  num_visited_ = 0;
  bool accepts = false;
  while (!pending_.empty()) {
    const Config config = pending_.back();
    pending_.pop_back();
    if (!Visit(config)) continue;
    const auto s = static_cast<size_t>(config.state);
    const int32_t begin = program_.first_edge[s], end = program_.first_edge[s + 1];
    Work(1 + end - begin);
    if (program_.ends[s]) {
      const Frame& frame = frames_[static_cast<size_t>(config.stack)];
      if (config.stack == 0) {
        accepts = true;
      } else {
        pending_.push_back({frame.back, frame.parent});
      }
    }
    if (reads_[s]) closed_.push_back(config);
    for (int32_t e = begin; e < end; ++e) {
      const Edge& edge = program_.edges[static_cast<size_t>(e)];
      if (edge.kind == Edge::Kind::kEmpty) pending_.push_back({edge.target, config.stack});
      if (edge.kind == Edge::Kind::kCall) pending_.push_back({edge.rule, PushFrame(config.stack, edge.target)});
    }
  }
  return closed_.empty() && !accepts ? kDead : Intern(closed_, accepts);
}

int32_t Automaton::Intern(std::vector<Config>& configs, bool accepts) {
  std::sort(configs.begin(), configs.end());
  uint64_t hash = accepts ? 1 : 0;
  for (const Config& c : configs) {
    hash = Mix(hash + (uint64_t{static_cast<uint32_t>(c.state)} << 32 | static_cast<uint32_t>(c.stack)));
  }
  std::vector<int32_t>& same = states_by_hash_[hash];
  for (const int32_t state : same) {
    const auto begin = configs_.begin() + static_cast<std::ptrdiff_t>(first_config_[static_cast<size_t>(state)]);
    const auto end = configs_.begin() + static_cast<std::ptrdiff_t>(first_config_[static_cast<size_t>(state) + 1]);
    if (accepts_[static_cast<size_t>(state)] == accepts && std::equal(begin, end, configs.begin(), configs.end())) return state;
  }
  const auto state = static_cast<int32_t>(accepts_.size());
  same.push_back(state);
  configs_.insert(configs_.end(), configs.begin(), configs.end());
  first_config_.push_back(configs_.size());
  accepts_.push_back(accepts);
  loops_on_plain_.push_back(-1);
  transitions_.resize(transitions_.size() + num_classes_, kUnknown);
  return state;
}

int32_t Automaton::FindNext(int32_t state, uint8_t byte) {
  pending_.clear();
  const size_t begin = first_config_[static_cast<size_t>(state)], end = first_config_[static_cast<size_t>(state) + 1];
  for (size_t i = begin; i < end; ++i) {
    const Config config = configs_[i];
    const auto s = static_cast<size_t>(config.state);
    Work(1 + program_.first_edge[s + 1] - program_.first_edge[s]);
    for (int32_t e = program_.first_edge[s]; e < program_.first_edge[s + 1]; ++e) {
      const Edge& edge = program_.edges[static_cast<size_t>(e)];
      if (edge.kind != Edge::Kind::kByte || byte < edge.low || byte > edge.high) continue;
      pending_.push_back({edge.target, config.stack});
    }
  }
  const int32_t next = pending_.empty() ? kDead : Close();
  transitions_[static_cast<size_t>(state) * num_classes_ + program_.class_of[byte]] = next;
  return next;
}

int Automaton::ForcedByte(int32_t state) const {
  if (accepts(state)) return -1;
  int forced = -1;
  for (size_t i = first_config_[static_cast<size_t>(state)]; i < first_config_[static_cast<size_t>(state) + 1]; ++i) {
    const auto s = static_cast<size_t>(configs_[i].state);
    for (int32_t e = program_.first_edge[s]; e < program_.first_edge[s + 1]; ++e) {
      const Edge& edge = program_.edges[static_cast<size_t>(e)];
      if (edge.kind != Edge::Kind::kByte) continue;
      if (edge.low != edge.high || (forced >= 0 && forced != edge.low)) return -1;
      forced = edge.low;
    }
  }
  return forced;
}

// Every plain byte leads back to the state itself, as inside of a string.
bool Automaton::LoopsOnPlain(int32_t state) {
  const auto known = [&]() -> int8_t& { return loops_on_plain_[static_cast<size_t>(state)]; };
  if (known() >= 0) return known() != 0;
  bool loops = true;
  for (size_t c = 0; c < num_classes_ && loops; ++c) {
    // The bytes of a class behave alike; those between two representatives are one class.
    const uint8_t byte = program_.byte_of_class[c];
    const int last = c + 1 < num_classes_ ? program_.byte_of_class[c + 1] : 256;
    bool has_plain = false;
    for (int b = byte; b < last && !has_plain; ++b) has_plain = TokenTrie::IsPlain(static_cast<uint8_t>(b));
    if (has_plain) loops = Next(state, byte) == state;
  }
  known() = loops ? 1 : 0;
  return loops;
}

const TokenMask& Automaton::MaskOf(int32_t state) {
  const auto found = masks_.find(state);
  if (found != masks_.end()) return found->second;
  TokenMask mask(trie_.mask_words());
  FillMask(state, &mask);
  return masks_.emplace(state, std::move(mask)).first->second;
}

// A walk over the trie with the state at each depth, leaving out what no text can continue with. Below a node whose
// descendants are plain, a state that loops on plain bytes takes them all.
void Automaton::FillMask(int32_t state, TokenMask* mask) {
  const bool loops = LoopsOnPlain(state);
  if (loops) *mask = trie_.plain_tokens();
  const std::vector<TokenTrie::Node>& nodes = trie_.nodes();
  path_[0] = state;
  for (size_t i = 0; i < nodes.size();) {
    const TokenTrie::Node& node = nodes[i];
    if (loops && node.plain_path) {  // still where it began, and its own tokens are in
      path_[node.depth + size_t{1}] = state;
      i = node.plain ? static_cast<size_t>(node.end) : i + 1;
      continue;
    }
    const int32_t next = Next(path_[node.depth], node.byte);
    if (next == kDead) {
      i = static_cast<size_t>(node.end);
      continue;
    }
    path_[node.depth + size_t{1}] = next;
    const bool all = node.plain && node.end > static_cast<int32_t>(i) + 1 && LoopsOnPlain(next);
    const size_t last = all ? static_cast<size_t>(node.end) - 1 : i;
    for (size_t t = trie_.first_token(i); t < static_cast<size_t>(nodes[last].tokens_end); ++t) SetToken(mask->data(), trie_.tokens()[t]);
    i = last + 1;
  }
  if (!control_tokens_) {
    for (size_t w = 0; w < mask->size(); ++w) (*mask)[w] &= ~trie_.control_tokens()[w];
  }
  if (accepts(state)) {
    for (const int32_t id : trie_.end_tokens()) SetToken(mask->data(), id);
  }
}

int32_t Automaton::Import(const Automaton& other, int32_t state) {
  std::vector<Config> configs;
  std::vector<StateId> backs;
  for (size_t i = other.first_config_[static_cast<size_t>(state)]; i < other.first_config_[static_cast<size_t>(state) + 1]; ++i) {
    const Config& config = other.configs_[i];
    backs.clear();
    for (int32_t f = config.stack; f != 0; f = other.frames_[static_cast<size_t>(f)].parent) {
      backs.push_back(other.frames_[static_cast<size_t>(f)].back);
    }
    int32_t stack = 0;
    for (size_t k = backs.size(); k-- > 0;) stack = PushFrame(stack, backs[k]);
    configs.push_back({config.state, stack});
  }
  return Intern(configs, other.accepts(state));
}

int64_t Automaton::bytes() const {
  constexpr size_t kMapNode = 64;  // of a hash map, about
  return static_cast<int64_t>(transitions_.size() * 4 + configs_.size() * sizeof(Config) + frames_.size() * (sizeof(Frame) + kMapNode) +
                              accepts_.size() * (sizeof(size_t) + 2 * kMapNode) + masks_.size() * (trie_.mask_words() * 4 + kMapNode));
}

}  // namespace loupe::grammar
