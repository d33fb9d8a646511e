// Evaluation of expressions, and what it stands on: scopes, attributes, calls.
#include "engine/text/jinja_interp.h"
#include "engine/text/jinja_text.h"

namespace loupe::jinja {
namespace {

std::string Described(const Value& object) {
  if (object.is_none()) return "'None'";
  return "'" + TypeName(object) + " object'";
}

// A position that may count from the end; nothing if outside.
std::optional<size_t> Position(int64_t index, size_t size) {
  if (index < 0) index += static_cast<int64_t>(size);
  if (index < 0 || index >= static_cast<int64_t>(size)) return std::nullopt;
  return static_cast<size_t>(index);
}

std::optional<Value> CharacterAt(Budget& budget, const Text& text, int64_t index) {
  if (text.ascii) {
    const auto at = Position(index, text.bytes.size());
    return at ? std::optional(Value::String(text.bytes.substr(*at, 1))) : std::nullopt;
  }
  budget.ChargeBytes(text.bytes.size());
  const std::vector<size_t> offsets = CharOffsets(text.bytes);
  const auto at = Position(index, offsets.size() - 1);
  if (!at) return std::nullopt;
  return Value::String(text.bytes.substr(offsets[*at], offsets[*at + 1] - offsets[*at]));
}

bool CompareOnce(Budget& budget, CompareOp op, const Value& a, const Value& b) {
  switch (op) {
    case CompareOp::kEqual: return Equal(budget, a, b);
    case CompareOp::kNotEqual: return !Equal(budget, a, b);
    case CompareOp::kIn: return Contains(budget, b, a);
    case CompareOp::kNotIn: return !Contains(budget, b, a);
    default: break;
  }
  const bool unordered = (a.is_float() && a.AsFloat() != a.AsFloat()) || (b.is_float() && b.AsFloat() != b.AsFloat());
  const int order = Compare(budget, a, b);
  if (unordered) return false;
  switch (op) {
    case CompareOp::kLess: return order < 0;
    case CompareOp::kLessEqual: return order <= 0;
    case CompareOp::kGreater: return order > 0;
    default: return order >= 0;
  }
}

}  // namespace

Interpreter::Interpreter(const TemplateLimits& limits, const ChatTemplateContext& context)
    : budget_(limits), context_(context), scope_(std::make_shared<Scope>()) {}

// What may hold itself is emptied first and destroyed after, so that nothing stays and nothing recurses.
Interpreter::~Interpreter() {
  for (const auto& object : kept_objects_) object->Clear();
  for (const auto& scope : kept_scopes_) scope->values.clear();
  for (const auto& list : kept_lists_) list->items.clear();
}

Interpreter::Inner::Inner(Interpreter& in, std::shared_ptr<Scope> parent) : in_(in), before_(in.scope_) {
  in.scope_ = std::make_shared<Scope>();
  in.scope_->parent = std::move(parent);
}

Interpreter::Inner::~Inner() { in_.scope_ = std::move(before_); }

Interpreter::Frame::Frame(Interpreter& in) : in_(in) {
  if (++in.depth_ <= in.budget_.limits().max_depth * kFramesPerLevel) return;
  --in.depth_;
  throw Error(ErrorKind::kLimit, "calls are nested more than about " + std::to_string(in.budget_.limits().max_depth) + " deep", in.line_);
}

Value Interpreter::Eval(const Expr& expr) {
  const Frame frame(*this);
  budget_.Charge();
  if (expr.line > 0) line_ = expr.line;
  return expr.Eval(*this);
}

Value Interpreter::Lookup(const std::string& name) const {
  for (const Scope* scope = scope_.get(); scope != nullptr; scope = scope->parent.get()) {
    const auto found = scope->values.find(name);
    if (found != scope->values.end()) return found->second;
  }
  if (auto global = FindGlobal(name)) return *std::move(global);
  return Value::Undefined("'" + name + "' is undefined");
}

void Interpreter::KeepScope() {
  if (scope_->kept) return;
  scope_->kept = true;
  kept_scopes_.push_back(scope_);
}

void Interpreter::Append(const std::shared_ptr<List>& list, const Value& item) {
  budget_.ChargeItems(list->items.size() + 1);
  if (!list->kept) {
    list->kept = true;
    kept_lists_.push_back(list);
  }
  list->items.push_back(item);
}

Value Interpreter::Attribute(const Value& object, const std::string& name) {
  NeedDefined(object);
  if (HasMethod(object, name)) return BindMethod(object, name);
  if (const Dict* dict = object.dict()) {
    if (const Value* value = dict->Find(std::string_view(name))) return *value;
  } else if (Object* o = object.object()) {
    if (auto value = o->Attribute(name)) return *std::move(value);
  }
  return Value::Undefined(Described(object) + " has no attribute '" + name + "'");
}

Value Interpreter::Item(const Value& object, const Value& key) {
  NeedDefined(object);
  const List* list = object.list();
  if (const Dict* dict = object.dict()) {
    const bool hashable = key.dict() == nullptr && (key.list() == nullptr || key.list()->kind == ListKind::kTuple);
    const Value* value = hashable ? dict->Find(key) : nullptr;
    if (value != nullptr) return *value;
  } else if (list != nullptr && list->kind <= ListKind::kTuple && key.is_integral()) {
    if (const auto at = Position(key.AsInt(), list->items.size())) return list->items[*at];
  } else if (object.text() != nullptr && key.is_integral()) {
    if (auto character = CharacterAt(budget_, *object.text(), key.AsInt())) return *std::move(character);
  }
  if (key.text() != nullptr) {
    if (HasMethod(object, key.AsString())) return BindMethod(object, key.AsString());
    if (object.dict() == nullptr) return Attribute(object, key.AsString());
    return Value::Undefined(Described(object) + " has no attribute '" + key.AsString() + "'");
  }
  const std::string shown = key.is_integral() ? std::to_string(key.AsInt()) : "of type " + TypeName(key);
  return Value::Undefined(TypeName(object) + " object has no element " + shown);
}

Args Interpreter::Evaluate(const CallArgs& args) {
  Args out;
  out.list.reserve(args.list.size());
  for (const ExprPtr& arg : args.list) out.list.push_back(Eval(*arg));
  for (const auto& [name, arg] : args.named) out.named.emplace_back(name, Eval(*arg));
  if (args.star != nullptr) {
    for (Value& value : Iterate(budget_, Eval(*args.star))) out.list.push_back(std::move(value));
  }
  if (args.star_star != nullptr) {
    const Value named = Eval(*args.star_star);
    if (named.dict() == nullptr) Fail("argument after ** must be a mapping, not " + TypeName(named));
    budget_.ChargeItems(named.dict()->items.size());
    for (const auto& [key, value] : named.dict()->items) {
      if (key.text() == nullptr) Fail("keywords must be strings");
      out.named.emplace_back(key.AsString(), value);
    }
  }
  return out;
}

Value Interpreter::Call(const Value& callee, const Args& args) {
  NeedDefined(callee);
  if (callee.object() == nullptr) Fail("'" + TypeName(callee) + "' object is not callable");
  return callee.object()->Call(*this, args);
}

Value NameExpr::Eval(Interpreter& in) const { return in.Lookup(name); }

Value SequenceExpr::Eval(Interpreter& in) const {
  std::vector<Value> values;
  values.reserve(items.size());
  for (const ExprPtr& item : items) values.push_back(in.Eval(*item));
  return MakeList(in.budget(), std::move(values), kind);
}

Value DictExpr::Eval(Interpreter& in) const {
  std::vector<std::pair<Value, Value>> values;
  for (const auto& [key, value] : items) {
    Value k = in.Eval(*key);
    values.emplace_back(std::move(k), in.Eval(*value));
  }
  return MakeDict(in.budget(), std::move(values));
}

Value ConcatExpr::Eval(Interpreter& in) const {
  std::string text;
  for (const ExprPtr& part : parts) {
    text += Str(in.budget(), in.Eval(*part));
    in.budget().ChargeBytes(text.size());
  }
  return Value::String(std::move(text));
}

Value BinaryExpr::Eval(Interpreter& in) const {
  const Value a = in.Eval(*left);
  const Value b = in.Eval(*right);
  return BinaryOperation(in, op, a, b);
}

Value UnaryExpr::Eval(Interpreter& in) const {
  const Value value = in.Eval(*operand);
  NeedDefined(value);
  if (!value.is_number()) Fail(std::string("bad operand type for unary ") + op + ": '" + TypeName(value) + "'");
  if (op == '-') return Negate(value);
  return value.is_bool() ? Value::Int(value.AsInt()) : value;
}

Value NotExpr::Eval(Interpreter& in) const { return Value::Bool(!Truthy(in.Eval(*operand))); }

Value LogicExpr::Eval(Interpreter& in) const {
  Value value = in.Eval(*left);
  if (Truthy(value) != is_and) return value;
  return in.Eval(*right);
}

Value CompareExpr::Eval(Interpreter& in) const {
  Value a = in.Eval(*first);
  for (const auto& [op, expr] : rest) {
    Value b = in.Eval(*expr);
    if (!CompareOnce(in.budget(), op, a, b)) return Value::Bool(false);
    a = std::move(b);
  }
  return Value::Bool(true);
}

Value ConditionalExpr::Eval(Interpreter& in) const {
  if (Truthy(in.Eval(*condition))) return in.Eval(*then);
  if (otherwise != nullptr) return in.Eval(*otherwise);
  return Value::Undefined("the inline if-expression evaluated to false and no else section was defined");
}

Value AttributeExpr::Eval(Interpreter& in) const { return in.Attribute(in.Eval(*object), name); }

Value ItemExpr::Eval(Interpreter& in) const {
  const Value container = in.Eval(*object);
  return in.Item(container, in.Eval(*key));
}

Value SliceExpr::Eval(Interpreter& in) const {
  const Value container = in.Eval(*object);
  std::array<Value, 3> values = {Value::None(), Value::None(), Value::None()};
  for (size_t i = 0; i < bounds.size(); ++i) {
    if (bounds[i] != nullptr) values[i] = in.Eval(*bounds[i]);
  }
  return Slice(in, container, values);
}

Value CallExpr::Eval(Interpreter& in) const { return EvalWith(in, nullptr); }

Value CallExpr::EvalWith(Interpreter& in, const Value* caller) const {
  // A method is called without making an object of it first.
  if (const auto* attribute = dynamic_cast<const AttributeExpr*>(callee.get()); attribute != nullptr && caller == nullptr) {
    const Value object = in.Eval(*attribute->object);
    if (HasMethod(object, attribute->name)) {
      const Args values = in.Evaluate(args);
      return CallMethod(in, object, attribute->name, values);
    }
    const Value function = in.Attribute(object, attribute->name);
    NeedDefined(function);
    const Args values = in.Evaluate(args);
    return in.Call(function, values);
  }
  const Value function = in.Eval(*callee);
  Args values = in.Evaluate(args);
  if (caller != nullptr) values.named.emplace_back("caller", *caller);
  return in.Call(function, values);
}

Value FilterExpr::Eval(Interpreter& in) const {
  if (function == nullptr) Fail("no filter named '" + name + "'");
  const Value value = input != nullptr ? in.Eval(*input) : *in.block_text;
  const Args values = in.Evaluate(args);
  return function(in, value, values);
}

Value TestExpr::Eval(Interpreter& in) const {
  if (function == nullptr) Fail("no test named '" + name + "'");
  const Value value = in.Eval(*input);
  const Args values = in.Evaluate(args);
  return Value::Bool(function(in, value, values));
}

Bound::Bound(const std::string& function, const Args& args, std::initializer_list<const char*> names, size_t required)
    : function_(function), names_(names.begin(), names.end()), values_(names.size(), nullptr) {
  if (args.list.size() > names_.size()) {
    Fail(function_ + "() takes at most " + std::to_string(names_.size()) + " arguments, " + std::to_string(args.list.size()) + " given");
  }
  for (size_t i = 0; i < args.list.size(); ++i) values_[i] = &args.list[i];
  for (const auto& [name, value] : args.named) {
    size_t i = 0;
    while (i < names_.size() && names_[i] != name) ++i;
    if (i == names_.size()) Fail(function_ + "() got an unexpected keyword argument '" + name + "'");
    if (values_[i] != nullptr) Fail(function_ + "() got multiple values for argument '" + name + "'");
    values_[i] = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (values_[i] == nullptr) Fail(function_ + "() misses argument '" + names_[i] + "'");
  }
}

std::string Bound::String(size_t i, const std::string& otherwise) const {
  if (values_[i] == nullptr) return otherwise;
  NeedDefined(*values_[i]);
  if (values_[i]->text() == nullptr) Fail(function_ + "(): '" + names_[i] + "' must be str, not " + TypeName(*values_[i]));
  return values_[i]->AsString();
}

int64_t Bound::Int(size_t i, int64_t otherwise) const {
  if (values_[i] == nullptr) return otherwise;
  NeedDefined(*values_[i]);
  if (!values_[i]->is_integral()) Fail(function_ + "(): '" + names_[i] + "' must be int, not " + TypeName(*values_[i]));
  return values_[i]->AsInt();
}

bool Bound::Flag(size_t i, bool otherwise) const { return values_[i] == nullptr ? otherwise : Truthy(*values_[i]); }

}  // namespace loupe::jinja
