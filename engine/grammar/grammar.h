// Structured output: which texts an answer may be, and which tokens may come next. A Grammar is compiled once and shared;
// a GrammarMatcher is where one sample stands in it.
//
// A hostile grammar costs its own request at most: compiling has limits (nfa.h), and so has every step; what is too much is
// INVALID_ARGUMENT with the numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/grammar/automaton.h"
#include "engine/grammar/nfa.h"
#include "engine/grammar/token_trie.h"

namespace loupe {

struct GrammarSpec {
  enum class Kind { kRegex, kChoice, kJsonObject, kJsonSchema, kToolCalls };
  Kind kind = Kind::kRegex;
  std::string text;                  // the expression, the schema as JSON, or what tool_calls.h wants
  std::vector<std::string> choices;  // kChoice: the answer is one of them
};

// Compiled. Any thread; a mutex orders those that go on from what others have found.
class Grammar {
 public:
  // `trie` outlives the grammar. INVALID_ARGUMENT: what is wrong with it, as "<where>: <why>"; CANCELLED.
  static absl::StatusOr<std::shared_ptr<Grammar>> Compile(const GrammarSpec& spec, const grammar::TokenTrie& trie,
                                                          const grammar::CompileLimits& limits = {});
  int num_states() const { return program_.num_states(); }
  // Of the program and of what has been found of the automaton so far.
  int64_t bytes() const;

 private:
  friend class GrammarMatcher;
  Grammar(grammar::Program program, const grammar::TokenTrie& trie);

  const grammar::Program program_;
  const grammar::TokenTrie& trie_;
  mutable std::mutex mutex_;
  // Guarded by mutex_, as are all earlier ones that matchers still hold.
  std::shared_ptr<grammar::Automaton> automaton_;
};

// One sample's place in its grammar. One thread at a time.
class GrammarMatcher {
 public:
  explicit GrammarMatcher(std::shared_ptr<Grammar> grammar);

  // INVALID_ARGUMENT: the grammar takes too much work. INTERNAL: the bytes may not come here.
  absl::Status Accept(std::string_view bytes);
  // Writes the mask of the tokens that may come: grammar::TokenTrie::mask_words() words. INVALID_ARGUMENT as above.
  absl::Status FillMask(uint32_t* mask);
  // Bytes that must follow, so far as there is no choice; at most `limit`.
  std::string ForcedBytes(size_t limit);
  // Nothing may follow.
  bool complete();
  // The text may end here.
  bool accepts();

 private:
  // Moves on to the grammar's present automaton, or gives it a new one if it has grown too large.
  void Refresh();

  std::shared_ptr<Grammar> grammar_;
  std::shared_ptr<grammar::Automaton> automaton_;
  int32_t state_;
};

// Compiles and remembers what it compiled: the last used forms, bounded in number and bytes. Any thread.
class GrammarCompiler {
 public:
  static constexpr size_t kMaxGrammars = 64;
  static constexpr int64_t kMaxBytes = int64_t{256} << 20;

  // `tokenizer` outlives the compiler and all grammars that come out of it.
  GrammarCompiler(const Tokenizer& tokenizer, int vocab_size) : tokenizer_(tokenizer), vocab_size_(vocab_size) {}

  // As Grammar::Compile; `cancelled` is asked now and then.
  absl::StatusOr<std::shared_ptr<Grammar>> Compile(const GrammarSpec& spec, std::function<bool()> cancelled = {});

 private:
  using Entry = std::pair<std::string, std::shared_ptr<Grammar>>;
  void Forget();  // what is too much, least recently used first

  const Tokenizer& tokenizer_;
  const int vocab_size_;
  std::once_flag made_trie_;
  std::unique_ptr<grammar::TokenTrie> trie_;  // made for the first grammar
  std::mutex mutex_;
  std::list<Entry> used_;  // guarded by mutex_: the last used in front
  std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;  // guarded by mutex_
};

}  // namespace loupe
