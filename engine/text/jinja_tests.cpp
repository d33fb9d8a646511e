// What may stand after `is`.
#include <cmath>

#include "engine/text/jinja_interp.h"
#include "engine/text/jinja_text.h"

namespace loupe::jinja {
namespace {

const Value& Other(const char* name, const Args& args) {
  if (args.list.size() != 1 || !args.named.empty()) Fail(std::string("test '") + name + "' takes one argument");
  return args.list[0];
}

bool IsModulo(const Value& value, int64_t divisor, int64_t rest) {
  NeedDefined(value);
  if (divisor == 0) Fail("integer division or modulo by zero");
  if (value.is_float()) return std::fmod(value.AsFloat(), static_cast<double>(divisor)) == static_cast<double>(rest);
  if (!value.is_integral()) Fail("'" + TypeName(value) + "' is not a number");
  if (divisor == -1) return rest == 0;
  return (value.AsInt() % divisor + divisor) % divisor == rest;
}

bool IsIterable(const Value& value) {
  return value.is_undefined() || value.text() != nullptr || value.dict() != nullptr || value.list() != nullptr;
}

bool IsSequence(const Value& value) {
  if (const List* list = value.list()) return list->kind <= ListKind::kTuple;
  return IsIterable(value);
}

bool SameAs(const Value& a, const Value& b) {
  if (a.data().index() != b.data().index()) return false;
  if (a.object() != nullptr || a.list() != nullptr || a.dict() != nullptr) {
    return a.object() == b.object() && a.list() == b.list() && a.dict() == b.dict();
  }
  if (a.text() != nullptr) return a.AsString() == b.AsString();
  return a.is_number() ? a.AsFloat() == b.AsFloat() : true;
}

bool IsCased(const Value& value, bool upper) {
  if (value.text() == nullptr) return false;
  bool any = false;
  for (size_t at = 0; at < value.AsString().size();) {
    uint32_t code;
    at += CharAt(value.AsString(), at, &code);
    if (upper ? IsLower(code) : IsUpper(code)) return false;
    any |= upper ? IsUpper(code) : IsLower(code);
  }
  return any;
}

template <int kOrderA, int kOrderB>
bool Ordered(Interpreter& in, const Value& value, const Args& args) {
  const int order = Compare(in.budget(), value, Other("comparison", args));
  return order == kOrderA || order == kOrderB;
}

bool TestEqual(Interpreter& in, const Value& v, const Args& args) { return Equal(in.budget(), v, Other("eq", args)); }
bool TestNotEqual(Interpreter& in, const Value& v, const Args& args) { return !Equal(in.budget(), v, Other("ne", args)); }
bool TestIn(Interpreter& in, const Value& v, const Args& args) { return Contains(in.budget(), Other("in", args), v); }
bool TestSameAs(Interpreter&, const Value& v, const Args& args) { return SameAs(v, Other("sameas", args)); }

bool TestDivisible(Interpreter&, const Value& v, const Args& args) {
  const Value& by = Other("divisibleby", args);
  NeedDefined(by);
  if (!by.is_integral()) Fail("divisibleby takes an integer");
  return IsModulo(v, by.AsInt(), 0);
}

bool TestTrue(Interpreter&, const Value& v, const Args&) { return v.is_bool() && v.AsBool(); }
bool TestFalse(Interpreter&, const Value& v, const Args&) { return v.is_bool() && !v.AsBool(); }
bool TestDefined(Interpreter&, const Value& v, const Args&) { return !v.is_undefined(); }
bool TestUndefined(Interpreter&, const Value& v, const Args&) { return v.is_undefined(); }
bool TestNone(Interpreter&, const Value& v, const Args&) { return v.is_none(); }
bool TestString(Interpreter&, const Value& v, const Args&) { return v.text() != nullptr; }
bool TestMapping(Interpreter&, const Value& v, const Args&) { return v.dict() != nullptr; }
bool TestIterable(Interpreter&, const Value& v, const Args&) { return IsIterable(v); }
bool TestSequence(Interpreter&, const Value& v, const Args&) { return IsSequence(v); }
bool TestNumber(Interpreter&, const Value& v, const Args&) { return v.is_number(); }
bool TestInteger(Interpreter&, const Value& v, const Args&) { return v.is_int(); }
bool TestFloat(Interpreter&, const Value& v, const Args&) { return v.is_float(); }
bool TestBoolean(Interpreter&, const Value& v, const Args&) { return v.is_bool(); }
bool TestCallable(Interpreter&, const Value& v, const Args&) { return v.object() != nullptr && v.object()->callable(); }
bool TestOdd(Interpreter&, const Value& v, const Args&) { return IsModulo(v, 2, 1); }
bool TestEven(Interpreter&, const Value& v, const Args&) { return IsModulo(v, 2, 0); }
bool TestUpper(Interpreter&, const Value& v, const Args&) { return IsCased(v, true); }
bool TestLower(Interpreter&, const Value& v, const Args&) { return IsCased(v, false); }
bool TestEscaped(Interpreter&, const Value&, const Args&) { return false; }
bool TestFilter(Interpreter&, const Value& v, const Args&) { return v.text() != nullptr && FindFilter(v.AsString()) != nullptr; }
bool TestTest(Interpreter&, const Value& v, const Args&) { return v.text() != nullptr && FindTest(v.AsString()) != nullptr; }

}  // namespace

TestFunction FindTest(const std::string& name) {
  static const std::unordered_map<std::string, TestFunction> kTests = {
      {"defined", TestDefined}, {"undefined", TestUndefined}, {"none", TestNone}, {"string", TestString},
      {"mapping", TestMapping}, {"iterable", TestIterable}, {"sequence", TestSequence}, {"number", TestNumber},
      {"integer", TestInteger}, {"float", TestFloat}, {"boolean", TestBoolean}, {"true", TestTrue}, {"false", TestFalse},
      {"callable", TestCallable}, {"odd", TestOdd}, {"even", TestEven}, {"divisibleby", TestDivisible}, {"upper", TestUpper},
      {"lower", TestLower}, {"escaped", TestEscaped}, {"filter", TestFilter}, {"test", TestTest}, {"in", TestIn},
      {"sameas", TestSameAs}, {"eq", TestEqual}, {"equalto", TestEqual}, {"==", TestEqual}, {"ne", TestNotEqual},
      {"!=", TestNotEqual}, {"lt", Ordered<-1, -1>}, {"lessthan", Ordered<-1, -1>}, {"<", Ordered<-1, -1>},
      {"le", Ordered<-1, 0>}, {"<=", Ordered<-1, 0>}, {"gt", Ordered<1, 1>}, {"greaterthan", Ordered<1, 1>},
      {">", Ordered<1, 1>}, {"ge", Ordered<1, 0>}, {">=", Ordered<1, 0>}};
  const auto found = kTests.find(name);
  return found == kTests.end() ? nullptr : found->second;
}

}  // namespace loupe::jinja
