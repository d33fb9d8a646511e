// Statements: text, {{ }}, and the tags of {% %}.
#include "engine/text/jinja_parser.h"

namespace loupe::jinja {

Body Parse(std::string_view source, const TemplateLimits& limits) { return Parser(Tokenize(source), limits).Template(); }

Token Parser::Take() {
  const Token& token = tokens_[at_];
  if (at_ + 1 < tokens_.size()) ++at_;
  return token;
}

bool Parser::Skip(std::string_view op) {
  if (!Is(op)) return false;
  Take();
  return true;
}

bool Parser::SkipName(std::string_view name) {
  if (!IsName(name)) return false;
  Take();
  return true;
}

void Parser::Expect(std::string_view op) {
  if (!Skip(op)) Unexpected("'" + std::string(op) + "'");
}

void Parser::ExpectName(std::string_view name) {
  if (!SkipName(name)) Unexpected("'" + std::string(name) + "'");
}

void Parser::ExpectTagEnd() {
  if (Now().type != TokenType::kTagEnd) Unexpected("'%}'");
  Take();
}

std::string Parser::Name() {
  if (Now().type != TokenType::kName) Unexpected("a name");
  return Take().text;
}

void Parser::FailAt(const Token& token, const std::string& message) const {
  throw Error(ErrorKind::kSyntax, message, token.line, token.column);
}

void Parser::Unexpected(const std::string& wanted) const {
  const Token& token = Now();
  const std::string found = token.type == TokenType::kData   ? "text"
                            : token.type == TokenType::kEnd  ? token.text
                                                             : "'" + token.text.substr(0, 40) + "'";
  FailAt(token, "expected " + wanted + ", found " + found);
}

Body Parser::Template() {
  Body body = Statements({});
  if (Now().type != TokenType::kEnd) Unexpected("the end of the template");
  return body;
}

// Up to a tag whose name is among `ends`; the tag's name is the next token then.
Body Parser::Statements(std::initializer_list<const char*> ends) {
  const Nested nested(this);
  Body body;
  for (;;) {
    const Token token = Now();
    if (token.type == TokenType::kData) {
      auto node = std::make_unique<DataNode>();
      node->text = Take().text;
      node->line = token.line;
      body.push_back(std::move(node));
    } else if (token.type == TokenType::kPrintBegin) {
      Take();
      auto node = std::make_unique<PrintNode>();
      node->line = token.line;
      node->value = Tuple(true);
      if (Now().type != TokenType::kPrintEnd) Unexpected("'}}'");
      Take();
      body.push_back(std::move(node));
    } else if (token.type == TokenType::kTagBegin) {
      Take();
      for (const char* end : ends) {
        if (IsName(end)) return body;
      }
      body.push_back(Tag());
      body.back()->line = token.line;
      ExpectTagEnd();
    } else {
      if (ends.size() > 0) Unexpected("{% " + std::string(*(ends.end() - 1)) + " %}");
      return body;
    }
  }
}

Body Parser::BodyUntil(const char* end) {
  ExpectTagEnd();
  Body body = Statements({end});
  ExpectName(end);
  return body;
}

std::unique_ptr<Statement> Parser::Tag() {
  if (IsName("if")) return If();
  if (IsName("for")) return For();
  if (IsName("set")) return Set();
  if (IsName("macro")) return Macro();
  if (IsName("call")) return CallBlock();
  if (IsName("filter")) return FilterBlock();
  if (IsName("with")) return With();
  if (IsName("generation")) return Generation();
  if (IsName("break") || IsName("continue")) return Jump();
  if (Now().type != TokenType::kName) Unexpected("a tag");
  FailAt(Now(), "tag '" + Now().text + "' is not known here; supported: if, for, set, macro, call, filter, with, generation, "
                                       "break, continue, raw");
}

std::unique_ptr<Statement> Parser::If() {
  auto node = std::make_unique<IfNode>();
  ++conditions_;
  do {
    Take();  // if, elif
    ExprPtr condition = Tuple(false);
    ExpectTagEnd();
    Body body = Statements({"elif", "else", "endif"});
    node->branches.emplace_back(std::move(condition), std::move(body));
  } while (IsName("elif"));
  if (SkipName("else")) {
    node->otherwise = BodyUntil("endif");
  } else {
    ExpectName("endif");
  }
  --conditions_;
  return node;
}

std::unique_ptr<Statement> Parser::For() {
  Take();
  auto node = std::make_unique<ForNode>();
  node->target = TargetList(false);
  ExpectName("in");
  node->items = Tuple(false);
  if (SkipName("if")) node->condition = Expression();
  if (IsName("recursive")) FailAt(Now(), "recursive loops are not supported; use a macro that calls itself");
  ExpectTagEnd();
  ++loops_;
  node->body = Statements({"else", "endfor"});
  --loops_;
  if (SkipName("else")) {
    node->otherwise = BodyUntil("endfor");
  } else {
    ExpectName("endfor");
  }
  return node;
}

std::unique_ptr<Statement> Parser::Set() {
  Take();
  Target target = TargetList(true);
  if (Skip("=")) {
    auto node = std::make_unique<SetNode>();
    node->target = std::move(target);
    node->value = Tuple(true);
    return node;
  }
  auto node = std::make_unique<SetBlockNode>();
  node->target = std::move(target);
  while (Skip("|")) node->filter = Filter(std::move(node->filter));
  node->body = BodyUntil("endset");
  return node;
}

std::unique_ptr<Statement> Parser::Macro() {
  Take();
  auto node = std::make_unique<MacroNode>();
  node->name = Name();
  Signature(node.get());
  MacroBody(node.get(), "endmacro");
  return node;
}

void Parser::Signature(MacroNode* macro) {
  Expect("(");
  while (!Is(")")) {
    if (!macro->parameters.empty()) Expect(",");
    const Token token = Now();
    macro->parameters.push_back(Name());
    if (Skip("=")) {
      macro->defaults.push_back(Expression());
    } else if (!macro->defaults.empty()) {
      FailAt(token, "parameter '" + token.text + "' without a default after one with a default");
    }
  }
  Expect(")");
}

void Parser::MacroBody(MacroNode* macro, const char* end) {
  const int loops = std::exchange(loops_, 0);
  macros_.push_back(macro);
  macro->body = BodyUntil(end);
  macros_.pop_back();
  loops_ = loops;
  for (const std::string& name : macro->parameters) {  // then they are ordinary parameters
    if (name == "caller") macro->uses_caller = false;
    if (name == "kwargs") macro->uses_kwargs = false;
    if (name == "varargs") macro->uses_varargs = false;
  }
}

std::unique_ptr<Statement> Parser::CallBlock() {
  Take();
  auto node = std::make_unique<CallBlockNode>();
  node->body.name = "caller";
  if (Is("(")) Signature(&node->body);
  const Token token = Now();
  ExprPtr call = Expression();
  auto* typed = dynamic_cast<CallExpr*>(call.get());
  if (typed == nullptr) FailAt(token, "expected a call of a macro");
  call.release();
  node->call.reset(typed);
  MacroBody(&node->body, "endcall");
  return node;
}

std::unique_ptr<Statement> Parser::FilterBlock() {
  Take();
  auto node = std::make_unique<FilterBlockNode>();
  node->filter = Filter(nullptr);
  while (Skip("|")) node->filter = Filter(std::move(node->filter));
  node->body = BodyUntil("endfilter");
  return node;
}

std::unique_ptr<Statement> Parser::With() {
  Take();
  auto node = std::make_unique<WithNode>();
  while (Now().type != TokenType::kTagEnd) {
    if (!node->values.empty()) Expect(",");
    Target target = OneTarget(false);
    Expect("=");
    node->values.emplace_back(std::move(target), Expression());
  }
  node->body = BodyUntil("endwith");
  return node;
}

// Marks what an assistant wrote, for training; here it is only a scope.
std::unique_ptr<Statement> Parser::Generation() {
  Take();
  auto node = std::make_unique<WithNode>();
  const int loops = std::exchange(loops_, 0);
  node->body = BodyUntil("endgeneration");
  loops_ = loops;
  return node;
}

std::unique_ptr<Statement> Parser::Jump() {
  const Token token = Take();
  if (loops_ == 0) FailAt(token, "'" + token.text + "' outside a loop");
  auto node = std::make_unique<JumpNode>();
  node->flow = token.text == "break" ? Flow::kBreak : Flow::kContinue;
  return node;
}

Target Parser::OneTarget(bool with_attribute) {
  const Nested nested(this);
  if (Skip("(")) {
    Target target = TargetList(with_attribute);
    Expect(")");
    return target;
  }
  const Token token = Now();
  Target target;
  target.name = Name();
  const auto& n = target.name;
  if (n == "true" || n == "false" || n == "none" || n == "True" || n == "False" || n == "None") {
    FailAt(token, "cannot assign to " + n);
  }
  if (with_attribute && Skip(".")) {
    target.kind = Target::Kind::kAttribute;
    target.attribute = Name();
  }
  return target;
}

Target Parser::TargetList(bool with_attribute) {
  Target first = OneTarget(with_attribute);
  if (!Is(",")) return first;
  Target tuple;
  tuple.kind = Target::Kind::kTuple;
  tuple.items.push_back(std::move(first));
  while (Skip(",")) {
    if (Now().type != TokenType::kName && !Is("(")) break;
    if (IsName("in")) break;
    tuple.items.push_back(OneTarget(with_attribute));
  }
  return tuple;
}

}  // namespace loupe::jinja
