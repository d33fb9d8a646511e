// Filters on lists and dicts, and those that work on anything.
#include <algorithm>
#include <unordered_set>

#include "engine/text/jinja_filters.h"
#include "engine/text/jinja_text.h"

namespace loupe::jinja {
namespace {

Value Lazy(Interpreter& in, std::vector<Value> items) { return MakeList(in.budget(), std::move(items), ListKind::kIterator); }

// "a.0.b" as a way through items; an integer is one step.
class Getter {
 public:
  Getter(const Value* attribute, const Value* otherwise) {
    if (otherwise != nullptr && !otherwise->is_none()) otherwise_ = *otherwise;
    if (attribute == nullptr || attribute->is_none()) return;
    any_ = true;
    if (attribute->text() == nullptr) {
      steps_ = {*attribute};
      return;
    }
    const std::string& path = attribute->AsString();
    for (size_t start = 0; start <= path.size();) {
      const size_t dot = std::min(path.find('.', start), path.size());
      const std::string part = path.substr(start, dot - start);
      const bool number = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
      steps_.push_back(number ? Value::Int(std::stoll(part)) : Value::String(part));
      start = dot + 1;
    }
  }
  bool any() const { return any_; }
  Value operator()(Interpreter& in, Value value) const {
    for (const Value& step : steps_) {
      in.budget().Charge();
      value = in.Item(value, step);
      if (value.is_undefined() && otherwise_) value = *otherwise_;
    }
    return value;
  }

