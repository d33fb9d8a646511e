// How values look as text: Python's str() and repr(), and json.dumps().
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "engine/text/jinja_text.h"
#include "engine/text/jinja_value.h"

namespace loupe::jinja {
namespace {

constexpr uint32_t kReplacement = 0xFFFD;

void AppendEscape(const char* format, uint32_t code, std::string* out) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, format, code);
  *out += buffer;
}

void AppendPythonEscape(uint32_t code, std::string* out) {
  AppendEscape(code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x", code, out);
}

std::string QuotePython(const std::string& text) {
  const bool use_double = text.find('\'') != std::string::npos && text.find('"') == std::string::npos;
  const char quote = use_double ? '"' : '\'';
  std::string out(1, quote);
  for (size_t at = 0; at < text.size();) {
    uint32_t code;
    const size_t length = CharAt(text, at, &code);
    const char c = text[at];
    if (c == quote || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += {'\\', c == '\n' ? 'n' : c == '\r' ? 'r' : 't'};
    } else if (IsPrintable(code)) {
      out.append(text, at, length);
    } else {
      AppendPythonEscape(code, &out);
    }
    at += length;
  }
  return out + quote;
}

void AppendJsonUnicode(uint32_t code, std::string* out) {
  if (code >= 0x10000) {
    AppendEscape("\\u%04x", 0xD800 + ((code - 0x10000) >> 10), out);
    code = 0xDC00 + ((code - 0x10000) & 0x3FF);
  }
  AppendEscape("\\u%04x", code, out);
}

std::string QuoteJson(const std::string& text, bool ensure_ascii) {
  std::string out = "\"";
  for (size_t at = 0; at < text.size();) {
    uint32_t code;
    const size_t length = CharAt(text, at, &code);
    switch (code) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\b': out += "\\b"; break;
      case '\f': out += "\\f"; break;
      default:
        if (code < 0x20 || (ensure_ascii && code > 0x7E)) {
          AppendJsonUnicode(code, &out);
        } else if (code == kReplacement) {
          AppendUtf8(code, &out);  // so that stray bytes do not break the JSON
        } else {
          out.append(text, at, length);
        }
    }
    at += length;
  }
  return out + "\"";
}

// Walks a value once and appends to one string; the budget ends what grows without end.
class Printer {
 public:
  explicit Printer(Budget& budget) : budget_(budget) {}
  void Repr(const Value& value, int depth);
  std::string Take() {
    budget_.ChargeBytes(out_.size());
    return std::move(out_);
  }

 private:
  void Add(std::string_view text) {
    out_ += text;
    if (static_cast<int64_t>(out_.size()) > budget_.limits().max_output_bytes) budget_.ChargeBytes(out_.size());
  }
  void ReprList(const List& list, int depth);
  void ReprDict(const Dict& dict, int depth);

  Budget& budget_;
  std::string out_;
};

void Printer::ReprList(const List& list, int depth) {
  if (list.kind == ListKind::kIterator) return Add("<generator object>");
  if (list.kind == ListKind::kView) Add("dict_view(");
  const bool tuple = list.kind == ListKind::kTuple;
  Add(tuple ? "(" : "[");
  for (size_t i = 0; i < list.items.size(); ++i) {
    if (i > 0) Add(", ");
    Repr(list.items[i], depth + 1);
  }
  Add(tuple ? (list.items.size() == 1 ? ",)" : ")") : "]");
  if (list.kind == ListKind::kView) Add(")");
}

void Printer::ReprDict(const Dict& dict, int depth) {
  Add("{");
  bool first = true;
  for (const auto& [key, value] : dict.items) {
    if (!first) Add(", ");
    first = false;
    Repr(key, depth + 1);
    Add(": ");
    Repr(value, depth + 1);
  }
  Add("}");
}

void Printer::Repr(const Value& value, int depth) {
  budget_.Charge();
  budget_.CheckDepth(depth);
  if (value.is_undefined()) return Add("Undefined");
  if (value.is_none()) return Add("None");
  if (value.is_bool()) return Add(value.AsBool() ? "True" : "False");
  if (value.is_int()) return Add(std::to_string(value.AsInt()));
  if (value.is_float()) return Add(FloatRepr(value.AsFloat()));
  if (value.text() != nullptr) return Add(QuotePython(value.AsString()));
  if (const List* list = value.list()) return ReprList(*list, depth);
  if (const Dict* dict = value.dict()) return ReprDict(*dict, depth);
  Add(std::string("<") + value.object()->TypeName() + ">");
}

class JsonPrinter {
 public:
  JsonPrinter(Budget& budget, const JsonStyle& style) : budget_(budget), style_(style) {}
  void Print(const Value& value, int depth);
  std::string Take() {
    budget_.ChargeBytes(out_.size());
    return std::move(out_);
  }

