// Expressions, from the loosest binding (a if b else c) to the tightest (names and literals).
#include <algorithm>
#include <cstdlib>

#include "engine/text/jinja_interp.h"
#include "engine/text/jinja_parser.h"

namespace loupe::jinja {

ExprPtr Parser::Close(std::unique_ptr<Expr> node, std::initializer_list<const Expr*> below) const {
  for (const Expr* child : below) Deepen(node.get(), child);
  return node;
}

void Parser::Deepen(Expr* node, const Expr* below) const {
  if (below == nullptr) return;
  node->depth = std::max(node->depth, below->depth + 1);
  const int most = limits_.max_depth * kFramesPerLevel / 2;
  if (node->depth > most) {
    throw Error(ErrorKind::kLimit, "an expression of more than " + std::to_string(most) + " levels", node->line);
  }
}

void Parser::Deepen(Expr* node, const CallArgs& args) const {
  for (const ExprPtr& arg : args.list) Deepen(node, arg.get());
  for (const auto& arg : args.named) Deepen(node, arg.second.get());
  Deepen(node, args.star.get());
  Deepen(node, args.star_star.get());
}

ExprPtr Parser::Expression(bool with_condition) {
  const Nested nested(this);
  ExprPtr value = Or();
  while (with_condition && IsName("if")) {
    const Token token = Take();
    auto node = Make<ConditionalExpr>(token);
    node->then = std::move(value);
    node->condition = Or();
    if (SkipName("else")) node->otherwise = Expression();
    const std::initializer_list<const Expr*> below = {node->then.get(), node->condition.get(), node->otherwise.get()};
    value = Close(std::move(node), below);
  }
  return value;
}

ExprPtr Parser::Or() {
  ExprPtr left = And();
  while (IsName("or")) {
    auto node = Make<LogicExpr>(Take());
    node->left = std::move(left);
    node->right = And();
    const std::initializer_list<const Expr*> below = {node->left.get(), node->right.get()};
    left = Close(std::move(node), below);
  }
  return left;
}

ExprPtr Parser::And() {
  ExprPtr left = Not();
  while (IsName("and")) {
    auto node = Make<LogicExpr>(Take());
    node->is_and = true;
    node->left = std::move(left);
    node->right = Not();
    const std::initializer_list<const Expr*> below = {node->left.get(), node->right.get()};
    left = Close(std::move(node), below);
  }
  return left;
}

ExprPtr Parser::Not() {
  if (!IsName("not")) return Comparison();
  const Nested nested(this);
  auto node = Make<NotExpr>(Take());
  node->operand = Not();
  const Expr* below = node->operand.get();
  return Close(std::move(node), {below});
}

ExprPtr Parser::Comparison() {
  static constexpr std::pair<const char*, CompareOp> kOps[] = {
      {"==", CompareOp::kEqual}, {"!=", CompareOp::kNotEqual}, {"<", CompareOp::kLess},
      {"<=", CompareOp::kLessEqual}, {">", CompareOp::kGreater}, {">=", CompareOp::kGreaterEqual}};
  ExprPtr first = Binary(0);
  std::unique_ptr<CompareExpr> node;
  for (;;) {
    const Token token = Now();
    const auto* op = std::find_if(std::begin(kOps), std::end(kOps), [this](const auto& o) { return Is(o.first); });
    CompareOp kind;
    if (op != std::end(kOps)) {
      kind = op->second;
      Take();
    } else if (SkipName("in")) {
      kind = CompareOp::kIn;
    } else if (IsName("not") && Ahead().type == TokenType::kName && Ahead().text == "in") {
      Take();
      Take();
      kind = CompareOp::kNotIn;
    } else {
      break;
    }
    if (node == nullptr) {
      node = Make<CompareExpr>(token);
      node->first = std::move(first);
      Deepen(node.get(), node->first.get());
    }
    node->rest.emplace_back(kind, Binary(0));
    Deepen(node.get(), node->rest.back().second.get());
  }
  if (node == nullptr) return first;
  return node;
}

// Level 0: + -; then ~; level 1: * / // %; level 2: **.
ExprPtr Parser::Binary(int level) {
  static const std::vector<std::string> kOps[] = {{"+", "-"}, {"*", "/", "//", "%"}, {"**"}};
  const auto operand = [&] { return level == 0 ? Concat() : level == 1 ? Binary(2) : Unary(); };
  ExprPtr left = operand();
  while (Now().type == TokenType::kOperator && std::count(kOps[level].begin(), kOps[level].end(), Now().text) > 0) {
    const Token token = Take();
    auto node = Make<BinaryExpr>(token);
    node->op = token.text;
    node->left = std::move(left);
    node->right = operand();
    const std::initializer_list<const Expr*> below = {node->left.get(), node->right.get()};
    left = Close(std::move(node), below);
  }
  return left;
}

ExprPtr Parser::Concat() {
  ExprPtr first = Binary(1);
  if (!Is("~")) return first;
  auto node = Make<ConcatExpr>(Now());
  node->parts.push_back(std::move(first));
  while (Skip("~")) node->parts.push_back(Binary(1));
  for (const ExprPtr& part : node->parts) Deepen(node.get(), part.get());
  return node;
}

ExprPtr Parser::Unary(bool with_filter) {
  ExprPtr node;
  if (Is("-") || Is("+")) {
    const Nested nested(this);
    const Token token = Take();
    auto unary = Make<UnaryExpr>(token);
    unary->op = token.text[0];
    unary->operand = Unary(false);
    const Expr* below = unary->operand.get();
    node = Close(std::move(unary), {below});
  } else {
    node = Primary();
  }
  node = Postfix(std::move(node));
  return with_filter ? FiltersAndTests(std::move(node)) : std::move(node);
}

ExprPtr Parser::Primary() {
  const Token token = Now();
  if (token.type == TokenType::kName) {
    Take();
    auto constant = Make<ConstExpr>(token);
    if (token.text == "true" || token.text == "True") return constant->value = Value::Bool(true), std::move(constant);
    if (token.text == "false" || token.text == "False") return constant->value = Value::Bool(false), std::move(constant);
    if (token.text == "none" || token.text == "None") return constant->value = Value::None(), std::move(constant);
    auto name = Make<NameExpr>(token);
    name->name = token.text;
    for (MacroNode* macro : macros_) {
      macro->uses_caller |= token.text == "caller";
      macro->uses_kwargs |= token.text == "kwargs";
      macro->uses_varargs |= token.text == "varargs";
    }
    return name;
  }
  if (token.type == TokenType::kString) {
    std::string text = Take().text;
    while (Now().type == TokenType::kString) text += Take().text;  // adjacent strings are one
    auto constant = Make<ConstExpr>(token);
    constant->value = Value::String(std::move(text));
    return constant;
  }
  if (token.type == TokenType::kInteger || token.type == TokenType::kFloat) return Number();
  if (Skip("(")) {
    ExprPtr inside = Tuple(true, true);
    Expect(")");
    return inside;
  }
  if (Is("[")) return List();
  if (Is("{")) return DictLiteral();
  Unexpected("an expression");
}

ExprPtr Parser::Number() {
  const Token token = Take();
  std::string digits = token.text;
  digits.erase(std::remove(digits.begin(), digits.end(), '_'), digits.end());
  auto constant = Make<ConstExpr>(token);
  if (token.type == TokenType::kFloat) {
    constant->value = Value::Float(std::strtod(digits.c_str(), nullptr));
    return constant;
  }
  const char letter = digits.size() > 1 ? static_cast<char>(digits[1] | 0x20) : '0';
  const int base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
  if (base != 10) digits = digits.substr(2);
  const std::optional<int64_t> value = ParseInteger(digits, base);
  if (!value) FailAt(token, "'" + token.text + "' is not an integer of 64 bits");
  constant->value = Value::Int(*value);
  return constant;
}

ExprPtr Parser::List() {
  auto node = Make<SequenceExpr>(Take());
  while (!Is("]")) {
    if (!node->items.empty()) {
      Expect(",");
      if (Is("]")) break;
    }
    node->items.push_back(Expression());
    Deepen(node.get(), node->items.back().get());
  }
  Expect("]");
  return node;
}

ExprPtr Parser::DictLiteral() {
  auto node = Make<DictExpr>(Take());
  while (!Is("}")) {
    if (!node->items.empty()) {
      Expect(",");
      if (Is("}")) break;
    }
    ExprPtr key = Expression();
    Expect(":");
    ExprPtr value = Expression();
    Deepen(node.get(), key.get());
    Deepen(node.get(), value.get());
    node->items.emplace_back(std::move(key), std::move(value));
  }
  Expect("}");
  return node;
}

ExprPtr Parser::Tuple(bool with_condition, bool in_parentheses) {
  const Token token = Now();
  std::vector<ExprPtr> items;
  bool is_tuple = false;
  for (;;) {
    if (!items.empty()) Expect(",");
    if (Now().type == TokenType::kPrintEnd || Now().type == TokenType::kTagEnd || Is(")")) break;
    items.push_back(Expression(with_condition));
    if (!Is(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && !items.empty()) return std::move(items[0]);
  if (!is_tuple && !in_parentheses) Unexpected("an expression");
  auto node = Make<SequenceExpr>(token);
  node->kind = ListKind::kTuple;
  node->items = std::move(items);
  for (const ExprPtr& item : node->items) Deepen(node.get(), item.get());
  return node;
}

ExprPtr Parser::Postfix(ExprPtr node) {
  for (;;) {
    if (Is(".") || Is("[")) {
      node = Subscript(std::move(node));
    } else if (Is("(")) {
      node = Call(std::move(node));
    } else {
      return node;
    }
  }
}

ExprPtr Parser::FiltersAndTests(ExprPtr node) {
  for (;;) {
    if (Skip("|")) {
      node = Filter(std::move(node));
    } else if (IsName("is")) {
      node = Test(std::move(node));
    } else if (Is("(")) {  // of what a filter gave
      node = Call(std::move(node));
    } else {
      return node;
    }
  }
}

ExprPtr Parser::Subscript(ExprPtr object) {
  const Token token = Take();
  if (token.text == "[") {
    ExprPtr node = Subscripted(std::move(object), token);
    Expect("]");
    return node;
  }
  const Expr* below = object.get();
  if (Now().type == TokenType::kInteger) {  // x.0 is x[0]
    ExprPtr key = Number();
    auto node = Make<ItemExpr>(token);
    node->object = std::move(object);
    node->key = std::move(key);
    return Close(std::move(node), {below});
  }
  auto node = Make<AttributeExpr>(token);
  node->object = std::move(object);
  node->name = Name();
  return Close(std::move(node), {below});
}

ExprPtr Parser::Subscripted(ExprPtr object, const Token& token) {
  const Nested nested(this);
  const auto ends = [this] { return Is(":") || Is("]") || Is(","); };
  ExprPtr first = Is(":") ? nullptr : Expression();
  if (!Is(":")) {
    auto node = Make<ItemExpr>(token);
    if (Is(",")) {
      auto tuple = Make<SequenceExpr>(token);
      tuple->kind = ListKind::kTuple;
      tuple->items.push_back(std::move(first));
      while (Skip(",")) tuple->items.push_back(Expression());
      for (const ExprPtr& item : tuple->items) Deepen(tuple.get(), item.get());
      first = std::move(tuple);
    }
    node->object = std::move(object);
    node->key = std::move(first);
    const std::initializer_list<const Expr*> below = {node->object.get(), node->key.get()};
    return Close(std::move(node), below);
  }
  auto node = Make<SliceExpr>(token);
  node->object = std::move(object);
  node->bounds[0] = std::move(first);
  Expect(":");
  if (!ends()) node->bounds[1] = Expression();
  if (Skip(":") && !ends()) node->bounds[2] = Expression();
  for (const ExprPtr& bound : node->bounds) Deepen(node.get(), bound.get());
  const Expr* below = node->object.get();
  return Close(std::move(node), {below});
}

ExprPtr Parser::Call(ExprPtr callee) {
  auto node = Make<CallExpr>(Now());
  node->callee = std::move(callee);
  node->args = Arguments();
  Deepen(node.get(), node->args);
  const Expr* below = node->callee.get();
  return Close(std::move(node), {below});
}

CallArgs Parser::Arguments() {
  const Nested nested(this);
  const Token open = Now();
  Expect("(");
  CallArgs args;
  bool first = true;
  while (!Is(")")) {
    if (!first) {
      Expect(",");
      if (Is(")")) break;
    }
    first = false;
    OneArgument(&args, open);
  }
  Expect(")");
  return args;
}

void Parser::OneArgument(CallArgs* args, const Token& open) {
  const auto ensure = [&](bool holds) {
    if (!holds) FailAt(open, "arguments in the wrong order: positional, then named, then *, then **");
  };
  if (Skip("*")) {
    ensure(args->star == nullptr && args->star_star == nullptr);
    args->star = Expression();
  } else if (Skip("**")) {
    ensure(args->star_star == nullptr);
    args->star_star = Expression();
  } else if (Now().type == TokenType::kName && Ahead().type == TokenType::kOperator && Ahead().text == "=") {
    ensure(args->star_star == nullptr);
    std::string name = Take().text;
    Take();
    args->named.emplace_back(std::move(name), Expression());
  } else {
    ensure(args->star == nullptr && args->star_star == nullptr && args->named.empty());
    args->list.push_back(Expression());
  }
}

std::string Parser::DottedName() {
  std::string name = Name();
  while (Skip(".")) name += "." + Name();
  return name;
}

ExprPtr Parser::Filter(ExprPtr input) {
  const Token token = Now();
  auto node = Make<FilterExpr>(token);
  node->name = DottedName();
  node->function = FindFilter(node->name);
  if (node->function == nullptr && conditions_ == 0) FailAt(token, "no filter named '" + node->name + "'");
  node->input = std::move(input);
  if (Is("(")) node->args = Arguments();
  Deepen(node.get(), node->args);
  const Expr* below = node->input.get();
  return Close(std::move(node), {below});
}

ExprPtr Parser::Test(ExprPtr input) {
  Take();
  const bool negated = SkipName("not");
  const Token token = Now();
  auto node = Make<TestExpr>(token);
  node->name = DottedName();
  node->function = FindTest(node->name);
  if (node->function == nullptr && conditions_ == 0) FailAt(token, "no test named '" + node->name + "'");
  node->input = std::move(input);
  const TokenType next = Now().type;
  const bool starts_value = next == TokenType::kName || next == TokenType::kString || next == TokenType::kInteger ||
                            next == TokenType::kFloat || Is("[") || Is("{");
  if (Is("(")) {
    node->args = Arguments();
  } else if (starts_value && !IsName("else") && !IsName("or") && !IsName("and")) {
    if (IsName("is")) FailAt(Now(), "tests cannot be chained with is");
    const Nested nested(this);
    node->args.list.push_back(Postfix(Primary()));
  }
  Deepen(node.get(), node->args);
  Deepen(node.get(), node->input.get());
  if (!negated) return node;
  auto inverse = Make<NotExpr>(token);
  inverse->operand = std::move(node);
  const Expr* below = inverse->operand.get();
  return Close(std::move(inverse), {below});
}

}  // namespace loupe::jinja
