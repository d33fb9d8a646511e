#include "engine/grammar/nfa.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"

namespace loupe::grammar {

namespace {

std::chrono::nanoseconds ThreadTime() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

NfaBuilder::NfaBuilder(CompileLimits limits) : limits_(std::move(limits)), deadline_(ThreadTime() + limits_.max_time) {}

void NfaBuilder::CheckTime() const {
  if (limits_.cancelled && limits_.cancelled()) throw Cancelled();
  if (ThreadTime() < deadline_) return;
  throw Refusal(absl::StrCat("takes more than ", limits_.max_time.count(), " ms to compile; simplify it"));
}

StateId NfaBuilder::NewState() {
  if (num_states() >= limits_.max_states) {
    throw Refusal(absl::StrCat("needs more than ", limits_.max_states, " states; make it smaller, or its repetitions shorter"));
  }
  if (num_states() % 1024 == 1023) CheckTime();
  heads_.push_back(-1);
  return static_cast<StateId>(heads_.size()) - 1;
}

Rule NfaBuilder::NewRule() {
  const Rule rule{NewState(), NewState()};
  ends_.push_back(rule.end);
  return rule;
}

void NfaBuilder::AddEdge(StateId from, Edge edge) {
  // As many as there may be states, several times over: a set of characters has many edges.
  if (edges_.size() >= static_cast<size_t>(limits_.max_states) * 8) {
    throw Refusal(absl::StrCat("needs more than ", limits_.max_states * 8, " edges; make it smaller"));
  }
  if (edges_.size() % 4096 == 4095) CheckTime();
  int32_t& head = heads_[static_cast<size_t>(from)];
  edges_.push_back({edge, head});
  head = static_cast<int32_t>(edges_.size()) - 1;
}

void NfaBuilder::AddByte(StateId from, int low, int high, StateId to) {
  AddEdge(from, {Edge::Kind::kByte, static_cast<uint8_t>(low), static_cast<uint8_t>(high), to, -1});
}
void NfaBuilder::AddEmpty(StateId from, StateId to) { AddEdge(from, {Edge::Kind::kEmpty, 0, 0, to, -1}); }
void NfaBuilder::AddCall(StateId from, Rule rule, StateId to) { AddEdge(from, {Edge::Kind::kCall, 0, 0, to, rule.start}); }

void NfaBuilder::AddText(StateId from, std::string_view bytes, StateId to) {
  if (bytes.empty()) return AddEmpty(from, to);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int byte = static_cast<unsigned char>(bytes[i]);
    const StateId next = i + 1 == bytes.size() ? to : NewState();
    AddByte(from, byte, byte, next);
    from = next;
  }
}

// States from which their rule's end can be reached: backwards from the ends, a call counting once both the called rule
// and what follows it are known to.
std::vector<bool> NfaBuilder::CompletableStates(const std::vector<bool>& ends) const {
  struct Use {
    StateId from;
    int32_t edge;
  };
  const auto for_each_use = [&](auto&& told) {
    for (size_t s = 0; s < heads_.size(); ++s) {
      for (int32_t e = heads_[s]; e >= 0; e = edges_[static_cast<size_t>(e)].next) {
        const Edge& edge = edges_[static_cast<size_t>(e)].edge;
        told(edge.target, Use{static_cast<StateId>(s), e});
        if (edge.kind == Edge::Kind::kCall) told(edge.rule, Use{static_cast<StateId>(s), e});
      }
    }
  };
  // Of state s: uses[first_use[s], first_use[s + 1]).
  std::vector<int32_t> first_use(heads_.size() + 1);
  for_each_use([&](StateId used, const Use&) { ++first_use[static_cast<size_t>(used)]; });
  for (size_t s = 1; s < first_use.size(); ++s) first_use[s] += first_use[s - 1];
  std::vector<Use> uses(static_cast<size_t>(first_use.back()));
  for_each_use([&](StateId used, const Use& use) { uses[static_cast<size_t>(--first_use[static_cast<size_t>(used)])] = use; });
  CheckTime();
  std::vector<bool> good(ends);
  std::vector<StateId> work;
  for (size_t s = 0; s < ends.size(); ++s) {
    if (ends[s]) work.push_back(static_cast<StateId>(s));
  }
  while (!work.empty()) {
    const auto state = static_cast<size_t>(work.back());
    work.pop_back();
    for (int32_t u = first_use[state]; u < first_use[state + 1]; ++u) {
      const Use& use = uses[static_cast<size_t>(u)];
      const Edge& edge = edges_[static_cast<size_t>(use.edge)].edge;
      const bool through = edge.kind != Edge::Kind::kCall ||
                           (good[static_cast<size_t>(edge.target)] && good[static_cast<size_t>(edge.rule)]);
      if (!through || good[static_cast<size_t>(use.from)]) continue;
      good[static_cast<size_t>(use.from)] = true;
      work.push_back(use.from);
    }
  }
  return good;
}

namespace {

// Classes are the intervals between the places at which some edge begins or ends.
void FindClasses(Program* program) {
  bool begins[257] = {true};
  for (const Edge& edge : program->edges) {
    if (edge.kind != Edge::Kind::kByte) continue;
    begins[edge.low] = begins[edge.high + 1] = true;
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (begins[byte]) program->byte_of_class.push_back(static_cast<uint8_t>(byte));
    program->class_of[byte] = static_cast<uint8_t>(program->byte_of_class.size() - 1);
  }
  program->num_classes = static_cast<int>(program->byte_of_class.size());
}

}  // namespace

Program NfaBuilder::Finish(Rule start) {
  CheckTime();
  Program program;
  program.ends.assign(heads_.size(), false);
  for (const StateId end : ends_) program.ends[static_cast<size_t>(end)] = true;
  const std::vector<bool> good = CompletableStates(program.ends);
  if (!good[static_cast<size_t>(start.start)]) throw Refusal("no text can satisfy it");
  const auto kept = [&](const Edge& edge) {
    return good[static_cast<size_t>(edge.target)] && (edge.kind != Edge::Kind::kCall || good[static_cast<size_t>(edge.rule)]);
  };
  for (const int32_t head : heads_) {
    program.first_edge.push_back(static_cast<int32_t>(program.edges.size()));
    for (int32_t e = head; e >= 0; e = edges_[static_cast<size_t>(e)].next) {
      if (kept(edges_[static_cast<size_t>(e)].edge)) program.edges.push_back(edges_[static_cast<size_t>(e)].edge);
    }
  }
  program.first_edge.push_back(static_cast<int32_t>(program.edges.size()));
  CheckTime();
  program.start = start.start;
  FindClasses(&program);
  return program;
}

}  // namespace loupe::grammar
