// The syntax tree of a template: nodes that evaluate and execute themselves. Immutable after parsing, so any number of
// renders may share one tree.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/text/jinja_value.h"

namespace loupe::jinja {

class Interpreter;
struct MacroNode;

struct Expr {
  virtual ~Expr() = default;
  virtual Value Eval(Interpreter& in) const = 0;
  int line = 0;
  int depth = 1;  // of the tree below, itself included
};
using ExprPtr = std::unique_ptr<Expr>;

enum class Flow : uint8_t { kNext, kBreak, kContinue };

struct Statement {
  virtual ~Statement() = default;
  virtual Flow Exec(Interpreter& in) const = 0;
  int line = 0;
};
using Body = std::vector<std::unique_ptr<Statement>>;

struct CallArgs {
  std::vector<ExprPtr> list;
  std::vector<std::pair<std::string, ExprPtr>> named;
  ExprPtr star, star_star;  // *args, **kwargs
};

using FilterFunction = Value (*)(Interpreter& in, const Value& value, const Args& args);
using TestFunction = bool (*)(Interpreter& in, const Value& value, const Args& args);

struct ConstExpr : Expr {
  Value value;
  Value Eval(Interpreter&) const override { return value; }
};
struct NameExpr : Expr {
  std::string name;
  Value Eval(Interpreter& in) const override;
};
struct SequenceExpr : Expr {
  ListKind kind = ListKind::kList;
  std::vector<ExprPtr> items;
  Value Eval(Interpreter& in) const override;
};
struct DictExpr : Expr {
  std::vector<std::pair<ExprPtr, ExprPtr>> items;
  Value Eval(Interpreter& in) const override;
};
struct ConcatExpr : Expr {  // a ~ b ~ c
  std::vector<ExprPtr> parts;
  Value Eval(Interpreter& in) const override;
};
struct BinaryExpr : Expr {
  std::string op;  // + - * / // % **
  ExprPtr left, right;
  Value Eval(Interpreter& in) const override;
};
struct UnaryExpr : Expr {
  char op = '-';
  ExprPtr operand;
  Value Eval(Interpreter& in) const override;
};
struct NotExpr : Expr {
  ExprPtr operand;
  Value Eval(Interpreter& in) const override;
};
struct LogicExpr : Expr {
  bool is_and = false;
  ExprPtr left, right;
  Value Eval(Interpreter& in) const override;
};
enum class CompareOp : uint8_t { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };
struct CompareExpr : Expr {
  ExprPtr first;
  std::vector<std::pair<CompareOp, ExprPtr>> rest;
  Value Eval(Interpreter& in) const override;
};
struct ConditionalExpr : Expr {
  ExprPtr condition, then, otherwise;  // otherwise may be null: undefined
  Value Eval(Interpreter& in) const override;
};
struct AttributeExpr : Expr {
  ExprPtr object;
  std::string name;
  Value Eval(Interpreter& in) const override;
};
struct ItemExpr : Expr {
  ExprPtr object, key;
  Value Eval(Interpreter& in) const override;
};
struct SliceExpr : Expr {
  ExprPtr object;
  std::array<ExprPtr, 3> bounds;  // start, stop, step; null: left out
  Value Eval(Interpreter& in) const override;
};
struct CallExpr : Expr {
  ExprPtr callee;
  CallArgs args;
  Value Eval(Interpreter& in) const override;
  Value EvalWith(Interpreter& in, const Value* caller) const;  // `caller`: of a call block, may be null
};
struct FilterExpr : Expr {
  ExprPtr input;  // null: the innermost filter of a block, which gets the block's text
  std::string name;
  FilterFunction function = nullptr;  // null: unknown, fails only if it is reached
  CallArgs args;
  Value Eval(Interpreter& in) const override;
};
struct TestExpr : Expr {
  ExprPtr input;
  std::string name;
  TestFunction function = nullptr;
  CallArgs args;
  Value Eval(Interpreter& in) const override;
};

// What can stand left of `=` and after `for`.
struct Target {
  enum class Kind : uint8_t { kName, kTuple, kAttribute } kind = Kind::kName;
  std::string name;
  std::string attribute;       // of a namespace called `name`
  std::vector<Target> items;
};

struct DataNode : Statement {
  std::string text;
  Flow Exec(Interpreter& in) const override;
};
struct PrintNode : Statement {
  ExprPtr value;
  Flow Exec(Interpreter& in) const override;
};
struct IfNode : Statement {
  std::vector<std::pair<ExprPtr, Body>> branches;
  Body otherwise;
  Flow Exec(Interpreter& in) const override;
};
struct ForNode : Statement {
  Target target;
  ExprPtr items, condition;
  Body body, otherwise;
  Flow Exec(Interpreter& in) const override;
};
struct SetNode : Statement {
  Target target;
  ExprPtr value;
  Flow Exec(Interpreter& in) const override;
};
struct SetBlockNode : Statement {
  Target target;
  ExprPtr filter;
  Body body;
  Flow Exec(Interpreter& in) const override;
};
struct MacroNode : Statement {
  std::string name;
  std::vector<std::string> parameters;
  std::vector<ExprPtr> defaults;  // of the last parameters
  Body body;
  bool uses_caller = false, uses_kwargs = false, uses_varargs = false;
  Flow Exec(Interpreter& in) const override;
};
struct CallBlockNode : Statement {
  std::unique_ptr<CallExpr> call;
  MacroNode body;
  Flow Exec(Interpreter& in) const override;
};
struct FilterBlockNode : Statement {
  ExprPtr filter;
  Body body;
  Flow Exec(Interpreter& in) const override;
};
struct WithNode : Statement {  // and {% generation %}, with nothing set
  std::vector<std::pair<Target, ExprPtr>> values;
  Body body;
  Flow Exec(Interpreter& in) const override;
};
struct JumpNode : Statement {
  Flow flow = Flow::kBreak;
  Flow Exec(Interpreter&) const override { return flow; }
};

}  // namespace loupe::jinja
