#include "engine/text/jinja_value.h"

#include <algorithm>
#include <cmath>

#include "engine/text/jinja_text.h"

namespace loupe::jinja {
namespace {

constexpr int64_t kBytesPerStep = 1024;
constexpr int64_t kItemsPerStep = 16;
constexpr size_t kLongestTupleKey = 1 << 16;
constexpr size_t kIndexedDictSize = 8;  // larger dicts are found through their index

// 1 == 1.0 == True, as dict keys too.
std::string NumberKey(const Value& value) {
  if (!value.is_float()) return "i" + std::to_string(value.AsInt());
  const double d = value.AsFloat();
  if (std::trunc(d) == d && std::fabs(d) < 9e18) return "i" + std::to_string(static_cast<int64_t>(d));
  return "f" + FloatRepr(d);
}

int CompareNumbers(const Value& a, const Value& b) {
  if (!a.is_float() && !b.is_float()) return a.AsInt() < b.AsInt() ? -1 : a.AsInt() > b.AsInt();
  return a.AsFloat() < b.AsFloat() ? -1 : a.AsFloat() > b.AsFloat();
}

bool EqualLists(Budget& budget, const List& a, const List& b, int depth) {
  if (a.kind != b.kind || a.items.size() != b.items.size()) return false;
  for (size_t i = 0; i < a.items.size(); ++i) {
    if (!Equal(budget, a.items[i], b.items[i], depth + 1)) return false;
  }
  return true;
}

bool EqualDicts(Budget& budget, const Dict& a, const Dict& b, int depth) {
  if (a.items.size() != b.items.size()) return false;
  for (const auto& [key, value] : a.items) {
    const Value* other = b.Find(key);
    if (other == nullptr || !Equal(budget, value, *other, depth + 1)) return false;
  }
  return true;
}

}  // namespace

void Fail(const std::string& message) { throw Error(ErrorKind::kFailed, message); }

void Budget::Charge(int64_t steps) {
  used_ += steps;
  if (used_ > limits_.max_steps) {
    throw Error(ErrorKind::kLimit, "the template takes more than " + std::to_string(limits_.max_steps) + " steps");
  }
}

void Budget::ChargeBytes(uint64_t bytes) {
  if (bytes > static_cast<uint64_t>(limits_.max_output_bytes)) {
    throw Error(ErrorKind::kLimit, "a string of " + std::to_string(bytes) + " bytes, at most " +
                                       std::to_string(limits_.max_output_bytes) + " are allowed");
  }
  Charge(static_cast<int64_t>(bytes) / kBytesPerStep);
}

void Budget::ChargeItems(uint64_t items) {
  const int64_t most = limits_.max_output_bytes / static_cast<int64_t>(sizeof(Value));
  if (items > static_cast<uint64_t>(most)) {
    throw Error(ErrorKind::kLimit, "a list of " + std::to_string(items) + " items, at most " + std::to_string(most) + " are allowed");
  }
  Charge(static_cast<int64_t>(items) / kItemsPerStep);
}

void Budget::CheckDepth(int depth) const {
  if (depth > limits_.max_depth) {
    throw Error(ErrorKind::kLimit, "nested more than " + std::to_string(limits_.max_depth) + " deep");
  }
}

Value Value::Undefined(const std::string& why) {
  return Value(UndefinedData{std::make_shared<const std::string>(why)});
}

Value Value::String(std::string bytes) {
  const bool ascii = IsAscii(bytes);
  return Value(std::make_shared<const Text>(Text{std::move(bytes), ascii}));
}

size_t Dict::Place(std::string_view key) const {
  if (!index.empty()) {
    const auto found = index.find("s" + std::string(key));
    return found == index.end() ? items.size() : found->second;
  }
  return static_cast<size_t>(std::find_if(items.begin(), items.end(), [key](const auto& item) {
                               return item.first.text() != nullptr && item.first.AsString() == key;
                             }) - items.begin());
}

size_t Dict::Place(const Value& key) const {
  if (key.text() != nullptr) return Place(std::string_view(key.AsString()));
  const std::string wanted = HashKey(key);
  if (!index.empty()) {
    const auto found = index.find(wanted);
    return found == index.end() ? items.size() : found->second;
  }
  return static_cast<size_t>(std::find_if(items.begin(), items.end(), [&wanted](const auto& item) {
                               return HashKey(item.first) == wanted;
                             }) - items.begin());
}

const Value* Dict::Find(std::string_view key) const {
  const size_t place = Place(key);
  return place == items.size() ? nullptr : &items[place].second;
}

const Value* Dict::Find(const Value& key) const {
  const size_t place = Place(key);
  return place == items.size() ? nullptr : &items[place].second;
}

void Dict::Set(const Value& key, Value value) {
  const size_t place = Place(key);
  if (place < items.size()) {
    items[place].second = std::move(value);
    return;
  }
  items.emplace_back(key, std::move(value));
  if (!index.empty()) {
    index.emplace(HashKey(key), items.size() - 1);
  } else if (items.size() > kIndexedDictSize) {
    for (size_t i = 0; i < items.size(); ++i) index.emplace(HashKey(items[i].first), i);
  }
}

Value Object::Call(Interpreter&, const Args&) { Fail(std::string("'") + TypeName() + "' object is not callable"); }

std::optional<Value> Namespace::Attribute(const std::string& name) const {
  const auto found = attributes.find(name);
  if (found == attributes.end()) return std::nullopt;
  return found->second;
}

int DepthOf(const Value& value) {
  if (const List* list = value.list()) return list->kept ? 1 : list->depth;
  if (const Dict* dict = value.dict()) return dict->depth;
  return value.object() == nullptr ? 0 : value.object()->depth;
}

Value MakeList(Budget& budget, std::vector<Value> items, ListKind kind) {
  budget.ChargeItems(items.size());
  auto list = std::make_shared<List>();
  for (const Value& item : items) list->depth = std::max(list->depth, 1 + DepthOf(item));
  budget.CheckDepth(list->depth);
  list->kind = kind;
  list->items = std::move(items);
  return Value::Of(std::move(list));
}

Value MakeDict(Budget& budget, std::vector<std::pair<Value, Value>> items) {
  budget.ChargeItems(2 * items.size());
  auto dict = std::make_shared<Dict>();
  for (auto& [key, value] : items) {
    dict->depth = std::max({dict->depth, 1 + DepthOf(value), 1 + DepthOf(key)});
    HashKey(key);  // refuses what cannot be a key
    dict->Set(key, std::move(value));
  }
  budget.CheckDepth(dict->depth);
  return Value::Of(std::shared_ptr<const Dict>(std::move(dict)));
}

std::string TypeName(const Value& value) {
  if (value.is_undefined()) return "Undefined";
  if (value.is_none()) return "NoneType";
  if (value.is_bool()) return "bool";
  if (value.is_int()) return "int";
  if (value.is_float()) return "float";
  if (value.text() != nullptr) return "str";
  if (value.dict() != nullptr) return "dict";
  if (const List* list = value.list()) {
    switch (list->kind) {
      case ListKind::kList: return "list";
      case ListKind::kTuple: return "tuple";
      case ListKind::kView: return "dict view";
      case ListKind::kIterator: return "generator";
    }
  }
  return value.object()->TypeName();
}

bool Truthy(const Value& value) {
  if (value.is_undefined() || value.is_none()) return false;
  if (value.is_bool()) return value.AsBool();
  if (value.is_int()) return value.AsInt() != 0;
  if (value.is_float()) return value.AsFloat() != 0;
  if (const Text* text = value.text()) return !text->bytes.empty();
  if (const Dict* dict = value.dict()) return !dict->items.empty();
  if (const List* list = value.list()) return list->kind == ListKind::kIterator || !list->items.empty();
  return true;
}

bool Equal(Budget& budget, const Value& a, const Value& b, int depth) {
  budget.Charge();
  budget.CheckDepth(depth);
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return a.AsFloat() == b.AsFloat();
    return a.AsInt() == b.AsInt();
  }
  if (a.data().index() != b.data().index()) return false;
  if (a.is_undefined() || a.is_none()) return true;
  if (a.text() != nullptr) {
    budget.ChargeBytes(std::min(a.AsString().size(), b.AsString().size()));
    return a.AsString() == b.AsString();
  }
  if (a.list() != nullptr) return a.list() == b.list() || EqualLists(budget, *a.list(), *b.list(), depth);
  if (a.dict() != nullptr) return a.dict() == b.dict() || EqualDicts(budget, *a.dict(), *b.dict(), depth);
  return a.object() == b.object();
}

