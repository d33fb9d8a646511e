#include "engine/grammar/grammar.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/grammar/json_schema.h"
#include "engine/grammar/regex.h"
#include "engine/grammar/tool_calls.h"

namespace loupe {
namespace {

using grammar::Automaton;
using grammar::NfaBuilder;
using grammar::Rule;

constexpr int64_t kMaxAutomatonBytes = 16 << 20;

absl::Status TooComplex() {
  return absl::InvalidArgumentError(absl::StrCat("grammar: more than ", Automaton::kMaxWork,
                                                 " steps to find what may follow; repeat less, or fewer things inside each other"));
}

void AddChoices(NfaBuilder& nfa, const Rule& all, const std::vector<std::string>& choices) {
  for (const std::string& choice : choices) nfa.AddText(all.start, choice, all.end);
}

grammar::Program Build(const GrammarSpec& spec, const grammar::CompileLimits& limits) {
  NfaBuilder nfa(limits);
  const Rule all = nfa.NewRule();
  switch (spec.kind) {
    case GrammarSpec::Kind::kRegex: {
      const auto root = grammar::ParseRegex(spec.text);
      grammar::AddRegex(nfa, all.start, *root, all.end, grammar::Spelling::kPlain, grammar::RegexMatch::kWhole);
      break;
    }
    case GrammarSpec::Kind::kChoice: AddChoices(nfa, all, spec.choices); break;
    case GrammarSpec::Kind::kJsonObject: grammar::AddJsonObject(nfa, all.start, all.end); break;
    case GrammarSpec::Kind::kJsonSchema: grammar::AddJsonSchema(nfa, all.start, spec.text, all.end); break;
    case GrammarSpec::Kind::kToolCalls: grammar::AddToolCalls(nfa, all.start, spec.text, all.end); break;
  }
  return nfa.Finish(all);
}

std::string KeyOf(const GrammarSpec& spec) {
  std::string key = absl::StrCat(static_cast<int>(spec.kind), " ", spec.text.size(), " ", spec.text);
  for (const std::string& choice : spec.choices) absl::StrAppend(&key, " ", choice.size(), " ", choice);
  return key;
}

}  // namespace

Grammar::Grammar(grammar::Program program, const grammar::TokenTrie& trie)
    : program_(std::move(program)), trie_(trie), automaton_(std::make_shared<Automaton>(program_, trie_, false)) {}

absl::StatusOr<std::shared_ptr<Grammar>> Grammar::Compile(const GrammarSpec& spec, const grammar::TokenTrie& trie,
                                                          const grammar::CompileLimits& limits) {
  try {
    std::shared_ptr<Grammar> compiled(new Grammar(Build(spec, limits), trie));
    // What is hopeless from the first token on is told here, while the request can still be refused.
    compiled->automaton_->AllowWork();
    compiled->automaton_->MaskOf(compiled->automaton_->start());
    return compiled;
  } catch (const grammar::Refusal& refusal) {
    return absl::InvalidArgumentError(refusal.what());
  } catch (const grammar::Cancelled&) {
    return absl::CancelledError("the request was cancelled while its grammar was compiled");
  } catch (const grammar::TooMuchWork&) {
    return TooComplex();
  }
}

int64_t Grammar::bytes() const {
  const std::lock_guard lock(mutex_);
  return automaton_->bytes() + static_cast<int64_t>(program_.edges.size() * sizeof(grammar::Edge) + program_.first_edge.size() * 5);
}

GrammarMatcher::GrammarMatcher(std::shared_ptr<Grammar> grammar) : grammar_(std::move(grammar)) {
  const std::lock_guard lock(grammar_->mutex_);
  automaton_ = grammar_->automaton_;
  state_ = automaton_->start();
}

void GrammarMatcher::Refresh() {
  std::shared_ptr<Automaton>& present = grammar_->automaton_;
  if (present->bytes() > kMaxAutomatonBytes) present = std::make_shared<Automaton>(grammar_->program_, grammar_->trie_, false);
  if (present == automaton_) return;
  state_ = present->Import(*automaton_, state_);
  automaton_ = present;
}

absl::Status GrammarMatcher::Accept(std::string_view bytes) {
  const std::lock_guard lock(grammar_->mutex_);
  Refresh();
  automaton_->AllowWork();
  try {
    int32_t state = state_;
    for (const char c : bytes) {
      state = automaton_->Next(state, static_cast<uint8_t>(c));
      if (state == Automaton::kDead) return absl::InternalError("a token was chosen that the grammar does not allow");
    }
    state_ = state;
    return absl::OkStatus();
  } catch (const grammar::TooMuchWork&) {
    return TooComplex();
  }
}

absl::Status GrammarMatcher::FillMask(uint32_t* mask) {
  const std::lock_guard lock(grammar_->mutex_);
  Refresh();
  automaton_->AllowWork();
  try {
    const grammar::TokenMask& found = automaton_->MaskOf(state_);
    std::copy(found.begin(), found.end(), mask);
    return absl::OkStatus();
  } catch (const grammar::TooMuchWork&) {
    return TooComplex();
  }
}

std::string GrammarMatcher::ForcedBytes(size_t limit) {
  const std::lock_guard lock(grammar_->mutex_);
  Refresh();
  automaton_->AllowWork();
  std::string bytes;
  int32_t state = state_;
  try {
    while (bytes.size() < limit) {
      const int byte = automaton_->ForcedByte(state);
      if (byte < 0) break;
      bytes.push_back(static_cast<char>(byte));
      state = automaton_->Next(state, static_cast<uint8_t>(byte));
    }
  } catch (const grammar::TooMuchWork&) {
    // The next mask will say so.
  }
  return bytes;
}

bool GrammarMatcher::complete() {
  const std::lock_guard lock(grammar_->mutex_);
  return automaton_->complete(state_);
}
bool GrammarMatcher::accepts() {
  const std::lock_guard lock(grammar_->mutex_);
  return automaton_->accepts(state_);
}

absl::StatusOr<std::shared_ptr<Grammar>> GrammarCompiler::Compile(const GrammarSpec& spec, std::function<bool()> cancelled) {
  std::string key = KeyOf(spec);
  {
    const std::lock_guard lock(mutex_);
    const auto found = by_key_.find(key);
    if (found != by_key_.end()) {
      used_.splice(used_.begin(), used_, found->second);
      return found->second->second;
    }
  }
  std::call_once(made_trie_, [this] { trie_ = std::make_unique<grammar::TokenTrie>(tokenizer_, vocab_size_); });
  grammar::CompileLimits limits;
  limits.cancelled = std::move(cancelled);
  auto compiled = Grammar::Compile(spec, *trie_, limits);
  if (!compiled.ok()) return compiled;
  const std::lock_guard lock(mutex_);
  if (by_key_.contains(key)) return compiled;  // somebody was faster
  used_.emplace_front(key, *compiled);
  by_key_.emplace(std::move(key), used_.begin());
  Forget();
  return compiled;
}

void GrammarCompiler::Forget() {
  int64_t bytes = 0;
  size_t kept = 0;
  for (auto at = used_.begin(); at != used_.end();) {
    bytes += at->second->bytes() + static_cast<int64_t>(at->first.size());
    if (++kept <= 1 || (kept <= kMaxGrammars && bytes <= kMaxBytes)) {
      ++at;
    } else {
      by_key_.erase(at->first);
      at = used_.erase(at);
    }
  }
}

}  // namespace loupe
