// Arithmetic, string formatting and slices, with Python's rules. Integers have 64 bits here: what does not fit fails.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "engine/text/jinja_interp.h"
#include "engine/text/jinja_text.h"

namespace loupe::jinja {
namespace {

constexpr int kWidestField = 1000;  // characters of one formatted number

[[noreturn]] void TooLarge() { Fail("an integer beyond 64 bits"); }

int64_t FloorDivide(int64_t a, int64_t b) {
  if (b == 0) Fail("integer division or modulo by zero");
  if (b == -1) return Negate(Value::Int(a)).AsInt();
  const int64_t quotient = a / b;
  return quotient - ((a % b != 0) && ((a < 0) != (b < 0)));
}

int64_t Modulo(int64_t a, int64_t b) {
  if (b == 0) Fail("integer division or modulo by zero");
  if (b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

double FloatModulo(double a, double b) {
  double rest = std::fmod(a, b);
  if (rest != 0) return (rest < 0) != (b < 0) ? rest + b : rest;
  return std::copysign(0.0, b);
}

Value Power(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) Fail("0.0 cannot be raised to a negative power");
    return Value::Float(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  int64_t result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) TooLarge();
    if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) TooLarge();
  }
  return Value::Int(result);
}

Value FloatOperation(const std::string& op, double a, double b) {
  if (op == "+") return Value::Float(a + b);
  if (op == "-") return Value::Float(a - b);
  if (op == "*") return Value::Float(a * b);
  if (op == "**") {
    const double power = std::pow(a, b);
    if (a == 0 && b < 0) Fail("0.0 cannot be raised to a negative power");
    if (std::isnan(power) && !std::isnan(a) && !std::isnan(b)) Fail("a power that is not a real number");
    if (std::isinf(power) && std::isfinite(a) && std::isfinite(b)) Fail("numerical result out of range");
    return Value::Float(power);
  }
  if (b == 0) Fail("float division by zero");
  if (op == "/") return Value::Float(a / b);
  if (op == "//") return Value::Float(std::floor((a - FloatModulo(a, b)) / b + 0.5));
  return Value::Float(FloatModulo(a, b));
}

Value NumberOperation(const std::string& op, const Value& a, const Value& b) {
  if (a.is_float() || b.is_float() || op == "/") {
    if (op == "/" && b.AsFloat() == 0) Fail("division by zero");
    return FloatOperation(op, a.AsFloat(), b.AsFloat());
  }
  const int64_t x = a.AsInt(), y = b.AsInt();
  int64_t result = 0;
  if (op == "+" ? __builtin_add_overflow(x, y, &result)
                : op == "-" ? __builtin_sub_overflow(x, y, &result) : op == "*" && __builtin_mul_overflow(x, y, &result)) {
    TooLarge();
  }
  if (op == "//") return Value::Int(FloorDivide(x, y));
  if (op == "%") return Value::Int(Modulo(x, y));
  if (op == "**") return Power(x, y);
  return Value::Int(result);
}

Value Repeat(Budget& budget, const Value& value, int64_t times) {
  times = std::max<int64_t>(times, 0);
  const size_t size = value.text() != nullptr ? value.AsString().size() : value.list()->items.size();
  int64_t total = 0;
  if (__builtin_mul_overflow(static_cast<int64_t>(size), times, &total)) total = INT64_MAX;
  if (value.text() != nullptr) {
    budget.ChargeBytes(static_cast<uint64_t>(total));
    std::string text;
    text.reserve(static_cast<size_t>(total));
    for (int64_t i = 0; size > 0 && i < times; ++i) text += value.AsString();
    return Value::String(std::move(text));
  }
  budget.ChargeItems(static_cast<uint64_t>(total));
  std::vector<Value> items;
  for (int64_t i = 0; size > 0 && i < times; ++i) {
    items.insert(items.end(), value.list()->items.begin(), value.list()->items.end());
  }
  return MakeList(budget, std::move(items), value.list()->kind);
}

bool IsSequence(const Value& value) {
  return value.text() != nullptr || (value.list() != nullptr && value.list()->kind <= ListKind::kTuple);
}

Value Concatenate(Budget& budget, const Value& a, const Value& b) {
  if (a.text() != nullptr) {
    budget.ChargeBytes(a.AsString().size() + b.AsString().size());
    return Value::String(a.AsString() + b.AsString());
  }
  std::vector<Value> items = a.list()->items;
  budget.ChargeItems(items.size() + b.list()->items.size());
  items.insert(items.end(), b.list()->items.begin(), b.list()->items.end());
  return MakeList(budget, std::move(items), a.list()->kind);
}

// One %-directive: flags, width, precision, letter.
struct Directive {
  std::string spec;  // "%-5.2" without the letter
  std::string name;  // of %(name)s
  char letter = 0;
};

Directive ReadDirective(const std::string& format, size_t* at) {
  Directive d;
  d.spec = "%";
  size_t i = *at + 1;
  if (i < format.size() && format[i] == '(') {
    const size_t close = format.find(')', i);
    if (close == std::string::npos) Fail("incomplete format key");
    d.name = format.substr(i + 1, close - i - 1);
    i = close + 1;
  }
  int number = 0;
  for (; i < format.size(); ++i) {
    const char c = format[i];
    if (c >= '0' && c <= '9') {
      number = number * 10 + (c - '0');
      if (number > kWidestField) Fail("a format field wider than " + std::to_string(kWidestField));
    } else if (c == '-' || c == '+' || c == ' ' || c == '#' || c == '.') {
      number = 0;
    } else {
      break;
    }
    if (d.spec.size() > 20) Fail("unsupported format '" + d.spec + "'");
    d.spec += c;
  }
  if (i >= format.size()) Fail("incomplete format");
  d.letter = format[i];
  *at = i + 1;
  return d;
}

std::string Pad(const std::string& spec, const std::string& text) {
  const size_t dot = spec.find('.');
  std::string out = text;
  if (dot != std::string::npos) {
    const std::vector<size_t> offsets = CharOffsets(out);
    const size_t most = spec.size() > dot + 1 ? static_cast<size_t>(std::atoi(spec.c_str() + dot + 1)) : 0;
    if (most < offsets.size()) out.resize(offsets[most]);
  }
  const size_t digits = spec.find_first_of("123456789");
  const auto width = digits < dot ? static_cast<int64_t>(std::atoi(spec.c_str() + digits)) : 0;
  const int64_t missing = width - CharCount(out);
  if (missing <= 0) return out;
  const std::string blanks(static_cast<size_t>(missing), ' ');
  return spec.find('-') != std::string::npos ? out + blanks : blanks + out;
}

std::string FormatOne(Interpreter& in, const Directive& d, const Value& value) {
  if (d.letter == 's') return Pad(d.spec, Str(in.budget(), value));
  if (d.letter == 'r') return Pad(d.spec, Repr(in.budget(), value));
  NeedDefined(value);
  const std::string letters = "diuxXofFeEgG";
  if (letters.find(d.letter) == std::string::npos) Fail(std::string("unsupported format character '") + d.letter + "'");
  if (!value.is_number()) Fail(std::string("%") + d.letter + " format: a real number is required, not " + TypeName(value));
  char buffer[2 * kWidestField + 400];
  const bool integral = letters.find(d.letter) < 6;
  if (integral) {
    const double real = value.AsFloat();
    if (value.is_float() && !(std::fabs(real) < 9e18)) TooLarge();
    const int64_t whole = value.is_float() ? static_cast<int64_t>(real) : value.AsInt();
    const std::string spec = d.spec + "l" + (d.letter == 'i' || d.letter == 'u' ? 'd' : d.letter);
    std::snprintf(buffer, sizeof buffer, spec.c_str(), whole);
  } else {
    std::snprintf(buffer, sizeof buffer, (d.spec + d.letter).c_str(), value.AsFloat());
  }
  return buffer;
}

}  // namespace

