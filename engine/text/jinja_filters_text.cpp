// Filters on text and numbers, and tojson.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "engine/text/jinja_filters.h"
#include "engine/text/jinja_text.h"

namespace loupe::jinja {
namespace {

constexpr int64_t kWidestPadding = 1 << 20;

std::string Soft(Interpreter& in, const Value& value) { return Str(in.budget(), value); }

std::string Blanks(int64_t count) {
  if (count > kWidestPadding) Fail("a width of " + std::to_string(count) + ", at most " + std::to_string(kWidestPadding));
  return std::string(static_cast<size_t>(std::max<int64_t>(count, 0)), ' ');
}

Value Trim(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("trim", args, {"chars"});
  const bool plain = bound[0] == nullptr || bound[0]->is_none();
  const std::string chars = plain ? "" : bound.String(0, "");
  return Value::String(std::string(Strip(Soft(in, v), plain ? nullptr : &chars)));
}

Value UpperFilter(Interpreter& in, const Value& v, const Args&) { return Value::String(Upper(Soft(in, v))); }
Value LowerFilter(Interpreter& in, const Value& v, const Args&) { return Value::String(Lower(Soft(in, v))); }
Value CapitalizeFilter(Interpreter& in, const Value& v, const Args&) { return Value::String(Capitalize(Soft(in, v))); }
Value StringFilter(Interpreter& in, const Value& v, const Args&) { return Value::String(Soft(in, v)); }

// A word starts after white space, a dash or an opening bracket; str.title() differs.
Value TitleFilter(Interpreter& in, const Value& v, const Args&) {
  const std::string text = Soft(in, v);
  std::string out, word;
  const auto flush = [&] {
    out += Capitalize(word);
    word.clear();
  };
  for (size_t at = 0; at < text.size();) {
    uint32_t code;
    const size_t length = CharAt(text, at, &code);
    const bool border = IsSpace(code) || code == '-' || code == '(' || code == '{' || code == '[' || code == '<';
    if (border) flush();
    (border ? out : word).append(text, at, length);
    at += length;
  }
  flush();
  return Value::String(std::move(out));
}

Value Escape(Interpreter& in, const Value& v, const Args&) {
  std::string out;
  for (const char c : Soft(in, v)) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '\'': out += "&#39;"; break;
      case '"': out += "&#34;"; break;
      default: out += c;
    }
  }
  in.budget().ChargeBytes(out.size());
  return Value::String(std::move(out));
}

Value Indent(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("indent", args, {"width", "first", "blank"});
  const std::string indent = bound[0] != nullptr && bound[0]->text() != nullptr ? bound.String(0, "") : Blanks(bound.Int(0, 4));
  const bool blank = bound.Flag(2, false);
  NeedDefined(v);
  if (v.text() == nullptr) Fail("indent of a value of type " + TypeName(v));
  const std::vector<std::string> lines = SplitLines(Soft(in, v) + "\n");
  std::string out = bound.Flag(1, false) ? indent : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += (blank || !lines[i].empty()) ? "\n" + indent : "\n";
    out += lines[i];
    if (static_cast<int64_t>(out.size()) > in.budget().limits().max_output_bytes) in.budget().ChargeBytes(out.size());
  }
  in.budget().ChargeBytes(out.size());
  return Value::String(std::move(out));
}

Value Replace(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("replace", args, {"old", "new", "count"}, 2);
  Args method;
  method.list = {Value::String(Soft(in, *bound[0])), Value::String(Soft(in, *bound[1]))};
  if (bound[2] != nullptr && !bound[2]->is_none()) method.list.push_back(*bound[2]);
  return CallMethod(in, Value::String(Soft(in, v)), "replace", method);
}

Value Center(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("center", args, {"width"});
  const std::string text = Soft(in, v);
  const int64_t width = bound.Int(0, 80);
  const int64_t missing = std::max<int64_t>(width - CharCount(text), 0);
  const int64_t left = missing / 2 + (missing & width & 1);
  return Value::String(Blanks(left) + text + Blanks(missing - left));
}

Value WordCount(Interpreter& in, const Value& v, const Args&) {
  int64_t words = 0;
  bool inside = false;
  const std::string text = Soft(in, v);
  for (size_t at = 0; at < text.size();) {
    uint32_t code;
    at += CharAt(text, at, &code);
    const bool letter = IsAlpha(code) || IsDigit(code) || code == '_';
    words += letter && !inside;
    inside = letter;
  }
  return Value::Int(words);
}

Value Format(Interpreter& in, const Value& v, const Args& args) {
  if (args.named.empty()) return Value::String(PercentFormat(in, Soft(in, v), args.list));
  if (!args.list.empty()) Fail("format takes positional or named values, not both");
  std::vector<std::pair<Value, Value>> items;
  for (const auto& [name, value] : args.named) items.emplace_back(Value::String(name), value);
  return Value::String(PercentFormat(in, Soft(in, v), {MakeDict(in.budget(), std::move(items))}));
}