 private:
  void Add(std::string_view text) {
    out_ += text;
    if (static_cast<int64_t>(out_.size()) > budget_.limits().max_output_bytes) budget_.ChargeBytes(out_.size());
  }
  void NewLine(int depth) {
    if (!style_.indent) return;
    Add("\n");
    for (int i = 0; i < depth; ++i) Add(*style_.indent);
  }
  void PrintList(const List& list, int depth);
  void PrintDict(const Dict& dict, int depth);
  std::string Key(const Value& key) const;

  Budget& budget_;
  const JsonStyle& style_;
  std::string out_;
};

std::string JsonNumber(const Value& value) {
  if (!value.is_float()) return std::to_string(value.AsInt());
  const double d = value.AsFloat();
  if (std::isnan(d)) return "NaN";
  if (std::isinf(d)) return d > 0 ? "Infinity" : "-Infinity";
  return FloatRepr(d);
}

std::string JsonPrinter::Key(const Value& key) const {
  if (key.text() != nullptr) return QuoteJson(key.AsString(), style_.ensure_ascii);
  if (key.is_none()) return "\"null\"";
  if (key.is_bool()) return key.AsBool() ? "\"true\"" : "\"false\"";
  if (key.is_number()) return "\"" + JsonNumber(key) + "\"";
  Fail("keys must be str, int, float, bool or None, not " + TypeName(key));
}

void JsonPrinter::PrintList(const List& list, int depth) {
  if (list.items.empty()) return Add("[]");
  Add("[");
  for (size_t i = 0; i < list.items.size(); ++i) {
    if (i > 0) Add(style_.item_separator);
    NewLine(depth + 1);
    Print(list.items[i], depth + 1);
  }
  NewLine(depth);
  Add("]");
}

void JsonPrinter::PrintDict(const Dict& dict, int depth) {
  if (dict.items.empty()) return Add("{}");
  std::vector<const std::pair<Value, Value>*> items;
  for (const auto& item : dict.items) items.push_back(&item);
  if (style_.sort_keys) {
    std::stable_sort(items.begin(), items.end(), [&](const auto* a, const auto* b) { return Compare(budget_, a->first, b->first) < 0; });
  }
  Add("{");
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) Add(style_.item_separator);
    NewLine(depth + 1);
    Add(Key(items[i]->first));
    Add(style_.key_separator);
    Print(items[i]->second, depth + 1);
  }
  NewLine(depth);
  Add("}");
}

void JsonPrinter::Print(const Value& value, int depth) {
  budget_.Charge();
  budget_.CheckDepth(depth);
  if (value.is_none()) return Add("null");
  if (value.is_bool()) return Add(value.AsBool() ? "true" : "false");
  if (value.is_number()) return Add(JsonNumber(value));
  if (value.text() != nullptr) return Add(QuoteJson(value.AsString(), style_.ensure_ascii));
  if (const Dict* dict = value.dict()) return PrintDict(*dict, depth);
  const List* list = value.list();
  if (list != nullptr && list->kind <= ListKind::kTuple) return PrintList(*list, depth);
  Fail("Object of type " + TypeName(value) + " is not JSON serializable");
}

}  // namespace

std::string FloatRepr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  std::string digits(buffer, end);
  const size_t e = digits.find('e');
  const int exponent = std::stoi(digits.substr(e + 1));
  digits.resize(e);
  const std::string sign = digits[0] == '-' ? "-" : "";
  digits.erase(std::remove_if(digits.begin(), digits.end(), [](char c) { return c == '-' || c == '.'; }), digits.end());
  if (exponent >= -4 && exponent < 16) {
    if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
    const auto whole = static_cast<size_t>(exponent) + 1;
    if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0') + ".0";
    return sign + digits.substr(0, whole) + "." + digits.substr(whole);
  }
  std::snprintf(buffer, sizeof buffer, "e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
  return sign + digits.substr(0, 1) + (digits.size() > 1 ? "." + digits.substr(1) : "") + buffer;
}

std::string Str(Budget& budget, const Value& value) {
  if (value.text() != nullptr) {
    budget.ChargeBytes(value.AsString().size());
    return value.AsString();
  }
  if (value.is_undefined()) return "";
  return Repr(budget, value);
}

std::string Repr(Budget& budget, const Value& value) {
  Printer printer(budget);
  printer.Repr(value, 0);
  return printer.Take();
}

std::string ToJson(Budget& budget, const Value& value, const JsonStyle& style) {
  JsonPrinter printer(budget, style);
  printer.Print(value, 0);
  return printer.Take();
}

}  // namespace loupe::jinja
