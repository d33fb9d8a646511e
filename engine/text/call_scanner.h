// Reads the JSON object of one tool call byte by byte: {"name": "...", "arguments": {...}}, in either order, `parameters`
// for `arguments`, `type` and `id` passed over. Says the name once it is known, and hands out the arguments as they come.
#pragma once

#include <string>
#include <string_view>

namespace loupe {

class CallScanner {
 public:
  enum class State {
    kOpen,    // goes on
    kDone,    // the object is complete
    kFailed,  // no call
  };

  // Takes bytes up to the end of the object and says how many.
  size_t Push(std::string_view text);

  State state() const { return state_; }
  bool has_name() const { return has_name_; }
  const std::string& name() const { return name_; }
  // It is a call as far as can be told: it has a name, and its arguments have begun or there are none.
  bool begun() const { return has_name_ && state_ != State::kFailed && (state_ == State::kDone || has_arguments_ || hands_out()); }
  // The arguments' bytes that nobody has taken. Given as text ("{...}" in quotes) they come out as what they say, at the end.
  std::string TakeArguments();

 private:
  enum class At { kBegin, kKeyOrEnd, kKey, kColon, kValue, kInValue, kCommaOrEnd };

  // Inside of arguments that need not be complete to be told.
  bool hands_out() const { return is_arguments_ && at_ == At::kInValue && !quoted_ && !literal_; }
  void Step(char c);
  void BeginValue(char c);
  void InValue(char c);
  void EndValue();

  State state_ = State::kOpen;
  At at_ = At::kBegin;
  std::string key_, value_;  // value_: of a name, or of arguments in quotes; otherwise what nobody has taken
  bool in_string_ = false, escaped_ = false;
  bool literal_ = false;  // a value without brackets and quotes
  int depth_ = 0;         // brackets open inside of the value
  bool has_name_ = false, has_arguments_ = false;
  bool is_arguments_ = false, quoted_ = false;
  std::string name_, arguments_;
};

}  // namespace loupe
