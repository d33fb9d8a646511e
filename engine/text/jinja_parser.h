// Template source to syntax tree. Pure; throws jinja::Error with line and column for a syntax error, for a construct
// outside the subset and for nesting beyond the limit.
#pragma once

#include <algorithm>
#include <string_view>

#include "engine/text/jinja_ast.h"
#include "engine/text/jinja_lexer.h"

namespace loupe::jinja {

Body Parse(std::string_view source, const TemplateLimits& limits);

// One token of lookahead over the token list, shared by the two halves of the parser: expressions (jinja_parse_expr.cpp)
// and statements (jinja_parse_statement.cpp).
class Parser {
 public:
  Parser(std::vector<Token> tokens, const TemplateLimits& limits) : tokens_(std::move(tokens)), limits_(limits) {}
  Body Template();

 private:
  struct Nested;  // counts one level of nesting while it lives

  // ---- tokens
  const Token& Now() const { return tokens_[at_]; }
  const Token& Ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token Take();
  bool Is(std::string_view op) const { return Now().type == TokenType::kOperator && Now().text == op; }
  bool IsName(std::string_view name) const { return Now().type == TokenType::kName && Now().text == name; }
  bool Skip(std::string_view op);
  bool SkipName(std::string_view name);
  void Expect(std::string_view op);
  void ExpectName(std::string_view name);
  void ExpectTagEnd();
  std::string Name();
  [[noreturn]] void FailAt(const Token& token, const std::string& message) const;
  [[noreturn]] void Unexpected(const std::string& wanted) const;

  // ---- expressions
  template <class T>
  std::unique_ptr<T> Make(const Token& token) const {
    auto node = std::make_unique<T>();
    node->line = token.line;
    return node;
  }
  // Sets the depth of a node from those below it, and refuses a tree that is too deep to evaluate.
  ExprPtr Close(std::unique_ptr<Expr> node, std::initializer_list<const Expr*> below) const;
  void Deepen(Expr* node, const Expr* below) const;
  void Deepen(Expr* node, const CallArgs& args) const;
  ExprPtr Expression(bool with_condition = true);
  ExprPtr Or();
  ExprPtr And();
  ExprPtr Not();
  ExprPtr Comparison();
  ExprPtr Binary(int level);
  ExprPtr Concat();
  ExprPtr Unary(bool with_filter = true);
  ExprPtr Primary();
  ExprPtr Number();
  ExprPtr Postfix(ExprPtr node);
  ExprPtr FiltersAndTests(ExprPtr node);
  ExprPtr Subscript(ExprPtr object);
  ExprPtr Subscripted(ExprPtr object, const Token& token);
  ExprPtr Call(ExprPtr callee);
  // `name(args)` after `|`; `input` may be null.
  ExprPtr Filter(ExprPtr input);
  ExprPtr Test(ExprPtr input);
  std::string DottedName();
  CallArgs Arguments();
  void OneArgument(CallArgs* args, const Token& open);
  ExprPtr List();
  ExprPtr DictLiteral();
  // One expression, or several with commas as a tuple. `in_parentheses`: may be empty.
  ExprPtr Tuple(bool with_condition, bool in_parentheses = false);

  // ---- statements
  Body Statements(std::initializer_list<const char*> ends);
  std::unique_ptr<Statement> Tag();
  std::unique_ptr<Statement> If();
  std::unique_ptr<Statement> For();
  std::unique_ptr<Statement> Set();
  std::unique_ptr<Statement> Macro();
  std::unique_ptr<Statement> CallBlock();
  std::unique_ptr<Statement> FilterBlock();
  std::unique_ptr<Statement> With();
  std::unique_ptr<Statement> Generation();
  std::unique_ptr<Statement> Jump();
  // Body up to {% `end` %}, which is taken.
  Body BodyUntil(const char* end);
  Target OneTarget(bool with_attribute);
  Target TargetList(bool with_attribute);
  void Signature(MacroNode* macro);
  void MacroBody(MacroNode* macro, const char* end);

  const std::vector<Token> tokens_;
  const TemplateLimits limits_;
  size_t at_ = 0;
  int nesting_ = 0;
  int conditions_ = 0;                     // inside that many if blocks: unknown filters fail only if reached
  int loops_ = 0;                          // inside that many loops of this macro
  std::vector<MacroNode*> macros_;         // whose bodies are being read
};

struct Parser::Nested {
  explicit Nested(Parser* p) : parser(p) {
    if (++parser->nesting_ <= parser->limits_.max_depth) return;
    --parser->nesting_;
    throw Error(ErrorKind::kLimit, "the template is nested more than " + std::to_string(parser->limits_.max_depth) + " deep",
                parser->Now().line, parser->Now().column);
  }
  ~Nested() { --parser->nesting_; }
  Parser* parser;
};

}  // namespace loupe::jinja
