// What a grammar is compiled into: states with edges over bytes, grouped into rules that call each other, so that nested
// text is described by a finite machine and a stack of return states. A builder that counts what it makes, and the
// program that comes out of it: without states from which no text can be completed, immutable, any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace loupe::grammar {

using StateId = int32_t;

// Why a grammar cannot be compiled: "<where>: <what, with numbers>". Thrown while compiling and caught in one place,
// grammar.cpp.
class Refusal : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
// The compilation was cancelled.
class Cancelled {};

struct CompileLimits {
  int max_states = 200'000;
  std::chrono::milliseconds max_time{45};  // of the thread, so that a busy machine refuses nothing; the first mask comes on top
  std::function<bool()> cancelled;  // looked at now and then; empty: never
};

struct Edge {
  enum class Kind : uint8_t { kByte, kEmpty, kCall };
  Kind kind = Kind::kEmpty;
  uint8_t low = 0, high = 0;  // kByte: of the byte, inclusive
  StateId target = -1;        // kCall: where it goes on after the rule's end
  StateId rule = -1;          // kCall: the rule's first state
};

// A part of the machine with one way in and one way out. Reaching `end` returns to the caller.
struct Rule {
  StateId start = -1, end = -1;
};

struct Program {
  std::vector<Edge> edges;          // of state s: [first_edge[s], first_edge[s + 1])
  std::vector<int32_t> first_edge;
  std::vector<bool> ends;           // states that end a rule
  StateId start = -1;
  // Bytes that no edge tells apart are one class.
  uint8_t class_of[256] = {};
  int num_classes = 0;
  std::vector<uint8_t> byte_of_class;
  int num_states() const { return static_cast<int>(first_edge.size()) - 1; }
};

class NfaBuilder {
 public:
  explicit NfaBuilder(CompileLimits limits);

  StateId NewState();
  Rule NewRule();
  void AddByte(StateId from, int low, int high, StateId to);
  void AddEmpty(StateId from, StateId to);
  void AddCall(StateId from, Rule rule, StateId to);
  // The bytes one after the other.
  void AddText(StateId from, std::string_view bytes, StateId to);
  int num_states() const { return static_cast<int>(heads_.size()); }

  // Throws Refusal or Cancelled if the time is over.
  void CheckTime() const;

  // The texts of `start`. Refusal if there is none. The builder is of no use afterwards.
  Program Finish(Rule start);

 private:
  struct LinkedEdge {
    Edge edge;
    int32_t next = -1;
  };
  void AddEdge(StateId from, Edge edge);
  std::vector<bool> CompletableStates(const std::vector<bool>& ends) const;

  CompileLimits limits_;
  std::chrono::nanoseconds deadline_;  // of the thread's own time
  std::vector<int32_t> heads_;  // first edge of each state
  std::vector<StateId> ends_;   // of the rules
  std::vector<LinkedEdge> edges_;
};

}  // namespace loupe::grammar