std::optional<double> ParseFloat(const std::string& text) {
  std::string trimmed(Strip(text, nullptr));
  if (trimmed.empty() || trimmed.find_first_of("xXpP(") != std::string::npos) return std::nullopt;
  trimmed.erase(std::remove(trimmed.begin(), trimmed.end(), '_'), trimmed.end());
  char* end = nullptr;
  const double value = std::strtod(trimmed.c_str(), &end);
  if (end != trimmed.c_str() + trimmed.size()) return std::nullopt;
  return value;
}

Value ToInt(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("int", args, {"default", "base"});
  const Value otherwise = bound[0] == nullptr ? Value::Int(0) : *bound[0];
  NeedDefined(v);
  const int64_t base = bound.Int(1, 10);
  if (base < 2 || base > 36) Fail("int() base must be >= 2 and <= 36");
  if (v.is_integral()) return Value::Int(v.AsInt());
  std::optional<double> real;
  if (v.is_float()) real = v.AsFloat();
  if (v.text() != nullptr) {
    in.budget().ChargeBytes(v.AsString().size());
    if (const auto whole = ParseInteger(v.AsString(), static_cast<int>(base))) return Value::Int(*whole);
    real = ParseFloat(v.AsString());
  }
  if (!real || !(std::fabs(*real) < 9.2e18)) return otherwise;
  return Value::Int(static_cast<int64_t>(*real));
}

Value ToFloat(Interpreter&, const Value& v, const Args& args) {
  const Bound bound("float", args, {"default"});
  NeedDefined(v);
  if (v.is_number()) return Value::Float(v.AsFloat());
  const std::optional<double> real = v.text() == nullptr ? std::nullopt : ParseFloat(v.AsString());
  if (real) return Value::Float(*real);
  return bound[0] == nullptr ? Value::Float(0.0) : *bound[0];
}

const Value& NeedNumber(const char* filter, const Value& v) {
  NeedDefined(v);
  if (!v.is_number()) Fail(std::string(filter) + " of a value of type " + TypeName(v));
  return v;
}

Value Abs(Interpreter&, const Value& v, const Args&) {
  NeedNumber("abs", v);
  if (v.is_float()) return Value::Float(std::fabs(v.AsFloat()));
  return v.AsInt() < 0 ? Negate(v) : Value::Int(v.AsInt());
}

Value Round(Interpreter&, const Value& v, const Args& args) {
  const Bound bound("round", args, {"precision", "method"});
  const int64_t precision = bound.Int(0, 0);
  const std::string method = bound.String(1, "common");
  NeedNumber("round", v);
  if (method != "common" && method != "ceil" && method != "floor") Fail("method must be common, ceil or floor");
  if (precision < -300 || precision > 300) Fail("round to " + std::to_string(precision) + " digits, at most 300");
  if (method != "common") {
    const double scale = std::pow(10.0, static_cast<double>(precision));
    const double scaled = v.AsFloat() * scale;
    return Value::Float((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
  }
  if (!v.is_float() && precision >= 0) return Value::Int(v.AsInt());
  if (precision < 0) {
    const double scale = std::pow(10.0, static_cast<double>(-precision));
    const double rounded = std::nearbyint(v.AsFloat() / scale) * scale;
    return v.is_float() || !(std::fabs(rounded) < 9e18) ? Value::Float(rounded) : Value::Int(static_cast<int64_t>(rounded));
  }
  if (!std::isfinite(v.AsFloat())) return v;
  char digits[700];  // rounds the exact value, half to even, as Python does
  std::snprintf(digits, sizeof digits, "%.*f", static_cast<int>(precision), v.AsFloat());
  return Value::Float(std::strtod(digits, nullptr));
}

Value ToJsonFilter(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = bound.Flag(0, false);
  style.sort_keys = bound.Flag(3, false);
  if (bound[1] != nullptr && !bound[1]->is_none()) {
    style.indent = bound[1]->text() != nullptr ? bound.String(1, "") : Blanks(bound.Int(1, 0));
    style.item_separator = ",";
  }
  if (bound[2] != nullptr && !bound[2]->is_none()) {
    const std::vector<Value> separators = Iterate(in.budget(), *bound[2]);
    if (separators.size() != 2 || separators[0].text() == nullptr || separators[1].text() == nullptr) {
      Fail("tojson: separators must be two strings");
    }
    style.item_separator = separators[0].AsString();
    style.key_separator = separators[1].AsString();
  }
  return Value::String(ToJson(in.budget(), v, style));
}

Value Safe(Interpreter& in, const Value& v, const Args&) { return Value::String(Soft(in, v)); }

}  // namespace

const FilterTable& TextFilters() {
  static const FilterTable kTable = {
      {"trim", Trim}, {"upper", UpperFilter}, {"lower", LowerFilter}, {"capitalize", CapitalizeFilter}, {"title", TitleFilter},
      {"string", StringFilter}, {"e", Escape}, {"escape", Escape}, {"forceescape", Escape}, {"safe", Safe}, {"indent", Indent},
      {"replace", Replace}, {"center", Center}, {"wordcount", WordCount}, {"format", Format}, {"int", ToInt}, {"float", ToFloat},
      {"abs", Abs}, {"round", Round}, {"tojson", ToJsonFilter}};
  return kTable;
}

}  // namespace loupe::jinja