 private:
  bool any_ = false;
  std::vector<Value> steps_;
  std::optional<Value> otherwise_;
};

// What sort and the like compare: the attribute, letters without case.
Value SortKey(Interpreter& in, const Getter& getter, bool case_sensitive, const Value& item) {
  Value key = getter(in, item);
  if (case_sensitive || key.text() == nullptr) return key;
  in.budget().ChargeBytes(key.AsString().size());
  return Value::String(Lower(key.AsString()));
}

struct Keyed {
  Value key, item;
};

void SortByKey(Interpreter& in, std::vector<Keyed>* items, bool reverse) {
  std::stable_sort(items->begin(), items->end(), [&](const Keyed& a, const Keyed& b) {
    return reverse ? Compare(in.budget(), b.key, a.key) < 0 : Compare(in.budget(), a.key, b.key) < 0;
  });
}

Value Default(Interpreter&, const Value& v, const Args& args) {
  const Bound bound("default", args, {"default_value", "boolean"});
  if (!v.is_undefined() && !(bound.Flag(1, false) && !Truthy(v))) return v;
  return bound[0] == nullptr ? Value::String("") : *bound[0];
}

Value LengthFilter(Interpreter& in, const Value& v, const Args&) { return Value::Int(Length(in.budget(), v)); }
Value ListFilter(Interpreter& in, const Value& v, const Args&) { return MakeList(in.budget(), Iterate(in.budget(), v)); }

Value First(Interpreter& in, const Value& v, const Args&) {
  if (List* list = v.list(); list != nullptr && list->kind == ListKind::kIterator && list->taken < list->items.size()) {
    return list->items[list->taken++];
  }
  std::vector<Value> items = Iterate(in.budget(), v);
  return items.empty() ? Value::Undefined("no first item, sequence was empty") : items.front();
}

Value Last(Interpreter& in, const Value& v, const Args&) {
  if (v.list() != nullptr && v.list()->kind == ListKind::kIterator) Fail("'generator' object is not reversible");
  std::vector<Value> items = Iterate(in.budget(), v);
  return items.empty() ? Value::Undefined("no last item, sequence was empty") : items.back();
}

Value Reverse(Interpreter& in, const Value& v, const Args&) {
  std::vector<Value> items = Iterate(in.budget(), v);
  std::reverse(items.begin(), items.end());
  if (v.text() == nullptr) return Lazy(in, std::move(items));
  std::string text;
  for (const Value& item : items) text += item.AsString();
  return Value::String(std::move(text));
}

Value Join(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("join", args, {"d", "attribute"});
  const std::string separator = bound[0] == nullptr ? "" : Str(in.budget(), *bound[0]);
  const Getter getter(bound[1], nullptr);
  std::string text;
  bool first = true;
  for (const Value& item : Iterate(in.budget(), v)) {
    if (!first) text += separator;
    first = false;
    text += Str(in.budget(), getter(in, item));
    if (static_cast<int64_t>(text.size()) > in.budget().limits().max_output_bytes) in.budget().ChargeBytes(text.size());
  }
  in.budget().ChargeBytes(text.size());
  return Value::String(std::move(text));
}

Value Items(Interpreter& in, const Value& v, const Args&) {
  if (v.is_undefined()) return Lazy(in, {});
  if (v.dict() == nullptr) Fail("Can only get item pairs from a mapping.");
  return Lazy(in, Iterate(in.budget(), CallMethod(in, v, "items", {})));
}

Value DictSort(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string by = bound.String(1, "key");
  if (by != "key" && by != "value") Fail("dictsort sorts by \"key\" or \"value\"");
  NeedDefined(v);
  if (v.dict() == nullptr) Fail("dictsort of a value of type " + TypeName(v));
  const Getter itself(nullptr, nullptr);
  std::vector<Keyed> pairs;
  for (const auto& [key, value] : v.dict()->items) {
    pairs.push_back({SortKey(in, itself, bound.Flag(0, false), by == "key" ? key : value),
                     MakeList(in.budget(), {key, value}, ListKind::kTuple)});
  }
  SortByKey(in, &pairs, bound.Flag(2, false));
  std::vector<Value> sorted;
  for (Keyed& pair : pairs) sorted.push_back(std::move(pair.item));
  return MakeList(in.budget(), std::move(sorted));
}

Value Sort(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("sort", args, {"reverse", "case_sensitive", "attribute"});
  std::vector<Getter> getters;
  if (bound[2] != nullptr && bound[2]->text() != nullptr && bound[2]->AsString().find(',') != std::string::npos) {
    const std::string& names = bound[2]->AsString();
    for (size_t start = 0; start <= names.size();) {
      const size_t comma = std::min(names.find(',', start), names.size());
      const Value name = Value::String(names.substr(start, comma - start));
      getters.emplace_back(&name, nullptr);
      start = comma + 1;
    }
  } else {
    getters.emplace_back(bound[2], nullptr);
  }
  std::vector<Keyed> items;
  for (const Value& item : Iterate(in.budget(), v)) {
    std::vector<Value> keys;
    for (const Getter& getter : getters) keys.push_back(SortKey(in, getter, bound.Flag(1, false), item));
    items.push_back({keys.size() == 1 ? keys[0] : MakeList(in.budget(), std::move(keys)), item});
  }
  SortByKey(in, &items, bound.Flag(0, false));
  std::vector<Value> sorted;
  for (Keyed& item : items) sorted.push_back(std::move(item.item));
  return MakeList(in.budget(), std::move(sorted));
}

Value Unique(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("unique", args, {"case_sensitive", "attribute"});
  const Getter getter(bound[1], nullptr);
  std::unordered_set<std::string> seen;
  std::vector<Value> out;
  for (const Value& item : Iterate(in.budget(), v)) {
    if (seen.insert(HashKey(SortKey(in, getter, bound.Flag(0, false), item))).second) out.push_back(item);
  }
  return Lazy(in, std::move(out));
}

template <int kSign>
Value Extreme(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound(kSign > 0 ? "max" : "min", args, {"case_sensitive", "attribute"});
  const Getter getter(bound[1], nullptr);
  std::optional<Keyed> best;
  for (const Value& item : Iterate(in.budget(), v)) {
    Keyed next{SortKey(in, getter, bound.Flag(0, false), item), item};
    if (!best || kSign * Compare(in.budget(), next.key, best->key) > 0) best = std::move(next);
  }
  return best ? best->item : Value::Undefined("no aggregated item, sequence was empty");
}

Value Sum(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("sum", args, {"attribute", "start"});
  const Getter getter(bound[0], nullptr);
  Value total = bound[1] == nullptr ? Value::Int(0) : *bound[1];
  for (const Value& item : Iterate(in.budget(), v)) total = BinaryOperation(in, "+", total, getter(in, item));
  return total;
}

Value Map(Interpreter& in, const Value& v, const Args& args) {
  std::vector<Value> out;
  if (args.list.empty() && !args.named.empty()) {
    const Bound bound("map", args, {"attribute", "default"}, 1);
    const Getter getter(bound[0], bound[1]);
    for (const Value& item : Iterate(in.budget(), v)) out.push_back(getter(in, item));
    return Lazy(in, std::move(out));
  }
  if (args.list.empty() || args.list[0].text() == nullptr) Fail("map requires a filter argument");
  const std::string& name = args.list[0].AsString();
  const FilterFunction filter = FindFilter(name);
  if (filter == nullptr) Fail("no filter named '" + name + "'");
  const Interpreter::Frame frame(in);  // map('map', 'map', ...) recurses
  Args rest;
  rest.list.assign(args.list.begin() + 1, args.list.end());
  rest.named = args.named;
  for (const Value& item : Iterate(in.budget(), v)) {
    in.budget().Charge();
    out.push_back(filter(in, item, rest));
  }
  return Lazy(in, std::move(out));
}

// select, reject, selectattr, rejectattr: [attribute,] test name and its arguments, or simply what is true.
Value Choose(Interpreter& in, const Value& v, const Args& args, bool by_attribute, bool wanted) {
  const size_t skip = by_attribute ? 1 : 0;
  if (args.list.size() < skip) Fail("missing parameter for attribute name");
  const Getter getter(by_attribute ? &args.list[0] : nullptr, nullptr);
  TestFunction test = nullptr;
  Args rest;
  if (args.list.size() > skip) {
    if (args.list[skip].text() == nullptr) Fail("the name of a test must be a string");
    test = FindTest(args.list[skip].AsString());
    if (test == nullptr) Fail("no test named '" + args.list[skip].AsString() + "'");
    rest.list.assign(args.list.begin() + static_cast<int64_t>(skip) + 1, args.list.end());
    rest.named = args.named;
  }
  std::vector<Value> out;
  for (Value& item : Iterate(in.budget(), v)) {
    in.budget().Charge();
    const Value tested = getter(in, item);
    const bool holds = test == nullptr ? Truthy(tested) : test(in, tested, rest);
    if (holds == wanted) out.push_back(std::move(item));
  }
  return Lazy(in, std::move(out));
}

Value Select(Interpreter& in, const Value& v, const Args& args) { return Choose(in, v, args, false, true); }
Value Reject(Interpreter& in, const Value& v, const Args& args) { return Choose(in, v, args, false, false); }
Value SelectAttr(Interpreter& in, const Value& v, const Args& args) { return Choose(in, v, args, true, true); }
Value RejectAttr(Interpreter& in, const Value& v, const Args& args) { return Choose(in, v, args, true, false); }

Value Batch(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("batch", args, {"linecount", "fill_with"}, 1);
  const int64_t size = bound.Int(0, 1);
  if (size < 1) Fail("batch takes a positive number of items, not " + std::to_string(size));
  std::vector<Value> batches, batch;
  for (Value& item : Iterate(in.budget(), v)) {
    if (static_cast<int64_t>(batch.size()) == size) batches.push_back(MakeList(in.budget(), std::exchange(batch, {})));
    batch.push_back(std::move(item));
  }
  if (!batch.empty() && bound[1] != nullptr && !bound[1]->is_none()) {
    in.budget().ChargeItems(static_cast<uint64_t>(size));
    batch.resize(static_cast<size_t>(size), *bound[1]);
  }
  if (!batch.empty()) batches.push_back(MakeList(in.budget(), std::move(batch)));
  return Lazy(in, std::move(batches));
}

Value Attr(Interpreter& in, const Value& v, const Args& args) {
  const Bound bound("attr", args, {"name"}, 1);
  const std::string name = bound.String(0, "");
  NeedDefined(v);
  if (v.dict() != nullptr && !HasMethod(v, name)) return Value::Undefined("'dict object' has no attribute '" + name + "'");
  return in.Attribute(v, name);
}

}  // namespace

const FilterTable& ListFilters() {
  static const FilterTable kTable = {
      {"default", Default}, {"d", Default}, {"length", LengthFilter}, {"count", LengthFilter}, {"list", ListFilter}, {"first", First},
      {"last", Last}, {"reverse", Reverse}, {"join", Join}, {"items", Items}, {"dictsort", DictSort}, {"sort", Sort},
      {"unique", Unique}, {"min", Extreme<-1>}, {"max", Extreme<1>}, {"sum", Sum}, {"map", Map}, {"select", Select},
      {"reject", Reject}, {"selectattr", SelectAttr}, {"rejectattr", RejectAttr}, {"batch", Batch}, {"attr", Attr}};
  return kTable;
}

FilterFunction FindFilter(const std::string& name) {
  for (const FilterTable* table : {&TextFilters(), &ListFilters()}) {
    const auto found = table->find(name);
    if (found != table->end()) return found->second;
  }
  return nullptr;
}

}  // namespace loupe::jinja