int Compare(Budget& budget, const Value& a, const Value& b, int depth) {
  budget.Charge();
  budget.CheckDepth(depth);
  NeedDefined(a);
  NeedDefined(b);
  if (a.is_number() && b.is_number()) return CompareNumbers(a, b);
  if (a.text() != nullptr && b.text() != nullptr) {
    budget.ChargeBytes(std::min(a.AsString().size(), b.AsString().size()));
    const int order = a.AsString().compare(b.AsString());  // bytes of UTF-8 sort as code points do
    return order < 0 ? -1 : order > 0;
  }
  const List* x = a.list();
  const List* y = b.list();
  if (x != nullptr && y != nullptr && x->kind == y->kind && x->kind <= ListKind::kTuple) {
    for (size_t i = 0; i < std::min(x->items.size(), y->items.size()); ++i) {
      if (!Equal(budget, x->items[i], y->items[i], depth + 1)) return Compare(budget, x->items[i], y->items[i], depth + 1);
    }
    return x->items.size() < y->items.size() ? -1 : x->items.size() > y->items.size();
  }
  Fail("'" + TypeName(a) + "' and '" + TypeName(b) + "' cannot be ordered");
}

std::string HashKey(const Value& value, int depth) {
  if (value.text() != nullptr) return "s" + value.AsString();
  if (value.is_number()) return NumberKey(value);
  if (value.is_none()) return "n";
  if (value.is_undefined()) return "u";
  if (value.object() != nullptr) return "o" + std::to_string(reinterpret_cast<uintptr_t>(value.object()));
  const List* list = value.list();
  if (list == nullptr || list->kind != ListKind::kTuple || depth > 8) Fail("unhashable type: '" + TypeName(value) + "'");
  std::string key = "t";
  for (const Value& item : list->items) {
    const std::string part = HashKey(item, depth + 1);
    key += std::to_string(part.size()) + ":" + part;
    if (key.size() > kLongestTupleKey) Fail("a tuple of more than " + std::to_string(kLongestTupleKey) + " bytes as a key");
  }
  return key;
}

