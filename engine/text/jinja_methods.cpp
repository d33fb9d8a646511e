// Methods of strings, dicts and lists. What would change a value is refused, as Jinja's sandbox does, except append.
#include <algorithm>

#include "engine/text/jinja_interp.h"
#include "engine/text/jinja_text.h"

namespace loupe::jinja {
namespace {

constexpr int64_t kNoLimit = -1;

using Method = Value (*)(Interpreter& in, const Value& self, const Args& args);
using MethodTable = std::unordered_map<std::string, Method>;

class BoundMethod : public Object {
 public:
  BoundMethod(const Value& self, std::string name) : self_(self), name_(std::move(name)) { depth = 1 + DepthOf(self_); }
  const char* TypeName() const override { return "method"; }
  bool callable() const override { return true; }
  Value Call(Interpreter& in, const Args& args) override { return CallMethod(in, self_, name_, args); }

 private:
  Value self_;
  std::string name_;
};

template <bool kLeft, bool kRight>
Value StripMethod(Interpreter&, const Value& self, const Args& args) {
  const Bound bound("strip", args, {"chars"});
  const bool plain = bound[0] == nullptr || bound[0]->is_none();
  const std::string chars = plain ? "" : bound.String(0, "");
  return Value::String(std::string(Strip(self.AsString(), plain ? nullptr : &chars, kLeft, kRight)));
}

// Parts between white space; what is left after `most` cuts stays whole.
std::vector<std::string> SplitBlanks(std::string_view text, int64_t most, bool from_right) {
  std::vector<std::string> parts;
  for (text = Strip(text, nullptr, !from_right, from_right); !text.empty();
       text = Strip(text, nullptr, !from_right, from_right)) {
    if (most == 0) {
      parts.emplace_back(text);
      break;
    }
    --most;
    uint32_t code;
    size_t at = 0, last_blank_end = 0, first_blank = text.size();
    for (size_t length; at < text.size(); at += length) {
      length = CharAt(text, at, &code);
      if (!IsSpace(code)) continue;
      if (!from_right) {
        first_blank = at;
        break;
      }
      last_blank_end = at + length;
    }
    parts.emplace_back(from_right ? text.substr(last_blank_end) : text.substr(0, first_blank));
    text = from_right ? text.substr(0, last_blank_end) : text.substr(first_blank);
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string> SplitAt(std::string_view text, const std::string& separator, int64_t most, bool from_right) {
  std::vector<size_t> cuts;
  std::string_view rest = text;
  for (size_t at = 0; most < 0 || static_cast<int64_t>(cuts.size()) < most;) {
    at = from_right ? FindLastText(rest, separator) : FindText(text, separator, at);
    if (at == std::string::npos) break;
    cuts.push_back(at);
    rest = text.substr(0, at);
    at += separator.size();
  }
  if (from_right) std::reverse(cuts.begin(), cuts.end());
  std::vector<std::string> parts;
  size_t start = 0;
  for (const size_t cut : cuts) {
    parts.emplace_back(text.substr(start, cut - start));
    start = cut + separator.size();
  }
  parts.emplace_back(text.substr(start));
  return parts;
}

template <bool kFromRight>
Value SplitMethod(Interpreter& in, const Value& self, const Args& args) {
  const Bound bound(kFromRight ? "rsplit" : "split", args, {"sep", "maxsplit"});
  const std::string& text = self.AsString();
  const int64_t most = bound.Int(1, kNoLimit);
  const auto size = static_cast<int64_t>(text.size());
  // From the right, each part is looked for from the start of the text.
  if (kFromRight && most > 0) in.budget().Charge(std::min(most, size) * (size / 1024 + 1));
  std::vector<std::string> parts;
  if (bound[0] == nullptr || bound[0]->is_none()) {
    parts = SplitBlanks(text, kFromRight && most < 0 ? kNoLimit : most, kFromRight && most >= 0);
  } else {
    const std::string separator = bound.String(0, "");
    if (separator.empty()) Fail("empty separator");
    parts = SplitAt(text, separator, most, kFromRight && most >= 0);
  }
  std::vector<Value> values;
  for (std::string& part : parts) values.push_back(Value::String(std::move(part)));
  return MakeList(in.budget(), std::move(values));
}

Value SplitLinesMethod(Interpreter& in, const Value& self, const Args& args) {
  const Bound bound("splitlines", args, {"keepends"});
  std::vector<Value> values;
  for (std::string& line : SplitLines(self.AsString(), bound.Flag(0, false))) values.push_back(Value::String(std::move(line)));
  return MakeList(in.budget(), std::move(values));
}

template <bool kStart>
Value AffixMethod(Interpreter& in, const Value& self, const Args& args) {
  const char* name = kStart ? "startswith" : "endswith";
  const Bound bound(name, args, {"prefix", "start", "end"}, 1);
  Value window = self;
  if (bound[1] != nullptr) window = Slice(in, self, {*bound[1], bound[2] == nullptr ? Value::None() : *bound[2], Value::None()});
  const std::string& text = window.AsString();
  const Value& wanted = *bound[0];
  NeedDefined(wanted);
  const bool tuple = wanted.list() != nullptr && wanted.list()->kind == ListKind::kTuple;
  for (const Value& affix : tuple ? wanted.list()->items : std::vector<Value>{wanted}) {
    if (affix.text() == nullptr) Fail(std::string(name) + " first arg must be str or a tuple of str, not " + TypeName(affix));
    const std::string& part = affix.AsString();
    if (part.size() > text.size()) continue;
    if (text.compare(kStart ? 0 : text.size() - part.size(), part.size(), part) == 0) return Value::Bool(true);
  }
  return Value::Bool(false);
}

Value UpperMethod(Interpreter&, const Value& self, const Args&) { return Value::String(Upper(self.AsString())); }
Value LowerMethod(Interpreter&, const Value& self, const Args&) { return Value::String(Lower(self.AsString())); }
Value TitleMethod(Interpreter&, const Value& self, const Args&) { return Value::String(TitleCase(self.AsString())); }
Value CapitalizeMethod(Interpreter&, const Value& self, const Args&) { return Value::String(Capitalize(self.AsString())); }

Value ReplaceMethod(Interpreter& in, const Value& self, const Args& args) {
  const Bound bound("replace", args, {"old", "new", "count"}, 2);
  const std::string& text = self.AsString();
  const std::string from = bound.String(0, ""), to = bound.String(1, "");
  int64_t left = bound.Int(2, kNoLimit);
  std::string out;
  size_t start = 0;
  const auto check = [&] {
    if (static_cast<int64_t>(out.size()) > in.budget().limits().max_output_bytes) in.budget().ChargeBytes(out.size());
  };
  if (from.empty()) {  // before every character and at the end
    const std::vector<size_t> offsets = CharOffsets(text);
    for (size_t i = 0; i < offsets.size() && left != 0; ++i, --left) {
      out.append(text, start, offsets[i] - start).append(to);
      start = offsets[i];
      check();
    }
  } else {
    for (size_t at; left != 0 && (at = FindText(text, from, start)) != std::string::npos; --left) {
      out.append(text, start, at - start).append(to);
      start = at + from.size();
      check();
    }
  }
  out.append(text, start);
  in.budget().ChargeBytes(out.size());
  return Value::String(std::move(out));
}

Value JoinMethod(Interpreter& in, const Value& self, const Args& args) {
  const Bound bound("join", args, {"iterable"}, 1);
  std::string out;
  bool first = true;
  for (const Value& item : Iterate(in.budget(), *bound[0])) {
    if (item.text() == nullptr) Fail("sequence item: expected str instance, " + TypeName(item) + " found");
    if (!first) out += self.AsString();
    first = false;
    out += item.AsString();
    if (static_cast<int64_t>(out.size()) > in.budget().limits().max_output_bytes) in.budget().ChargeBytes(out.size());
  }
  in.budget().ChargeBytes(out.size());
  return Value::String(std::move(out));
}

// find, rfind, index, rindex: in characters.
template <bool kLast, bool kMustExist>
Value FindMethod(Interpreter& in, const Value& self, const Args& args) {
  const Bound bound(kMustExist ? "index" : "find", args, {"sub", "start", "end"}, 1);
  const std::string part = bound.String(0, "");
  const int64_t start = bound.Int(1, 0);
  Value window = self;
  if (bound[1] != nullptr) window = Slice(in, self, {Value::Int(start), bound[2] == nullptr ? Value::None() : *bound[2], Value::None()});
  const std::string& text = window.AsString();
  const size_t at = kLast ? FindLastText(text, part) : FindText(text, part, 0);
  if (at == std::string::npos || (start > 0 && start > Length(in.budget(), self))) {
    if (kMustExist) Fail("substring not found");
    return Value::Int(-1);
  }
  const int64_t skipped = bound[1] == nullptr ? 0 : start >= 0 ? start : std::max<int64_t>(start + Length(in.budget(), self), 0);
  return Value::Int(skipped + CharCount(std::string_view(text).substr(0, at)));
}

Value CountMethod(Interpreter&, const Value& self, const Args& args) {
  const Bound bound("count", args, {"sub"}, 1);
  const std::string part = bound.String(0, "");
  const std::string& text = self.AsString();
  if (part.empty()) return Value::Int(CharCount(text) + 1);
  int64_t count = 0;
  for (size_t at = FindText(text, part, 0); at != std::string::npos; at = FindText(text, part, at + part.size())) ++count;
  return Value::Int(count);
}

template <bool (*kIs)(uint32_t), bool (*kOr)(uint32_t)>
Value EveryMethod(Interpreter&, const Value& self, const Args&) {
  const std::string& text = self.AsString();
  for (size_t at = 0; at < text.size();) {
    uint32_t code;
    at += CharAt(text, at, &code);
    if (!kIs(code) && !kOr(code)) return Value::Bool(false);
  }
  return Value::Bool(!text.empty());
}

template <bool kUpper>
Value CasedMethod(Interpreter& in, const Value& self, const Args&) {
  return Value::Bool(FindTest(kUpper ? "upper" : "lower")(in, self, Args()));
}

template <bool kPrefix>
Value RemoveAffixMethod(Interpreter&, const Value& self, const Args& args) {
  const Bound bound(kPrefix ? "removeprefix" : "removesuffix", args, {"affix"}, 1);
  const std::string& text = self.AsString();
  const std::string part = bound.String(0, "");
  if (part.size() > text.size() || text.compare(kPrefix ? 0 : text.size() - part.size(), part.size(), part) != 0) return self;
  return Value::String(kPrefix ? text.substr(part.size()) : text.substr(0, text.size() - part.size()));
}

// str.format with {}, {0} and {name}, without format specifications.
Value FormatMethod(Interpreter& in, const Value& self, const Args& args) {
  const std::string& format = self.AsString();
  std::string out;
  size_t next = 0;
  for (size_t at = 0; at < format.size(); ++at) {
    const char c = format[at];
    if ((c == '{' || c == '}') && at + 1 < format.size() && format[at + 1] == c) {
      out += format[at++];
    } else if (c == '}') {
      Fail("single '}' in a format string");
    } else if (c != '{') {
      out += c;
    } else {
      const size_t close = format.find('}', at);
      if (close == std::string::npos) Fail("'{' without '}' in a format string");
      const std::string field = format.substr(at + 1, close - at - 1);
      if (field.find_first_of(":!.[") != std::string::npos) Fail("format field '{" + field + "}' is not supported");
      const auto index = field.empty() ? std::optional<int64_t>(static_cast<int64_t>(next++)) : ParseInteger(field, 10);
      const auto named = std::find_if(args.named.begin(), args.named.end(), [&](const auto& n) { return n.first == field; });
      if (index && *index >= 0 && *index < static_cast<int64_t>(args.list.size())) {
        out += Str(in.budget(), args.list[static_cast<size_t>(*index)]);
      } else if (!index && named != args.named.end()) {
        out += Str(in.budget(), named->second);
      } else {
        Fail("no value for format field '{" + field + "}'");
      }
      at = close;
    }
    if (static_cast<int64_t>(out.size()) > in.budget().limits().max_output_bytes) in.budget().ChargeBytes(out.size());
  }
  in.budget().ChargeBytes(out.size());
  return Value::String(std::move(out));
}

Value GetMethod(Interpreter&, const Value& self, const Args& args) {
  const Bound bound("get", args, {"key", "default"}, 1);
  const Value* value = self.dict()->Find(*bound[0]);
  return value != nullptr ? *value : bound[1] != nullptr ? *bound[1] : Value::None();
}

template <bool kKeys, bool kValues>
Value ViewMethod(Interpreter& in, const Value& self, const Args&) {
  std::vector<Value> out;
  in.budget().ChargeItems(self.dict()->items.size());
  for (const auto& [key, value] : self.dict()->items) {
    out.push_back(kKeys && kValues ? MakeList(in.budget(), {key, value}, ListKind::kTuple) : kKeys ? key : value);
  }
  return MakeList(in.budget(), std::move(out), ListKind::kView);
}

Value CopyMethod(Interpreter&, const Value& self, const Args&) { return self; }

Value AppendMethod(Interpreter& in, const Value& self, const Args& args) {
  const Bound bound("append", args, {"object"}, 1);
  in.Append(std::get<std::shared_ptr<List>>(self.data()), *bound[0]);
  return Value::None();
}

template <bool kCount>
Value ListFindMethod(Interpreter& in, const Value& self, const Args& args) {
  const Bound bound(kCount ? "count" : "index", args, {"value"}, 1);
  int64_t count = 0;
  const std::vector<Value>& items = self.list()->items;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!Equal(in.budget(), items[i], *bound[0])) continue;
    if (!kCount) return Value::Int(static_cast<int64_t>(i));
    ++count;
  }
  if (!kCount) Fail("the value is not in the list");
  return Value::Int(count);
}

Value Refused(Interpreter&, const Value& self, const Args&) { Fail("a template may not change a '" + TypeName(self) + "' object"); }

const MethodTable& StringMethods() {
  static const MethodTable kTable = {
      {"strip", StripMethod<true, true>}, {"lstrip", StripMethod<true, false>}, {"rstrip", StripMethod<false, true>},
      {"split", SplitMethod<false>}, {"rsplit", SplitMethod<true>}, {"splitlines", SplitLinesMethod}, {"startswith", AffixMethod<true>},
      {"endswith", AffixMethod<false>}, {"upper", UpperMethod}, {"lower", LowerMethod}, {"title", TitleMethod},
      {"capitalize", CapitalizeMethod}, {"replace", ReplaceMethod}, {"join", JoinMethod}, {"find", FindMethod<false, false>},
      {"rfind", FindMethod<true, false>}, {"index", FindMethod<false, true>}, {"rindex", FindMethod<true, true>},
      {"count", CountMethod}, {"isdigit", EveryMethod<IsDigit, IsDigit>}, {"isalpha", EveryMethod<IsAlpha, IsAlpha>},
      {"isalnum", EveryMethod<IsAlpha, IsDigit>}, {"isspace", EveryMethod<IsSpace, IsSpace>}, {"isupper", CasedMethod<true>},
      {"islower", CasedMethod<false>}, {"removeprefix", RemoveAffixMethod<true>}, {"removesuffix", RemoveAffixMethod<false>},
      {"format", FormatMethod}};
  return kTable;
}

const MethodTable& DictMethods() {
  static const MethodTable kTable = {
      {"get", GetMethod}, {"items", ViewMethod<true, true>}, {"keys", ViewMethod<true, false>}, {"values", ViewMethod<false, true>},
      {"copy", CopyMethod}, {"update", Refused}, {"pop", Refused}, {"popitem", Refused}, {"clear", Refused}, {"setdefault", Refused}};
  return kTable;
}

const MethodTable& ListMethods() {
  static const MethodTable kTable = {
      {"append", AppendMethod}, {"index", ListFindMethod<false>}, {"count", ListFindMethod<true>}, {"extend", Refused},
      {"insert", Refused}, {"pop", Refused}, {"remove", Refused}, {"reverse", Refused}, {"sort", Refused}, {"clear", Refused}};
  return kTable;
}

Method FindMethodOf(const Value& value, const std::string& name) {
  const List* list = value.list();
  const MethodTable* table = value.text() != nullptr   ? &StringMethods()
                             : value.dict() != nullptr ? &DictMethods()
                             : list != nullptr && list->kind == ListKind::kList ? &ListMethods()
                                                                                : nullptr;
  if (table == nullptr) return nullptr;
  const auto found = table->find(name);
  return found == table->end() ? nullptr : found->second;
}

}  // namespace

bool HasMethod(const Value& value, const std::string& name) { return FindMethodOf(value, name) != nullptr; }

Value CallMethod(Interpreter& in, const Value& value, const std::string& name, const Args& args) {
  const Method method = FindMethodOf(value, name);
  if (method == nullptr) Fail("'" + TypeName(value) + "' object has no method '" + name + "'");
  if (value.text() != nullptr) in.budget().ChargeBytes(value.AsString().size());
  return method(in, value, args);
}

Value BindMethod(const Value& value, const std::string& name) {
  return Value::Of(std::static_pointer_cast<Object>(std::make_shared<BoundMethod>(value, name)));
}

}  // namespace loupe::jinja
