// Walks a syntax tree and writes text. One per render, used by one thread. Every evaluation, call and byte is charged to
// the budget, so a hostile template ends with an error, not with a full machine.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/text/jinja_ast.h"

namespace loupe::jinja {

struct Scope {
  std::shared_ptr<Scope> parent;
  std::unordered_map<std::string, Value> values;
  bool kept = false;  // by the interpreter until the end, because a macro that it holds refers to it
};

class Interpreter {
 public:
  Interpreter(const TemplateLimits& limits, const ChatTemplateContext& context);
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  std::string Run(const Body& body, std::unordered_map<std::string, Value> variables);

  Value Eval(const Expr& expr);
  Flow Exec(const Body& body);
  // Runs the body with its output collected on its own.
  std::string Capture(const Body& body, Flow* flow);
  void Write(std::string_view text);

  Value Lookup(const std::string& name) const;
  void Assign(const Target& target, const Value& value);
  void AssignName(const std::string& name, const Value& value) { scope_->values[name] = value; }

  Args Evaluate(const CallArgs& args);
  Value Call(const Value& callee, const Args& args);
  // a.b, and a[b] with all that Python allows there. Undefined, saying so, if there is none.
  Value Attribute(const Value& object, const std::string& name);
  Value Item(const Value& object, const Value& key);
  // What `loop`, `namespace` and the like make may come to hold itself: such objects are emptied at the end.
  template <class T>
  std::shared_ptr<T> Keep(std::shared_ptr<T> object) {
    kept_objects_.push_back(object);
    return object;
  }
  void KeepScope();
  // list.append
  void Append(const std::shared_ptr<List>& list, const Value& item);

  Budget& budget() { return budget_; }
  const ChatTemplateContext& context() const { return context_; }
  const std::shared_ptr<Scope>& scope() const { return scope_; }
  int line() const { return line_; }
  void set_line(int line) { line_ = line; }
  const Value* block_text = nullptr;  // input of a block's filter

  // A scope below `parent`, for the time that the object lives.
  class Inner {
   public:
    Inner(Interpreter& in, std::shared_ptr<Scope> parent);
    explicit Inner(Interpreter& in) : Inner(in, in.scope_) {}
    ~Inner();

   private:
    Interpreter& in_;
    std::shared_ptr<Scope> before_;
  };

  // One more frame of recursion, for the time that the object lives.
  class Frame {
   public:
    explicit Frame(Interpreter& in);
    ~Frame() { --in_.depth_; }

   private:
    Interpreter& in_;
  };

 private:
  Budget budget_;
  const ChatTemplateContext& context_;
  std::shared_ptr<Scope> scope_;
  std::string out_;
  int depth_ = 0;
  int line_ = 0;
  std::vector<std::shared_ptr<Object>> kept_objects_;
  std::vector<std::shared_ptr<Scope>> kept_scopes_;
  std::vector<std::shared_ptr<List>> kept_lists_;
};

// Null if there is none of that name.
FilterFunction FindFilter(const std::string& name);
TestFunction FindTest(const std::string& name);

// raise_exception, range, namespace, ...; nothing if there is none of that name.
std::optional<Value> FindGlobal(const std::string& name);

// Methods of strings, dicts and lists.
bool HasMethod(const Value& value, const std::string& name);
Value CallMethod(Interpreter& in, const Value& value, const std::string& name, const Args& args);
Value BindMethod(const Value& value, const std::string& name);

// a op b with Python's rules; op: + - * / // % **.
Value BinaryOperation(Interpreter& in, const std::string& op, const Value& a, const Value& b);
Value Negate(const Value& value);
// Python's `format % values`.
std::string PercentFormat(Interpreter& in, const std::string& format, const std::vector<Value>& values);
Value Slice(Interpreter& in, const Value& object, const std::array<Value, 3>& bounds);
// int() of text; nothing if it is none or does not fit in 64 bits.
std::optional<int64_t> ParseInteger(std::string_view text, int base);

// Arguments of a call of `function` by parameter name: those given, in order of `names`. Fails for too many, unknown,
// doubled ones, and if fewer than `required` came.
class Bound {
 public:
  Bound(const std::string& function, const Args& args, std::initializer_list<const char*> names, size_t required = 0);
  // Null if it was not given.
  const Value* operator[](size_t i) const { return values_[i]; }
  std::string String(size_t i, const std::string& otherwise) const;
  int64_t Int(size_t i, int64_t otherwise) const;
  bool Flag(size_t i, bool otherwise) const;

 private:
  std::string function_;
  std::vector<std::string> names_;
  std::vector<const Value*> values_;
};

}  // namespace loupe::jinja
