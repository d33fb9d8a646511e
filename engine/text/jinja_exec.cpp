// Execution of statements; loops and macros as objects.
#include <algorithm>

#include "engine/text/jinja_interp.h"

namespace loupe::jinja {
namespace {

// Picks one of its arguments: loop.cycle(...).
class CyclePick : public Object {
 public:
  explicit CyclePick(size_t index) : index_(index) {}
  const char* TypeName() const override { return "method"; }
  bool callable() const override { return true; }
  Value Call(Interpreter&, const Args& args) override {
    if (args.list.empty()) Fail("no items for cycling given");
    return args.list[index_ % args.list.size()];
  }

 private:
  size_t index_;
};

class Loop : public Object {
 public:
  Loop(Budget& budget, std::vector<Value> items) : items_(std::move(items)) {
    for (const Value& item : items_) depth = std::max(depth, 1 + DepthOf(item));
    budget.CheckDepth(depth);
  }
  const char* TypeName() const override { return "LoopContext"; }
  std::optional<Value> Attribute(const std::string& name) const override;
  size_t size() const { return items_.size(); }
  const Value& item(size_t i) const { return items_[i]; }
  void MoveTo(size_t i) { at_ = i; }

 private:
  std::vector<Value> items_;
  size_t at_ = 0;
};

std::optional<Value> Loop::Attribute(const std::string& name) const {
  const auto index = static_cast<int64_t>(at_);
  const auto count = static_cast<int64_t>(items_.size());
  if (name == "index") return Value::Int(index + 1);
  if (name == "index0") return Value::Int(index);
  if (name == "revindex") return Value::Int(count - index);
  if (name == "revindex0") return Value::Int(count - index - 1);
  if (name == "first") return Value::Bool(index == 0);
  if (name == "last") return Value::Bool(index + 1 == count);
  if (name == "length") return Value::Int(count);
  if (name == "depth") return Value::Int(1);  // grows in recursive loops only
  if (name == "depth0") return Value::Int(0);
  if (name == "previtem") return at_ > 0 ? items_[at_ - 1] : Value::Undefined("there is no previous item");
  if (name == "nextitem") return at_ + 1 < items_.size() ? items_[at_ + 1] : Value::Undefined("there is no next item");
  if (name == "cycle") return Value::Of(std::static_pointer_cast<Object>(std::make_shared<CyclePick>(at_)));
  return std::nullopt;
}

class Macro : public Object {
 public:
  Macro(const MacroNode& node, std::shared_ptr<Scope> scope) : node_(node), scope_(std::move(scope)) {}
  const char* TypeName() const override { return "Macro"; }
  bool callable() const override { return true; }
  std::optional<Value> Attribute(const std::string& name) const override {
    if (name == "name") return Value::String(node_.name);
    return std::nullopt;
  }
  Value Call(Interpreter& in, const Args& args) override;

 private:
  void AssignSpecial(Interpreter& in, const Args& args, std::vector<std::pair<Value, Value>> rest);

