// The machine that a program describes, made deterministic as far as somebody has gone: a state is a set of (program
// state, stack of return states), and its successors are found once. Grows with what is seen and is thrown away when it
// has grown too large (see Import). Not thread-safe; Grammar guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/grammar/nfa.h"
#include "engine/grammar/token_trie.h"

namespace loupe::grammar {

// Thrown when a call would do more than it may: the program has too many ways to read the same text.
class TooMuchWork {};

class Automaton {
 public:
  static constexpr int32_t kDead = -1;
  // Elementary steps of one call, about 10 ns each. An ordinary mask takes some thousands.
  static constexpr int64_t kMaxWork = 1'000'000;

  // Both outlive the automaton.
  Automaton(const Program& program, const TokenTrie& trie, bool control_tokens);

  // From here on kMaxWork steps may be done, as when it is made; more throw TooMuchWork. What was found stays.
  void AllowWork() { work_left_ = kMaxWork; }

  int32_t start() const { return start_; }
  int32_t Next(int32_t state, uint8_t byte) {
    int32_t& next = transitions_[static_cast<size_t>(state) * num_classes_ + program_.class_of[byte]];
    if (next != kUnknown) return next;
    return FindNext(state, byte);
  }
  // The text may end here.
  bool accepts(int32_t state) const { return accepts_[static_cast<size_t>(state)]; }
  // Nothing may follow.
  bool complete(int32_t state) const { return first_config_[static_cast<size_t>(state)] == first_config_[static_cast<size_t>(state) + 1]; }
  // The one byte that must follow; -1 if there are several, or the text may end here.
  int ForcedByte(int32_t state) const;
  // The tokens that may follow, and those that end an answer if the text may end here. Valid until the next call.
  const TokenMask& MaskOf(int32_t state);

  // The same state of another automaton of the same program.
  int32_t Import(const Automaton& other, int32_t state);

  int64_t bytes() const;
  int num_states() const { return static_cast<int>(accepts_.size()); }

 private:
  static constexpr int32_t kUnknown = -2;
  struct Config {
    StateId state = 0;
    int32_t stack = 0;
    bool operator==(const Config&) const = default;
    auto operator<=>(const Config&) const = default;
  };
  struct Frame {
    int32_t parent = 0;
    StateId back = 0;  // where the caller goes on
  };

  int32_t FindNext(int32_t state, uint8_t byte);
  int32_t PushFrame(int32_t parent, StateId back);
  // Follows calls, ends and empty edges from pending_, and finds or makes the state of what is reached.
  int32_t Close();
  bool Visit(Config config);
  int32_t Intern(std::vector<Config>& configs, bool accepts);
  bool LoopsOnPlain(int32_t state);
  void FillMask(int32_t state, TokenMask* mask);
  void Work(int64_t steps) {
    work_left_ -= steps;
    if (work_left_ < 0) throw TooMuchWork();
  }

  const Program& program_;
  const TokenTrie& trie_;
  const bool control_tokens_;
  const size_t num_classes_;
  std::vector<bool> reads_;  // program states with an edge over bytes
  int32_t start_ = kDead;
  int64_t work_left_ = kMaxWork;

  std::vector<Frame> frames_;  // [0] is the empty stack
  std::unordered_map<uint64_t, int32_t> frame_ids_;
  std::vector<Config> configs_;         // of state s: [first_config_[s], first_config_[s + 1])
  std::vector<size_t> first_config_;
  std::vector<bool> accepts_;
  std::vector<int8_t> loops_on_plain_;  // -1: not known
  std::vector<int32_t> transitions_;    // [state, class]
  std::unordered_map<uint64_t, std::vector<int32_t>> states_by_hash_;
  std::unordered_map<int32_t, TokenMask> masks_;

  std::vector<Config> pending_, closed_;
  // What Close has seen: open addressing, entries of earlier calls have another stamp.
  std::vector<std::pair<Config, uint32_t>> visited_;
  size_t num_visited_ = 0;
  uint32_t stamp_ = 0;
  std::vector<int32_t> path_;  // FillMask: the state at each depth
};

}  // namespace loupe::grammar
