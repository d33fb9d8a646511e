// From the tree of an expression to states.
#include "engine/grammar/regex.h"

#include <span>

namespace loupe::grammar {
namespace {

using Kind = RegexNode::Kind;
using Nodes = std::span<const std::unique_ptr<RegexNode>>;

class Writer {
 public:
  Writer(NfaBuilder& nfa, Spelling spelling) : nfa_(nfa), spelling_(spelling) {}

  void Add(StateId from, const RegexNode& node, StateId to) {
    switch (node.kind) {
      case Kind::kSet: return AddCharacter(nfa_, from, node.set, to, spelling_);
      case Kind::kConcat: return AddSequence(from, node.children, to);
      case Kind::kAlternate:
        for (const auto& child : node.children) Add(from, *child, to);
        return;
      case Kind::kRepeat: return AddRepeat(from, node, to);
      case Kind::kLineStart:
      case Kind::kLineEnd: throw Refusal("^ and $ are offered at the ends of an expression or of its alternatives only");
    }
  }

  void AddSequence(StateId from, Nodes nodes, StateId to) {
    for (const auto& node : nodes) {
      const StateId next = nfa_.NewState();
      Add(from, *node, next);
      from = next;
    }
    nfa_.AddEmpty(from, to);
  }

  void AddAnything(StateId from, StateId to) {
    const StateId loop = nfa_.NewState();
    nfa_.AddEmpty(from, loop);
    AddCharacter(nfa_, loop, CharSet::Any(), loop, spelling_);
    nfa_.AddEmpty(loop, to);
  }

 private:
  // Copies of something larger than a byte call one rule, so that each costs one state.
  void AddRepeat(StateId from, const RegexNode& node, StateId to) {
    const RegexNode& child = *node.children.front();
    const int copies = node.max < 0 ? node.min + 1 : node.max;
    const bool called = copies > 1 && !IsByte(child);
    Rule body;
    if (called) {
      body = nfa_.NewRule();
      Add(body.start, child, body.end);
    }
    const auto copy = [&](StateId a, StateId b) { called ? nfa_.AddCall(a, body, b) : Add(a, child, b); };
    for (int i = 0; i < node.min; ++i) {
      const StateId next = nfa_.NewState();
      copy(from, next);
      from = next;
    }
    if (node.max < 0) {
      const StateId loop = nfa_.NewState();
      nfa_.AddEmpty(from, loop);
      copy(loop, loop);
      return nfa_.AddEmpty(loop, to);
    }
    for (int i = node.min; i < node.max; ++i) {
      nfa_.AddEmpty(from, to);
      const StateId next = nfa_.NewState();
      copy(from, next);
      from = next;
    }
    nfa_.AddEmpty(from, to);
  }

  bool IsByte(const RegexNode& node) const {
    if (node.kind != Kind::kSet) return false;
    for (const auto& [low, high] : node.set.ranges()) {
      if (high > 0x7F) return false;
      const bool may_be_escaped = low < 0x20 || (low <= '"' && high >= '"') || (low <= '\\' && high >= '\\');
      if (spelling_ == Spelling::kJsonString && may_be_escaped) return false;
    }
    return true;
  }

  NfaBuilder& nfa_;
  Spelling spelling_;
};

// One of the alternatives at the top, without the anchors at its ends.
void AddAlternative(NfaBuilder& nfa, Writer& writer, StateId from, const RegexNode& node, StateId to, RegexMatch match) {
  if (node.kind == Kind::kAlternate) {
    for (const auto& child : node.children) AddAlternative(nfa, writer, from, *child, to, match);
    return;
  }
  const bool anchor = node.kind == Kind::kLineStart || node.kind == Kind::kLineEnd;
  const bool sequence = node.kind == Kind::kConcat;
  Nodes nodes = node.children;
  const bool at_start = sequence ? !nodes.empty() && nodes.front()->kind == Kind::kLineStart : node.kind == Kind::kLineStart;
  const bool at_end = sequence ? !nodes.empty() && nodes.back()->kind == Kind::kLineEnd : node.kind == Kind::kLineEnd;
  const bool search = match == RegexMatch::kSearch;
  const StateId begin = nfa.NewState(), end = nfa.NewState();
  search && !at_start ? writer.AddAnything(from, begin) : nfa.AddEmpty(from, begin);
  search && !at_end ? writer.AddAnything(end, to) : nfa.AddEmpty(end, to);
  if (anchor) return nfa.AddEmpty(begin, end);
  if (!sequence) return writer.Add(begin, node, end);
  if (at_start) nodes = nodes.subspan(1);
  if (at_end) nodes = nodes.first(nodes.size() - 1);
  writer.AddSequence(begin, nodes, end);
}

}  // namespace

void AddRegex(NfaBuilder& nfa, StateId from, const RegexNode& root, StateId to, Spelling spelling, RegexMatch match) {
  Writer writer(nfa, spelling);
  AddAlternative(nfa, writer, from, root, to, match);
}

}  // namespace loupe::grammar
