// How JSON is written: the pieces that schemas are put together from. White space between tokens is nothing, a space, or a
// line end with indentation; none stands before a colon or a comma. Without a schema's say strings may hold every escape
// (surrogates in pairs only), numbers have no bounds, and values nest without end.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/grammar/char_set.h"
#include "engine/grammar/nfa.h"
#include "nlohmann/json.hpp"

namespace loupe::grammar {

using Json = nlohmann::ordered_json;

class JsonText {
 public:
  explicit JsonText(NfaBuilder& nfa) : nfa_(nfa) {}

  NfaBuilder& nfa() { return nfa_; }
  void AddSpace(StateId from, StateId to);
  void AddAnyValue(StateId from, StateId to);
  void AddAnyObject(StateId from, StateId to);
  void AddAnyString(StateId from, StateId to);
  // `max` -1: without end. Lengths in characters.
  void AddString(StateId from, int min, int max, StateId to);
  void AddInteger(StateId from, StateId to);
  void AddNumber(StateId from, StateId to);
  // One value, spelled in its shortest form.
  void AddLiteral(StateId from, const Json& value, StateId to);
  // A string that is none of `names`.
  void AddOtherString(StateId from, const std::vector<std::string>& names, StateId to);
  // ':' and the space behind it.
  void AddColon(StateId from, StateId to);

  using Part = std::function<void(StateId from, StateId to)>;
  // Values of a list in order: those of `first`, then any number of `rest` (null: none), in all between min and max (-1:
  // without end). `open` and `close` are the brackets.
  void AddList(StateId from, char open, const std::vector<Part>& first, const Part& rest, int min, int max, char close, StateId to);

 private:
  void AddEscape(StateId from, StateId to);
  Rule Character();  // of a string, with every way to write it
  Rule StringTail();
  Rule Value();

  NfaBuilder& nfa_;
  std::optional<Rule> character_, tail_, value_;
};

// A bound of a number, as decimal digits.
struct Bound {
  bool negative = false;
  std::string whole = "0", fraction;  // without leading and trailing zeros
  bool inclusive = true;
  bool IsZero() const { return whole == "0" && fraction.empty(); }
};
// Refusal if it has more digits than are offered.
Bound MakeBound(const Json& number, bool inclusive);
// Numbers between the bounds, without exponent; with `integer` without fraction either.
void AddNumberBetween(NfaBuilder& nfa, StateId from, const std::optional<Bound>& low, const std::optional<Bound>& high, bool integer,
                      StateId to);
// Integers that are multiples of `divisor`, from 1 to kMaxDivisor.
inline constexpr int kMaxDivisor = 1000;
void AddMultiple(NfaBuilder& nfa, StateId from, int divisor, StateId to);

}  // namespace loupe::grammar
