// Functions that a template may call by name: raise_exception, strftime_now, range, namespace, dict, cycler, joiner.
#include <algorithm>
#include <array>

#include "engine/text/jinja_interp.h"

namespace loupe::jinja {
namespace {

constexpr int64_t kLongestRange = 100000;  // as Jinja's sandbox has it

using GlobalFunction = Value (*)(Interpreter& in, const Args& args);

class Function : public Object {
 public:
  explicit Function(GlobalFunction function) : function_(function) {}
  const char* TypeName() const override { return "function"; }
  bool callable() const override { return true; }
  Value Call(Interpreter& in, const Args& args) override { return function_(in, args); }

 private:
  GlobalFunction function_;
};

Value Share(std::shared_ptr<Object> object) { return Value::Of(std::move(object)); }

Value RaiseException(Interpreter& in, const Args& args) {
  const Bound bound("raise_exception", args, {"message"}, 1);
  throw Error(ErrorKind::kRaised, Str(in.budget(), *bound[0]), in.line());
}

Value StrftimeNow(Interpreter& in, const Args& args) {
  const Bound bound("strftime_now", args, {"format"}, 1);
  const std::string format = bound.String(0, "");
  if (format.size() > 1000) Fail("a time format of " + std::to_string(format.size()) + " bytes, at most 1000");
  if (format.empty()) return Value::String("");
  const std::time_t seconds = std::time(nullptr);
  std::tm now{};
  if (in.context().now) {
    now = in.context().now();
  } else {
    localtime_r(&seconds, &now);
  }
  std::array<char, 16384> text;
  // One blank in front tells an empty result from one that does not fit.
  const size_t length = std::strftime(text.data(), text.size(), (" " + format).c_str(), &now);
  if (length == 0) Fail("the time does not fit in " + std::to_string(text.size()) + " bytes");
  return Value::String(std::string(text.data() + 1, length - 1));
}

Value Range(Interpreter& in, const Args& args) {
  const Bound bound("range", args, {"start", "stop", "step"}, 1);
  const int64_t start = bound[1] == nullptr ? 0 : bound.Int(0, 0);
  const int64_t stop = bound[1] == nullptr ? bound.Int(0, 0) : bound.Int(1, 0);
  const int64_t step = bound.Int(2, 1);
  if (step == 0) Fail("range() arg 3 must not be zero");
  const auto distance = step > 0 ? static_cast<__int128>(stop) - start : static_cast<__int128>(start) - stop;
  const auto stride = step > 0 ? static_cast<__int128>(step) : -static_cast<__int128>(step);
  const __int128 count = distance <= 0 ? 0 : (distance + stride - 1) / stride;
  if (count > kLongestRange) {
    throw Error(ErrorKind::kLimit, "a range of more than " + std::to_string(kLongestRange) + " numbers", in.line());
  }
  std::vector<Value> numbers;
  for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) numbers.push_back(Value::Int(start + i * step));
  return MakeList(in.budget(), std::move(numbers));
}

// dict(mapping or pairs, name=value...)
std::vector<std::pair<Value, Value>> DictItems(Interpreter& in, const char* name, const Args& args) {
  if (args.list.size() > 1) Fail(std::string(name) + "() takes at most 1 positional argument");
  std::vector<std::pair<Value, Value>> items;
  if (!args.list.empty()) {
    const Value& source = args.list[0];
    if (source.dict() != nullptr) {
      items = source.dict()->items;
    } else {
      for (const Value& pair : Iterate(in.budget(), source)) {
        std::vector<Value> parts = Iterate(in.budget(), pair);
        if (parts.size() != 2) Fail(std::string(name) + "() needs pairs");
        items.emplace_back(std::move(parts[0]), std::move(parts[1]));
      }
    }
  }
  for (const auto& [key, value] : args.named) items.emplace_back(Value::String(key), value);
  return items;
}

Value MakeNamespace(Interpreter& in, const Args& args) {
  auto space = in.Keep(std::make_shared<Namespace>());
  for (auto& [key, value] : DictItems(in, "namespace", args)) {
    if (key.text() != nullptr) space->attributes[key.AsString()] = std::move(value);
  }
  return Share(space);
}

Value MakeDictFunction(Interpreter& in, const Args& args) { return MakeDict(in.budget(), DictItems(in, "dict", args)); }

// cycler('a', 'b'): next() walks round.
class Cycler : public Object {
 public:
  explicit Cycler(Budget& budget, const std::vector<Value>& items) : items_(items) {
    for (const Value& item : items_) depth = std::max(depth, 1 + DepthOf(item));
    budget.CheckDepth(depth);
  }
  const char* TypeName() const override { return "Cycler"; }
  const Value& current() const { return items_[at_]; }
  void Move(bool reset) { at_ = reset ? 0 : (at_ + 1) % items_.size(); }
  std::optional<Value> Attribute(const std::string& name) const override;

 private:
  std::vector<Value> items_;
  size_t at_ = 0;
};

class CyclerMethod : public Object {
 public:
  CyclerMethod(Cycler* cycler, bool reset) : cycler_(cycler), reset_(reset) {}
  const char* TypeName() const override { return "method"; }
  bool callable() const override { return true; }
  Value Call(Interpreter&, const Args&) override {
    Value value = reset_ ? Value::None() : cycler_->current();
    cycler_->Move(reset_);
    return value;
  }

 private:
  Cycler* cycler_;  // kept by the interpreter
  bool reset_;
};

std::optional<Value> Cycler::Attribute(const std::string& name) const {
  if (name == "current") return current();
  if (name == "next" || name == "reset") return Share(std::make_shared<CyclerMethod>(const_cast<Cycler*>(this), name == "reset"));
  return std::nullopt;
}

Value MakeCycler(Interpreter& in, const Args& args) {
  if (args.list.empty()) Fail("at least one item has to be provided");
  return Share(in.Keep(std::make_shared<Cycler>(in.budget(), args.list)));
}

// joiner(', '): empty at the first call, the separator after.
class Joiner : public Object {
 public:
  explicit Joiner(std::string separator) : separator_(std::move(separator)) {}
  const char* TypeName() const override { return "Joiner"; }
  bool callable() const override { return true; }
  Value Call(Interpreter&, const Args&) override { return Value::String(std::exchange(used_, true) ? separator_ : ""); }

 private:
  std::string separator_;
  bool used_ = false;
};

Value MakeJoiner(Interpreter&, const Args& args) {
  const Bound bound("joiner", args, {"sep"});
  return Share(std::make_shared<Joiner>(bound.String(0, ", ")));
}

}  // namespace

std::optional<Value> FindGlobal(const std::string& name) {
  static const std::unordered_map<std::string, GlobalFunction> kGlobals = {
      {"raise_exception", RaiseException}, {"strftime_now", StrftimeNow}, {"range", Range},    {"namespace", MakeNamespace},
      {"dict", MakeDictFunction},          {"cycler", MakeCycler},        {"joiner", MakeJoiner}};
  const auto found = kGlobals.find(name);
  if (found == kGlobals.end()) return std::nullopt;
  return Share(std::make_shared<Function>(found->second));
}

}  // namespace loupe::jinja
