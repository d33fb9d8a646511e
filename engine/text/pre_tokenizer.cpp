#include "engine/text/pre_tokenizer.h"

#include "engine/text/unicode.h"

namespace loupe {
namespace {

bool IsSpace(CharClass cls) { return cls == CharClass::kSpace || cls == CharClass::kNewline; }

// End of the run of characters of one class that starts at `pos`.
size_t SkipClass(std::string_view text, size_t pos, CharClass cls) {
  while (pos < text.size()) {
    const CharInfo c = ReadChar(text, pos);
    if (c.cls != cls) break;
    pos += c.bytes;
  }
  return pos;
}

struct SpaceRun {
  size_t last = 0;  // where its last character starts
  size_t end = 0;
  size_t after_newline = 0;  // behind its last CR or LF; 0 if it has none
};

SpaceRun ScanSpaces(std::string_view text, size_t begin) {
  SpaceRun run{begin, begin, 0};
  while (run.end < text.size()) {
    const CharInfo c = ReadChar(text, run.end);
    if (!IsSpace(c.cls)) break;
    run.last = run.end;
    run.end += c.bytes;
    if (c.cls == CharClass::kNewline) run.after_newline = run.end;
  }
  return run;
}

// `\s+(?!\S)|\s+`: a run leaves its last character to the word that follows.
size_t EndOfSpaces(const SpaceRun& run, size_t begin, bool at_end) {
  return at_end || run.last == begin ? run.end : run.last;
}

// Bytes of 's 't 're 've 'm 'll 'd at `pos`, 0 if there is none. With `any_case` the long s, which folds to s, counts.
size_t Contraction(std::string_view text, size_t pos, bool any_case) {
  if (text[pos] != '\'' || pos + 1 >= text.size()) return 0;
  const auto at = [&](size_t i) -> char {
    const char c = i < text.size() ? text[i] : '\0';
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
  };
  const char first = at(pos + 1);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  const char second = at(pos + 2);
  if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l')) return 3;
  if (any_case && text.substr(pos + 1, 2) == "\xC5\xBF") return 3;
  return 0;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// `digits_apart`: every number is cut out first, so that what precedes one ends there.
size_t NextGpt2Word(std::string_view text, size_t begin, bool digits_apart) {
  const CharInfo first = ReadChar(text, begin);
  if (digits_apart && first.cls == CharClass::kNumber) return begin + first.bytes;
  if (const size_t bytes = Contraction(text, begin, false); bytes > 0) return begin + bytes;
  const auto is_apart = [&](size_t pos) {
    return pos == text.size() || (digits_apart && ReadChar(text, pos).cls == CharClass::kNumber);
  };
  CharClass cls = first.cls;
  if (text[begin] == ' ' && !is_apart(begin + 1)) cls = ReadChar(text, begin + 1).cls;
  if (!IsSpace(cls)) return SkipClass(text, begin + (text[begin] == ' ' ? 1 : 0), cls);
  const SpaceRun run = ScanSpaces(text, begin);
  return EndOfSpaces(run, begin, is_apart(run.end));
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,max}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
size_t NextLlamaWord(std::string_view text, size_t begin, int max_digits) {
  if (const size_t bytes = Contraction(text, begin, true); bytes > 0) return begin + bytes;
  const CharInfo first = ReadChar(text, begin);
  const size_t second = begin + first.bytes;
  if (first.cls == CharClass::kLetter) return SkipClass(text, second, CharClass::kLetter);
  if (first.cls == CharClass::kNumber) {
    size_t end = second;
    for (int digits = 1; digits < max_digits && end < text.size(); ++digits) {
      const CharInfo c = ReadChar(text, end);
      if (c.cls != CharClass::kNumber) break;
      end += c.bytes;
    }
    return end;
  }
  const CharClass next = second < text.size() ? ReadChar(text, second).cls : CharClass::kSpace;
  if (first.cls != CharClass::kNewline && next == CharClass::kLetter) return SkipClass(text, second, next);
  if (first.cls == CharClass::kOther || (text[begin] == ' ' && next == CharClass::kOther)) {
    size_t end = SkipClass(text, second, CharClass::kOther);
    while (end < text.size() && (text[end] == '\r' || text[end] == '\n')) ++end;
    return end;
  }
  const SpaceRun run = ScanSpaces(text, begin);
  if (run.after_newline > 0) return run.after_newline;
  return EndOfSpaces(run, begin, run.end == text.size());
}

struct Name {
  std::string_view name;
  PreTokenizer rule;
};

// The names that converters write; the first of each rule is the one we use ourselves.
constexpr Name kNames[] = {
    {"gpt2", PreTokenizer::kGpt2},          {"gpt-2", PreTokenizer::kGpt2},      {"smollm", PreTokenizer::kSmolLm},
    {"llama-bpe", PreTokenizer::kLlamaBpe}, {"llama3", PreTokenizer::kLlamaBpe}, {"llama-v3", PreTokenizer::kLlamaBpe},
    {"qwen2", PreTokenizer::kQwen2},
};

}  // namespace

std::optional<PreTokenizer> FindPreTokenizer(std::string_view name) {
  for (const Name& row : kNames) {
    if (row.name == name) return row.rule;
  }
  return std::nullopt;
}

std::string_view PreTokenizerNames() { return "gpt2, smollm, llama-bpe, qwen2"; }

size_t NextWord(PreTokenizer rule, std::string_view text, size_t begin) {
  switch (rule) {
    case PreTokenizer::kGpt2:
      return NextGpt2Word(text, begin, false);
    case PreTokenizer::kSmolLm:
      return NextGpt2Word(text, begin, true);
    case PreTokenizer::kLlamaBpe:
      return NextLlamaWord(text, begin, 3);
    case PreTokenizer::kQwen2:
      return NextLlamaWord(text, begin, 1);
  }
  return text.size();
}

}  // namespace loupe
