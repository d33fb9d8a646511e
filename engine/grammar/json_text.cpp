#include "engine/grammar/json_text.h"

#include <map>

#include "engine/text/unicode.h"

namespace loupe::grammar {

void JsonText::AddSpace(StateId from, StateId to) {
  const StateId indent = nfa_.NewState();
  nfa_.AddEmpty(from, to);
  nfa_.AddByte(from, ' ', ' ', to);
  nfa_.AddByte(from, '\n', '\n', indent);
  for (const char c : {' ', '\t'}) nfa_.AddByte(indent, c, c, indent);
  nfa_.AddEmpty(indent, to);
}

void JsonText::AddColon(StateId from, StateId to) {
  const StateId colon = nfa_.NewState();
  nfa_.AddByte(from, ':', ':', colon);
  AddSpace(colon, to);
}

// What follows a backslash.
void JsonText::AddEscape(StateId from, StateId to) {
  for (const char c : std::string_view("\"\\/bfnrt")) nfa_.AddByte(from, c, c, to);
  const auto hex = [&](StateId a, std::string_view ranges, StateId b) {
    for (size_t i = 0; i < ranges.size(); i += 2) nfa_.AddByte(a, ranges[i], ranges[i + 1], b);
  };
  constexpr std::string_view kAny = "09AFaf";
  StateId s[8];
  for (StateId& state : s) state = nfa_.NewState();
  nfa_.AddByte(from, 'u', 'u', s[0]);
  hex(s[0], "09ACEFacef", s[1]);
  hex(s[1], kAny, s[2]);
  hex(s[2], kAny, s[3]);
  hex(s[3], kAny, to);
  // D000 to D7FF are characters, D800 to DBFF begin a pair whose other half is DC00 to DFFF.
  hex(s[0], "DDdd", s[4]);
  hex(s[4], "07", s[2]);
  hex(s[4], "89ABab", s[5]);
  hex(s[5], kAny, s[6]);
  hex(s[6], kAny, s[7]);
  const StateId other = nfa_.NewState(), half = nfa_.NewState();
  nfa_.AddText(s[7], "\\u", other);
  hex(other, "DDdd", half);
  hex(half, "CFcf", s[2]);
}

Rule JsonText::Character() {
  if (character_) return *character_;
  character_ = nfa_.NewRule();
  const StateId escape = nfa_.NewState();
  AddCharacter(nfa_, character_->start, CharSet({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}).Complement(), character_->end, Spelling::kPlain);
  nfa_.AddByte(character_->start, '\\', '\\', escape);
  AddEscape(escape, character_->end);
  return *character_;
}

Rule JsonText::StringTail() {
  if (tail_) return *tail_;
  tail_ = nfa_.NewRule();
  const StateId escape = nfa_.NewState();
  AddCharacter(nfa_, tail_->start, CharSet({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}).Complement(), tail_->start, Spelling::kPlain);
  nfa_.AddByte(tail_->start, '\\', '\\', escape);
  AddEscape(escape, tail_->start);
  nfa_.AddByte(tail_->start, '"', '"', tail_->end);
  return *tail_;
}

void JsonText::AddAnyString(StateId from, StateId to) {
  const StateId inside = nfa_.NewState();
  nfa_.AddByte(from, '"', '"', inside);
  nfa_.AddCall(inside, StringTail(), to);
}

void JsonText::AddString(StateId from, int min, int max, StateId to) {
  if (min == 0 && max < 0) return AddAnyString(from, to);
  StateId at = nfa_.NewState();
  nfa_.AddByte(from, '"', '"', at);
  for (int i = 0; i < min; ++i) {
    const StateId next = nfa_.NewState();
    nfa_.AddCall(at, Character(), next);
    at = next;
  }
  if (max < 0) return nfa_.AddCall(at, StringTail(), to);
  nfa_.AddByte(at, '"', '"', to);
  for (int i = min; i < max; ++i) {
    const StateId next = nfa_.NewState();
    nfa_.AddCall(at, Character(), next);
    nfa_.AddByte(next, '"', '"', to);
    at = next;
  }
}

void JsonText::AddOtherString(StateId from, const std::vector<std::string>& names, StateId to) {
  if (names.empty()) return AddAnyString(from, to);
  // The names as a tree of characters, each spelled in one way: whatever leaves the tree is another string.
  struct Node {
    StateId state = -1;
    std::map<char32_t, size_t> children;
    bool is_name = false;
  };
  std::vector<Node> nodes(1);
  nodes[0].state = nfa_.NewState();
  for (const std::string& name : names) {
    size_t at = 0;
    for (std::string_view rest = name; !rest.empty();) {
      char32_t c = 0;
      const int bytes = DecodeUtf8(rest, &c);
      if (bytes == 0) throw Refusal("a property's name is not UTF-8");
      rest.remove_prefix(static_cast<size_t>(bytes));
      const auto [child, fresh] = nodes[at].children.try_emplace(c, nodes.size());
      at = child->second;
      if (fresh) nodes.push_back({nfa_.NewState(), {}, false});
    }
    nodes[at].is_name = true;
  }
  const StateId other = nfa_.NewState();
  AddCharacter(nfa_, other, CharSet::Any(), other, Spelling::kJsonString);
  nfa_.AddByte(other, '"', '"', to);
  nfa_.AddByte(from, '"', '"', nodes[0].state);
  for (const Node& node : nodes) {
    std::vector<CharSet::Range> taken;
    for (const auto& [c, child] : node.children) {
      taken.emplace_back(c, c);
      AddCharacter(nfa_, node.state, CharSet({{c, c}}), nodes[child].state, Spelling::kJsonString);
    }
    AddCharacter(nfa_, node.state, CharSet(std::move(taken)).Complement(), other, Spelling::kJsonString);
    if (!node.is_name) nfa_.AddByte(node.state, '"', '"', to);
  }
}

void JsonText::AddInteger(StateId from, StateId to) {
  const StateId sign = nfa_.NewState(), digits = nfa_.NewState();
  nfa_.AddByte(from, '-', '-', sign);
  nfa_.AddEmpty(from, sign);
  nfa_.AddByte(sign, '0', '0', to);
  nfa_.AddByte(sign, '1', '9', digits);
  nfa_.AddByte(digits, '0', '9', digits);
  nfa_.AddEmpty(digits, to);
}

// At most two digits of exponent: what is written fits a double.
void JsonText::AddNumber(StateId from, StateId to) {
  const StateId whole = nfa_.NewState(), point = nfa_.NewState(), digits = nfa_.NewState();
  const StateId exponent = nfa_.NewState(), sign = nfa_.NewState(), second = nfa_.NewState();
  AddInteger(from, whole);
  nfa_.AddEmpty(whole, to);
  nfa_.AddByte(whole, '.', '.', point);
  nfa_.AddByte(point, '0', '9', digits);
  nfa_.AddByte(digits, '0', '9', digits);
  nfa_.AddEmpty(digits, to);
  for (const StateId mantissa : {whole, digits}) {
    for (const char e : {'e', 'E'}) nfa_.AddByte(mantissa, e, e, exponent);
  }
  for (const char s : {'+', '-'}) nfa_.AddByte(exponent, s, s, sign);
  nfa_.AddEmpty(exponent, sign);
  nfa_.AddByte(sign, '0', '9', second);
  nfa_.AddEmpty(second, to);
  nfa_.AddByte(second, '0', '9', to);
}

void JsonText::AddList(StateId from, char open, const std::vector<Part>& first, const Part& rest, int min, int max, char close,
                       StateId to) {
  StateId item = nfa_.NewState(), before = nfa_.NewState();
  nfa_.AddByte(from, open, open, before);
  AddSpace(before, item);
  if (min == 0) nfa_.AddByte(item, close, close, to);
  const int known = static_cast<int>(first.size());
  // Items that are counted have states of their own; what follows them goes round.
  const int counted = rest ? std::max(min, max < 0 ? known : max) : (max < 0 ? known : std::min(known, max));
  const auto end = [&](StateId after) {
    const StateId closing = nfa_.NewState();
    AddSpace(after, closing);
    nfa_.AddByte(closing, close, close, to);
  };
  const auto comma = [&](StateId after) {
    const StateId space = nfa_.NewState(), next = nfa_.NewState();
    nfa_.AddByte(after, ',', ',', space);
    AddSpace(space, next);
    return next;
  };
  for (int i = 0; i < counted; ++i) {
    const StateId after = nfa_.NewState();
    i < known ? first[static_cast<size_t>(i)](item, after) : rest(item, after);
    if (i + 1 >= min) end(after);
    if (i + 1 < counted || (rest && max < 0)) item = comma(after);
  }
  if (!rest || max >= 0) return;
  // Not `item` itself, which may be closed at once.
  const StateId again = nfa_.NewState(), after = nfa_.NewState();
  nfa_.AddEmpty(item, again);
  rest(again, after);
  end(after);
  nfa_.AddEmpty(comma(after), again);
}

Rule JsonText::Value() {
  if (value_) return *value_;
  value_ = nfa_.NewRule();
  const auto [start, end] = *value_;
  AddAnyString(start, end);
  AddNumber(start, end);
  for (const char* word : {"true", "false", "null"}) nfa_.AddText(start, word, end);
  AddAnyObject(start, end);
  AddList(start, '[', {}, [this](StateId a, StateId b) { AddAnyValue(a, b); }, 0, -1, ']', end);
  return *value_;
}

void JsonText::AddAnyValue(StateId from, StateId to) { nfa_.AddCall(from, Value(), to); }

void JsonText::AddAnyObject(StateId from, StateId to) {
  const Part member = [this](StateId a, StateId b) {
    const StateId name = nfa_.NewState(), colon = nfa_.NewState();
    AddAnyString(a, name);
    AddColon(name, colon);
    AddAnyValue(colon, b);
  };
  AddList(from, '{', {}, member, 0, -1, '}', to);
}

void JsonText::AddLiteral(StateId from, const Json& value, StateId to) {
  if (value.is_string()) return nfa_.AddText(from, "\"" + SpellJson(value.get_ref<const std::string&>()) + "\"", to);
  if (!value.is_structured()) return nfa_.AddText(from, value.dump(), to);
  std::vector<Part> parts;
  for (const auto& [key, item] : value.items()) {
    parts.push_back([this, &value, name = key, &item = item](StateId a, StateId b) {
      if (value.is_array()) return AddLiteral(a, item, b);
      const StateId named = nfa_.NewState(), colon = nfa_.NewState();
      AddLiteral(a, Json(name), named);
      AddColon(named, colon);
      AddLiteral(colon, item, b);
    });
  }
  const int size = static_cast<int>(parts.size());
  AddList(from, value.is_array() ? '[' : '{', parts, nullptr, size, size, value.is_array() ? ']' : '}', to);
}

}  // namespace loupe::grammar