Value Negate(const Value& value) {
  if (value.is_float()) return Value::Float(-value.AsFloat());
  int64_t result;
  if (__builtin_sub_overflow(int64_t{0}, value.AsInt(), &result)) TooLarge();
  return Value::Int(result);
}

Value BinaryOperation(Interpreter& in, const std::string& op, const Value& a, const Value& b) {
  NeedDefined(a);
  if (op == "%" && a.text() != nullptr) {
    const bool tuple = b.list() != nullptr && b.list()->kind == ListKind::kTuple;
    return Value::String(PercentFormat(in, a.AsString(), tuple ? b.list()->items : std::vector<Value>{b}));
  }
  NeedDefined(b);
  if (a.is_number() && b.is_number()) return NumberOperation(op, a, b);
  if (op == "*" && IsSequence(a) && b.is_integral()) return Repeat(in.budget(), a, b.AsInt());
  if (op == "*" && a.is_integral() && IsSequence(b)) return Repeat(in.budget(), b, a.AsInt());
  const bool same = IsSequence(a) && TypeName(a) == TypeName(b);
  if (op == "+" && same) return Concatenate(in.budget(), a, b);
  if (op == "+" && a.text() != nullptr) Fail("can only concatenate str (not \"" + TypeName(b) + "\") to str");
  Fail("unsupported operand type(s) for " + op + ": '" + TypeName(a) + "' and '" + TypeName(b) + "'");
}