  const MacroNode& node_;
  std::shared_ptr<Scope> scope_;
};

// caller, varargs and kwargs: what the parameters did not take.
void Macro::AssignSpecial(Interpreter& in, const Args& args, std::vector<std::pair<Value, Value>> rest) {
  const size_t count = node_.parameters.size();
  if (node_.uses_caller) {
    const auto found = std::find_if(rest.begin(), rest.end(), [](const auto& named) { return named.first.AsString() == "caller"; });
    in.AssignName("caller", found == rest.end() ? Value::Undefined("no caller defined") : found->second);
    if (found != rest.end()) rest.erase(found);
  }
  if (!rest.empty() && !node_.uses_kwargs) {
    Fail("macro '" + node_.name + "' takes no keyword argument '" + rest[0].first.AsString() + "'");
  }
  if (args.list.size() > count && !node_.uses_varargs) {
    Fail("macro '" + node_.name + "' takes not more than " + std::to_string(count) + " argument(s)");
  }
  if (node_.uses_kwargs) in.AssignName("kwargs", MakeDict(in.budget(), std::move(rest)));
  if (!node_.uses_varargs) return;
  std::vector<Value> more;
  if (args.list.size() > count) more.assign(args.list.begin() + static_cast<int64_t>(count), args.list.end());
  in.AssignName("varargs", MakeList(in.budget(), std::move(more), ListKind::kTuple));
}

Value Macro::Call(Interpreter& in, const Args& args) {
  const Interpreter::Frame frame(in);
  const Interpreter::Inner inner(in, scope_);
  const size_t count = node_.parameters.size();
  std::vector<const Value*> given(count, nullptr);
  for (size_t i = 0; i < std::min(count, args.list.size()); ++i) given[i] = &args.list[i];
  std::vector<std::pair<Value, Value>> rest;
  for (const auto& [name, value] : args.named) {
    size_t i = 0;
    while (i < count && node_.parameters[i] != name) ++i;
    if (i < count && given[i] == nullptr) {
      given[i] = &value;
    } else {
      rest.emplace_back(Value::String(name), value);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (given[i] != nullptr) in.AssignName(node_.parameters[i], *given[i]);
  }
  AssignSpecial(in, args, std::move(rest));
  const size_t without_default = count - node_.defaults.size();
  for (size_t i = 0; i < count; ++i) {
    if (given[i] != nullptr) continue;
    const std::string& name = node_.parameters[i];
    in.AssignName(name, i >= without_default ? in.Eval(*node_.defaults[i - without_default])
                                             : Value::Undefined("parameter '" + name + "' was not provided"));
  }
  Flow flow;
  return Value::String(in.Capture(node_.body, &flow));
}

Value MakeMacro(Interpreter& in, const MacroNode& node) {
  in.KeepScope();
  return Value::Of(std::static_pointer_cast<Object>(std::make_shared<Macro>(node, in.scope())));
}

}  // namespace

std::string Interpreter::Run(const Body& body, std::unordered_map<std::string, Value> variables) {
  scope_->values = std::move(variables);
  // What a template assigns at its top is seen by its macros, and hides what it was called with.
  const Inner top(*this);
  Exec(body);
  return std::move(out_);
}

Flow Interpreter::Exec(const Body& body) {
  const Frame frame(*this);
  for (const auto& statement : body) {
    budget_.Charge();
    line_ = statement->line;
    const Flow flow = statement->Exec(*this);
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

std::string Interpreter::Capture(const Body& body, Flow* flow) {
  std::string before;
  before.swap(out_);
  const Inner inner(*this);
  *flow = Exec(body);
  before.swap(out_);
  return before;
}

void Interpreter::Write(std::string_view text) {
  budget_.ChargeBytes(out_.size() + text.size() > static_cast<size_t>(budget_.limits().max_output_bytes) ? out_.size() + text.size()
                                                                                                         : text.size());
  out_ += text;
}

void Interpreter::Assign(const Target& target, const Value& value) {
  if (target.kind == Target::Kind::kName) return AssignName(target.name, value);
  if (target.kind == Target::Kind::kAttribute) {
    auto* space = dynamic_cast<Namespace*>(Lookup(target.name).object());
    if (space == nullptr) Fail("cannot assign attribute on non-namespace object '" + target.name + "'");
    space->attributes[target.attribute] = value;
    return;
  }
  const std::vector<Value> parts = Iterate(budget_, value);
  if (parts.size() != target.items.size()) {
    Fail("cannot unpack " + std::to_string(parts.size()) + " values into " + std::to_string(target.items.size()) + " names");
  }
  for (size_t i = 0; i < parts.size(); ++i) Assign(target.items[i], parts[i]);
}

Flow DataNode::Exec(Interpreter& in) const {
  in.Write(text);
  return Flow::kNext;
}

Flow PrintNode::Exec(Interpreter& in) const {
  const Value printed = in.Eval(*value);
  if (printed.text() != nullptr) {
    in.Write(printed.AsString());
  } else {
    in.Write(Str(in.budget(), printed));
  }
  return Flow::kNext;
}

Flow IfNode::Exec(Interpreter& in) const {
  for (const auto& [condition, body] : branches) {
    if (Truthy(in.Eval(*condition))) return in.Exec(body);
  }
  return in.Exec(otherwise);
}

Flow ForNode::Exec(Interpreter& in) const {
  std::vector<Value> values = Iterate(in.budget(), in.Eval(*items));
  if (condition != nullptr) {
    std::vector<Value> kept;
    for (Value& value : values) {
      const Interpreter::Inner inner(in);
      in.Assign(target, value);
      if (Truthy(in.Eval(*condition))) kept.push_back(std::move(value));
    }
    values = std::move(kept);
  }
  if (values.empty()) {
    const Interpreter::Inner inner(in);
    return in.Exec(otherwise);
  }
  const auto loop = std::make_shared<Loop>(in.budget(), std::move(values));
  for (size_t i = 0; i < loop->size(); ++i) {
    in.budget().Charge();
    const Interpreter::Inner inner(in);
    loop->MoveTo(i);
    in.AssignName("loop", Value::Of(std::static_pointer_cast<Object>(loop)));
    in.Assign(target, loop->item(i));
    if (in.Exec(body) == Flow::kBreak) break;
  }
  return Flow::kNext;
}

Flow SetNode::Exec(Interpreter& in) const {
  in.Assign(target, in.Eval(*value));
  return Flow::kNext;
}

namespace {

Value ApplyFilter(Interpreter& in, const ExprPtr& filter, std::string text) {
  Value value = Value::String(std::move(text));
  if (filter == nullptr) return value;
  const Value* before = std::exchange(in.block_text, &value);
  Value filtered = in.Eval(*filter);
  in.block_text = before;
  return filtered;
}

}  // namespace

Flow SetBlockNode::Exec(Interpreter& in) const {
  Flow flow;
  std::string text = in.Capture(body, &flow);
  if (flow == Flow::kNext) in.Assign(target, ApplyFilter(in, filter, std::move(text)));
  return flow;
}

Flow FilterBlockNode::Exec(Interpreter& in) const {
  Flow flow;
  std::string text = in.Capture(body, &flow);
  if (flow == Flow::kNext) in.Write(Str(in.budget(), ApplyFilter(in, filter, std::move(text))));
  return flow;
}

Flow MacroNode::Exec(Interpreter& in) const {
  in.AssignName(name, MakeMacro(in, *this));
  return Flow::kNext;
}

Flow CallBlockNode::Exec(Interpreter& in) const {
  const Value caller = MakeMacro(in, body);
  in.Write(Str(in.budget(), call->EvalWith(in, &caller)));
  return Flow::kNext;
}

Flow WithNode::Exec(Interpreter& in) const {
  std::vector<Value> evaluated;
  for (const auto& value : values) evaluated.push_back(in.Eval(*value.second));  // none sees the others
  const Interpreter::Inner inner(in);
  for (size_t i = 0; i < values.size(); ++i) in.Assign(values[i].first, evaluated[i]);
  return in.Exec(body);
}

}  // namespace loupe::jinja
