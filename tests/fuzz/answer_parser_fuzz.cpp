// Any bytes as a model's answer, in any format: in one piece and in cuts that the input chooses, which must come to the same.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "engine/text/answer_parser.h"

namespace {

using loupe::AnswerPiece;

std::string Summary(const std::vector<AnswerPiece>& pieces) {
  std::string content, reasoning, calls;
  for (const AnswerPiece& piece : pieces) {
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent: content += piece.text; break;
      case AnswerPiece::Kind::kReasoning: reasoning += piece.text; break;
      case AnswerPiece::Kind::kCall: calls += "\nCALL " + std::to_string(piece.call) + " " + piece.text + ": "; break;
      case AnswerPiece::Kind::kArguments: calls += piece.text; break;
    }
  }
  return content + "\nREASONING " + reasoning + calls;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  loupe::AnswerParserOptions options;
  options.format = static_cast<loupe::ToolFormat>(data[0] % 3);
  options.tools = {"get_weather", "f"};
  options.parallel = (data[0] & 4) == 0;
  options.reasoning = (data[0] & 8) != 0;
  options.begins_in_reasoning = (data[0] & 24) == 24;
  const std::string text(reinterpret_cast<const char*>(data + 2), size - 2);
  const auto read = [&](size_t cut) {
    loupe::AnswerParser parser(options);
    std::vector<AnswerPiece> all;
    const auto take = [&](std::vector<AnswerPiece> pieces) { all.insert(all.end(), pieces.begin(), pieces.end()); };
    for (size_t at = 0; at < text.size(); at += cut) take(parser.Push(text.substr(at, cut)));
    take(parser.Finish());
    return Summary(all);
  };
  const std::string whole = read(size), cut = read(1 + data[1] % 9);
  if (whole == cut) return 0;
  std::fprintf(stderr, "whole: %s\ncut: %s\n", whole.c_str(), cut.c_str());
  std::abort();
}