std::string PercentFormat(Interpreter& in, const std::string& format, const std::vector<Value>& values) {
  std::string out;
  size_t used = 0;
  bool by_name = false;
  for (size_t at = 0; at < format.size();) {
    if (format[at] != '%') {
      out += format[at++];
      continue;
    }
    const Directive d = ReadDirective(format, &at);
    if (d.letter == '%') {
      out += '%';
    } else if (!d.name.empty()) {
      const Dict* dict = values.size() == 1 ? values[0].dict() : nullptr;
      if (dict == nullptr) Fail("format requires a mapping");
      const Value* named = dict->Find(std::string_view(d.name));
      if (named == nullptr) Fail("format: no key '" + d.name + "'");
      by_name = true;
      out += FormatOne(in, d, *named);
    } else {
      if (used >= values.size()) Fail("not enough arguments for format string");
      out += FormatOne(in, d, values[used++]);
    }
    in.budget().ChargeBytes(out.size());
  }
  const bool all_used = used == values.size() || by_name || (values.size() == 1 && values[0].dict() != nullptr);
  if (!all_used) Fail("not all arguments converted during string formatting");
  return out;
}

Value Slice(Interpreter& in, const Value& object, const std::array<Value, 3>& bounds) {
  NeedDefined(object);
  const List* list = object.list();
  if (object.text() == nullptr && (list == nullptr || list->kind > ListKind::kTuple)) {
    return Value::Undefined("'" + TypeName(object) + "' object has no slices");
  }
  const auto bound = [](const Value& value, int64_t otherwise) {
    if (value.is_none()) return otherwise;
    NeedDefined(value);
    if (!value.is_integral()) Fail("slice indices must be integers or None");
    return value.AsInt();
  };
  std::vector<size_t> offsets;
  if (object.text() != nullptr) {
    in.budget().ChargeItems(object.AsString().size() / sizeof(Value));
    offsets = CharOffsets(object.AsString());
  }
  const auto size = static_cast<int64_t>(list != nullptr ? list->items.size() : offsets.size() - 1);
  const int64_t step = bound(bounds[2], 1);
  if (step == 0) Fail("slice step cannot be zero");
  const auto clamp = [&](int64_t index) {
    if (index < 0) index = std::max<int64_t>(index, -size - 1) + size;
    return step > 0 ? std::clamp<int64_t>(index, 0, size) : std::clamp<int64_t>(index, -1, size - 1);
  };
  const int64_t start = bounds[0].is_none() ? (step > 0 ? 0 : size - 1) : clamp(bound(bounds[0], 0));
  const int64_t stop = bounds[1].is_none() ? (step > 0 ? size : -1) : clamp(bound(bounds[1], 0));
  std::string text;
  std::vector<Value> items;
  if (object.text() != nullptr && step == 1) {
    if (start < stop) text = object.AsString().substr(offsets[static_cast<size_t>(start)],
                                                      offsets[static_cast<size_t>(stop)] - offsets[static_cast<size_t>(start)]);
    return Value::String(std::move(text));
  }
  for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
    const auto at = static_cast<size_t>(i);
    if (list != nullptr) {
      items.push_back(list->items[at]);
    } else {
      text.append(object.AsString(), offsets[at], offsets[at + 1] - offsets[at]);
    }
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  if (list == nullptr) return Value::String(std::move(text));
  return MakeList(in.budget(), std::move(items), list->kind);
}

std::optional<int64_t> ParseInteger(std::string_view text, int base) {
  text = Strip(text, nullptr);
  const bool negative = !text.empty() && text[0] == '-';
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) text.remove_prefix(1);
  if (text.size() > 2 && text[0] == '0' && base != 10) {
    const char letter = static_cast<char>(text[1] | 0x20);
    if ((letter == 'x' && base == 16) || (letter == 'o' && base == 8) || (letter == 'b' && base == 2)) text.remove_prefix(2);
  }
  if (text.empty() || text[0] == '_' || text.back() == '_' || text[0] == '-' || text.find("__") != std::string_view::npos) {
    return std::nullopt;
  }
  std::string digits(negative ? "-" : "");
  for (const char c : text) {
    if (c != '_') digits += c;
  }
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

}  // namespace loupe::jinja