int64_t Length(Budget& budget, const Value& value) {
  if (value.is_undefined()) return 0;
  if (const Text* text = value.text()) {
    if (text->ascii) return static_cast<int64_t>(text->bytes.size());
    budget.ChargeBytes(text->bytes.size());
    return CharCount(text->bytes);
  }
  if (const Dict* dict = value.dict()) return static_cast<int64_t>(dict->items.size());
  const List* list = value.list();
  if (list != nullptr && list->kind != ListKind::kIterator) return static_cast<int64_t>(list->items.size());
  Fail("object of type '" + TypeName(value) + "' has no len()");
}

std::vector<Value> Iterate(Budget& budget, const Value& value) {
  std::vector<Value> items;
  if (value.is_undefined()) return items;
  if (const Text* text = value.text()) {
    budget.ChargeItems(text->bytes.size());
    uint32_t code;
    for (size_t at = 0; at < text->bytes.size();) {
      const size_t length = CharAt(text->bytes, at, &code);
      items.push_back(Value::String(text->bytes.substr(at, length)));
      at += length;
    }
    return items;
  }
  if (const Dict* dict = value.dict()) {
    budget.ChargeItems(dict->items.size());
    for (const auto& item : dict->items) items.push_back(item.first);
    return items;
  }
  List* list = value.list();
  if (list == nullptr) Fail("'" + TypeName(value) + "' object is not iterable");
  budget.ChargeItems(list->items.size());
  items.assign(list->items.begin() + static_cast<int64_t>(list->taken), list->items.end());
  if (list->kind == ListKind::kIterator) list->taken = list->items.size();
  return items;
}

bool Contains(Budget& budget, const Value& container, const Value& item) {
  if (const Text* text = container.text()) {
    NeedDefined(item);
    if (item.text() == nullptr) Fail("'in <string>' requires string as left operand, not " + TypeName(item));
    budget.ChargeBytes(text->bytes.size());
    return FindText(text->bytes, item.AsString(), 0) != std::string::npos;
  }
  if (const Dict* dict = container.dict()) return dict->Find(item) != nullptr;
  for (const Value& each : Iterate(budget, container)) {
    if (Equal(budget, each, item)) return true;
  }
  return false;
}

void NeedDefined(const Value& value) {
  if (const auto* undefined = std::get_if<UndefinedData>(&value.data())) {
    Fail(undefined->why == nullptr ? "a value is undefined" : *undefined->why);
  }
}

}  // namespace loupe::jinja
