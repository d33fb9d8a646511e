// Numbers between bounds, digit by digit: as long as the digits equal those of a bound, that bound holds the next digit
// back; once they differ it no longer matters.
#include <algorithm>
#include <map>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "engine/grammar/json_text.h"

namespace loupe::grammar {
namespace {

constexpr size_t kMaxDigits = 40;  // of a bound

// Magnitudes: low <= x <= high, both not negative. `high` absent: without end.
class Magnitudes {
 public:
  Magnitudes(NfaBuilder& nfa, const Bound& low, const std::optional<Bound>& high, bool integer, StateId to)
      : nfa_(nfa),
        low_(low),
        high_(high),
        integer_(integer),
        to_(to),
        last_(std::max(low.fraction.size(), high ? high->fraction.size() : 0)) {}

  void Add(StateId from) {
    const size_t shortest = low_.whole.size();
    const size_t longest = high_ ? high_->whole.size() : shortest;
    for (size_t digits = shortest; digits <= longest; ++digits) {
      AddWhole(from, digits, 0, digits == shortest, high_ && digits == longest);
      whole_.clear();
    }
    if (high_) return;
    // More digits than the lower bound has.
    StateId at = nfa_.NewState();
    nfa_.AddByte(from, '1', '9', at);
    for (size_t i = 0; i < shortest; ++i) {
      const StateId next = nfa_.NewState();
      nfa_.AddByte(at, '0', '9', next);
      at = next;
    }
    nfa_.AddByte(at, '0', '9', at);
    nfa_.AddEmpty(at, AfterWhole(false, false));
  }

 private:
  static int Digit(const std::string& digits, size_t i) { return i < digits.size() ? digits[i] - '0' : 0; }

  // The edges for one digit: bounds that still hold, and to where each leads.
  template <class Next>
  void AddDigits(StateId from, int first, bool low, int low_digit, bool high, int high_digit, const Next& next) {
    for (int d = std::max(first, low ? low_digit : 0); d <= (high ? high_digit : 9); ++d) {
      const StateId to = next(low && d == low_digit, high && d == high_digit);
      nfa_.AddByte(from, '0' + d, '0' + d, to);
    }
  }

  void AddWhole(StateId from, size_t digits, size_t at, bool low, bool high) {
    if (at == digits) return nfa_.AddEmpty(from, AfterWhole(low, high));
    AddDigits(from, at == 0 && digits > 1 ? 1 : 0, low, Digit(low_.whole, at), high, high ? Digit(high_->whole, at) : 9,
              [&](bool l, bool h) {
                const auto [found, fresh] = whole_.try_emplace({at, l, h}, -1);
                if (!fresh) return found->second;
                const StateId next = found->second = nfa_.NewState();
                AddWhole(next, digits, at + 1, l, h);
                return next;
              });
  }

  // What is written so far, followed by zeros, lies within bounds that it equals up to fraction digit `at`.
  bool Fits(size_t at, bool low, bool high) const {
    const bool below = low && (at < low_.fraction.size() || !low_.inclusive);
    const bool above = high && at >= high_->fraction.size() && !high_->inclusive;
    return !below && !above;
  }

  StateId AfterWhole(bool low, bool high) {
    const auto [found, fresh] = after_whole_.try_emplace({low, high}, -1);
    if (!fresh) return found->second;
    const StateId state = found->second = nfa_.NewState();
    if (Fits(0, low, high)) nfa_.AddEmpty(state, to_);
    if (!integer_) nfa_.AddByte(state, '.', '.', Fraction(0, low, high));
    return state;
  }

  StateId Fraction(size_t at, bool low, bool high) {
    at = std::min(at, last_ + 1);  // beyond both bounds' digits places are alike, but for the first, which must have a digit
    const auto [found, fresh] = fraction_.try_emplace({at, low, high}, -1);
    if (!fresh) return found->second;
    const StateId state = found->second = nfa_.NewState();
    if (at > 0 && Fits(at, low, high)) nfa_.AddEmpty(state, to_);
    AddDigits(state, 0, low, Digit(low_.fraction, at), high, high ? Digit(high_->fraction, at) : 9,
              [&](bool l, bool h) { return Fraction(at + 1, l, h); });
    return state;
  }

