// Values of the template language, with Python's rules: what is true, what is equal, what can be compared or iterated.
// Values are shared by pointer and immutable, except namespaces and lists that append touches. Owned by one render on
// one thread. Failed operations throw jinja::Error, which only chat_template.cpp catches.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "engine/text/chat_template.h"

namespace loupe::jinja {

enum class ErrorKind { kSyntax, kFailed, kRaised, kLimit };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind error_kind, const std::string& message, int at_line = 0, int at_column = 0)
      : std::runtime_error(message), kind(error_kind), line(at_line), column(at_column) {}
  ErrorKind kind;
  int line;    // from 1; 0: not known
  int column;  // from 1; 0: not known
};

[[noreturn]] void Fail(const std::string& message);

// What a render may still spend. Work on long strings and lists counts as steps too, so steps bound time and memory.
class Budget {
 public:
  explicit Budget(const TemplateLimits& limits) : limits_(limits) {}
  void Charge(int64_t steps = 1);
  // A string of that many bytes is about to exist, or to be read through.
  void ChargeBytes(uint64_t bytes);
  // The same for a list or dict.
  void ChargeItems(uint64_t items);
  // Nesting of values, of calls and of what walks over values.
  void CheckDepth(int depth) const;
  const TemplateLimits& limits() const { return limits_; }

 private:
  TemplateLimits limits_;
  int64_t used_ = 0;
};

// Evaluation may recurse this many times deeper than source and calls may nest: one level of either takes several frames.
inline constexpr int kFramesPerLevel = 8;

class Value;
struct List;
struct Dict;
class Object;

struct UndefinedData {
  std::shared_ptr<const std::string> why;  // what to say when an operation needs the value
};
struct NoneData {};
struct Text {
  std::string bytes;  // UTF-8; stray bytes count as one character each
  bool ascii = true;  // then characters are bytes
};

class Value {
 public:
  using Data = std::variant<UndefinedData, NoneData, bool, int64_t, double, std::shared_ptr<const Text>, std::shared_ptr<List>,
                            std::shared_ptr<const Dict>, std::shared_ptr<Object>>;
  Value() = default;  // undefined
  static Value Undefined(const std::string& why);
  static Value None() { return Value(NoneData{}); }
  static Value Bool(bool b) { return Value(b); }
  static Value Int(int64_t i) { return Value(i); }
  static Value Float(double d) { return Value(d); }
  static Value String(std::string bytes);
  static Value Of(std::shared_ptr<List> list) { return Value(std::move(list)); }
  static Value Of(std::shared_ptr<const Dict> dict) { return Value(std::move(dict)); }
  static Value Of(std::shared_ptr<Object> object) { return Value(std::move(object)); }

  bool is_undefined() const { return std::holds_alternative<UndefinedData>(data_); }
  bool is_none() const { return std::holds_alternative<NoneData>(data_); }
  bool is_bool() const { return std::holds_alternative<bool>(data_); }
  bool is_int() const { return std::holds_alternative<int64_t>(data_); }
  bool is_float() const { return std::holds_alternative<double>(data_); }
  bool is_number() const { return is_bool() || is_int() || is_float(); }
  bool is_integral() const { return is_bool() || is_int(); }
  const Text* text() const { return Pointer<const Text>(); }
  List* list() const { return Pointer<List>(); }
  const Dict* dict() const { return Pointer<const Dict>(); }
  Object* object() const { return Pointer<Object>(); }
  const Data& data() const { return data_; }

  bool AsBool() const { return std::get<bool>(data_); }
  int64_t AsInt() const { return is_bool() ? AsBool() : std::get<int64_t>(data_); }
  double AsFloat() const { return is_float() ? std::get<double>(data_) : static_cast<double>(AsInt()); }
  const std::string& AsString() const { return std::get<std::shared_ptr<const Text>>(data_)->bytes; }

 private:
  template <class T>
  explicit Value(T data) : data_(std::move(data)) {}
  template <class T>
  T* Pointer() const {
    const auto* held = std::get_if<std::shared_ptr<T>>(&data_);
    return held == nullptr ? nullptr : held->get();
  }
  Data data_;
};

enum class ListKind : uint8_t { kList, kTuple, kView, kIterator };  // view: of a dict; iterator: taken once

struct List {
  ListKind kind = ListKind::kList;
  std::vector<Value> items;
  size_t taken = 0;   // of an iterator
  int depth = 1;      // 1 + that of the deepest item when it was made
  bool kept = false;  // the interpreter holds it until the end, because it may have come to contain itself
};

struct Dict {
  std::vector<std::pair<Value, Value>> items;  // in order of insertion
  std::unordered_map<std::string, size_t> index;  // by HashKey, once there are many
  int depth = 1;
  // Null if absent.
  const Value* Find(const Value& key) const;
  const Value* Find(std::string_view key) const;
  // Replaces the value of an equal key, whose place it keeps.
  void Set(const Value& key, Value value);

 private:
  // Index into items, items.size() if absent.
  size_t Place(const Value& key) const;
  size_t Place(std::string_view key) const;
};

struct Args {
  std::vector<Value> list;
  std::vector<std::pair<std::string, Value>> named;
};

class Interpreter;

// Namespaces, loops, macros, functions.
class Object {
 public:
  virtual ~Object() = default;
  virtual const char* TypeName() const = 0;
  virtual std::optional<Value> Attribute(const std::string&) const { return std::nullopt; }
  virtual bool callable() const { return false; }
  virtual Value Call(Interpreter&, const Args&);
  virtual void Clear() {}  // drops what it holds
  int depth = 0;           // of the values that it holds and that the interpreter does not keep
};

class Namespace : public Object {
 public:
  const char* TypeName() const override { return "Namespace"; }
  std::optional<Value> Attribute(const std::string& name) const override;
  void Clear() override { attributes.clear(); }
  std::unordered_map<std::string, Value> attributes;
};

Value MakeList(Budget& budget, std::vector<Value> items, ListKind kind = ListKind::kList);
Value MakeDict(Budget& budget, std::vector<std::pair<Value, Value>> items);

// How deep values are nested in each other; destroying and printing them takes that many frames.
int DepthOf(const Value& value);
// "str", "dict", "NoneType", ...: as Python calls the type.
std::string TypeName(const Value& value);
bool Truthy(const Value& value);
bool Equal(Budget& budget, const Value& a, const Value& b, int depth = 0);
// <0, 0, >0; fails for types without an order.
int Compare(Budget& budget, const Value& a, const Value& b, int depth = 0);
// Text that is equal exactly for equal keys; fails for what Python cannot hash.
std::string HashKey(const Value& value, int depth = 0);
// len(); fails for what has none.
int64_t Length(Budget& budget, const Value& value);
// The items that a loop sees; an iterator is emptied. Fails for what cannot be iterated.
std::vector<Value> Iterate(Budget& budget, const Value& value);
bool Contains(Budget& budget, const Value& container, const Value& item);
// Fails, naming the variable, if the value is undefined.
void NeedDefined(const Value& value);

// str(), repr(), json.dumps(): as Python prints.
struct JsonStyle {
  bool ensure_ascii = false;
  std::optional<std::string> indent;  // one level of it
  std::string item_separator = ", ", key_separator = ": ";
  bool sort_keys = false;
};
std::string Str(Budget& budget, const Value& value);
std::string Repr(Budget& budget, const Value& value);
std::string ToJson(Budget& budget, const Value& value, const JsonStyle& style);
std::string FloatRepr(double value);

}  // namespace loupe::jinja