  NfaBuilder& nfa_;
  const Bound& low_;
  const std::optional<Bound>& high_;
  const bool integer_;
  const StateId to_;
  const size_t last_;
  std::map<std::tuple<size_t, bool, bool>, StateId> whole_, fraction_;
  std::map<std::pair<bool, bool>, StateId> after_whole_;
};

// Below zero, at it, above it.
int CompareMagnitudes(const Bound& a, const Bound& b) {
  if (a.whole.size() != b.whole.size()) return a.whole.size() < b.whole.size() ? -1 : 1;
  if (const int whole = a.whole.compare(b.whole); whole != 0) return whole;
  return a.fraction.compare(b.fraction);
}

void AddMagnitudes(NfaBuilder& nfa, StateId from, const Bound& low, const std::optional<Bound>& high, bool integer, StateId to) {
  if (high) {
    const int order = CompareMagnitudes(low, *high);
    if (order > 0 || (order == 0 && !(low.inclusive && high->inclusive))) return;
  }
  Magnitudes(nfa, low, high, integer, to).Add(from);
}

}  // namespace

Bound MakeBound(const Json& number, bool inclusive) {
  Bound bound;
  bound.inclusive = inclusive;
  std::string text = number.dump();
  if (text.starts_with('-')) bound.negative = true, text.erase(0, 1);
  int exponent = 0;
  if (const size_t e = text.find_first_of("eE"); e != std::string::npos) {
    exponent = std::stoi(text.substr(e + 1));
    text.resize(e);
  }
  const size_t point = std::min(text.find('.'), text.size());
  std::string digits = text.substr(0, point);
  int places = static_cast<int>(digits.size()) + exponent;  // before the point
  if (point < text.size()) digits += text.substr(point + 1);
  if (places > static_cast<int>(kMaxDigits) || static_cast<int>(digits.size()) - places > static_cast<int>(kMaxDigits)) {
    throw Refusal(absl::StrCat("is ", number.dump(), "; bounds have at most ", kMaxDigits, " digits before and behind the point"));
  }
  if (places < 0) digits.insert(0, static_cast<size_t>(-places), '0'), places = 0;
  if (static_cast<int>(digits.size()) < places) digits.append(static_cast<size_t>(places) - digits.size(), '0');
  bound.whole = digits.substr(0, static_cast<size_t>(places));
  bound.fraction = digits.substr(static_cast<size_t>(places));
  bound.whole.erase(0, std::min(bound.whole.find_first_not_of('0'), bound.whole.size()));
  if (bound.whole.empty()) bound.whole = "0";
  bound.fraction.resize(bound.fraction.find_last_not_of('0') + 1);
  if (bound.IsZero()) bound.negative = false;
  return bound;
}

void AddNumberBetween(NfaBuilder& nfa, StateId from, const std::optional<Bound>& low, const std::optional<Bound>& high, bool integer,
                      StateId to) {
  if (!high || !high->negative) {
    const Bound zero;
    AddMagnitudes(nfa, from, low && !low->negative ? *low : zero, high, integer, to);
  }
  if (low && !low->negative) return;
  // Negative numbers: the bounds change places.
  Bound least{false, "0", "", false};
  if (high && high->negative) least = *high, least.negative = false;
  std::optional<Bound> most;
  if (low) most = *low, most->negative = false;
  const StateId sign = nfa.NewState();
  nfa.AddByte(from, '-', '-', sign);
  AddMagnitudes(nfa, sign, least, most, integer, to);
}

void AddMultiple(NfaBuilder& nfa, StateId from, int divisor, StateId to) {
  const StateId sign = nfa.NewState();
  nfa.AddEmpty(from, sign);
  nfa.AddByte(from, '-', '-', sign);
  nfa.AddByte(sign, '0', '0', to);
  std::vector<StateId> remainders;
  for (int r = 0; r < divisor; ++r) remainders.push_back(nfa.NewState());
  for (int d = 1; d <= 9; ++d) nfa.AddByte(sign, '0' + d, '0' + d, remainders[static_cast<size_t>(d % divisor)]);
  for (int r = 0; r < divisor; ++r) {
    for (int d = 0; d <= 9; ++d) {
      nfa.AddByte(remainders[static_cast<size_t>(r)], '0' + d, '0' + d, remainders[static_cast<size_t>((r * 10 + d) % divisor)]);
    }
  }
  nfa.AddEmpty(remainders[0], to);
}

}  // namespace loupe::grammar
