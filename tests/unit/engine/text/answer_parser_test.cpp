// Recorded answers of each format, in one piece and byte by byte.
#include "engine/text/answer_parser.h"

#include <gtest/gtest.h>

namespace loupe::testing {
namespace {

struct Parsed {
  std::string content, reasoning;
  std::vector<std::pair<std::string, std::string>> calls;
  std::vector<AnswerPiece> pieces;
  bool operator==(const Parsed& other) const { return content == other.content && reasoning == other.reasoning && calls == other.calls; }
};

Parsed Parse(const AnswerParserOptions& options, const std::string& text, size_t cut) {
  AnswerParser parser(options);
  Parsed out;
  const auto take = [&](std::vector<AnswerPiece> pieces) {
    for (AnswerPiece& piece : pieces) {
      switch (piece.kind) {
        case AnswerPiece::Kind::kContent: out.content += piece.text; break;
        case AnswerPiece::Kind::kReasoning: out.reasoning += piece.text; break;
        case AnswerPiece::Kind::kCall:
          EXPECT_EQ(piece.call, static_cast<int>(out.calls.size()));
          out.calls.emplace_back(piece.text, "");
          break;
        case AnswerPiece::Kind::kArguments: out.calls.at(static_cast<size_t>(piece.call)).second += piece.text; break;
      }
      out.pieces.push_back(std::move(piece));
    }
  };
  for (size_t at = 0; at < text.size(); at += cut) take(parser.Push(text.substr(at, cut)));
  take(parser.Finish());
  return out;
}

void Check(const AnswerParserOptions& options, const std::string& text, const Parsed& expected) {
  for (const size_t cut : {size_t{1}, size_t{2}, size_t{7}, text.size() + 1}) {
    const Parsed got = Parse(options, text, cut);
    EXPECT_EQ(got.content, expected.content) << text << ", cut " << cut;
    EXPECT_EQ(got.reasoning, expected.reasoning) << text << ", cut " << cut;
    EXPECT_EQ(got.calls, expected.calls) << text << ", cut " << cut;
  }
}

AnswerParserOptions Options(ToolFormat format) {
  AnswerParserOptions options;
  options.format = format;
  options.tools = {"get_weather", "add"};
  return options;
}

TEST(AnswerParser, Hermes) {
  const AnswerParserOptions options = Options(ToolFormat::kHermes);
  Check(options, "Just text, 1 < 2 <tool", {"Just text, 1 < 2 <tool", "", {}, {}});
  Check(options, "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Pa}r\\\"is\"}}\n</tool_call>",
        {"", "", {{"get_weather", "{\"city\": \"Pa}r\\\"is\"}"}}, {}});
  Check(options, "I look.\n<tool_call>{\"arguments\": {\"a\": [1, {}]}, \"name\": \"add\"}</tool_call>\n<tool_call>\n{\"name\": \"other\"}\n</tool_call>\nDone.",
        {"I look.\nDone.", "", {{"add", "{\"a\": [1, {}]}"}, {"other", "{}"}}, {}});
  Check(options, "<tool_call>{\"name\": \"add\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>", {"", "", {{"add", "{\"a\": 1}"}}, {}});
  Check(options, "<tool_call>not json</tool_call>", {"<tool_call>not json</tool_call>", "", {}, {}});
  Check(options, "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1", {"", "", {{"add", "{\"a\": 1"}}, {}});
  Check(options, "<tool_call>{\"name\": \"add\", \"argumenty\": {}}</tool_call>", {"<tool_call>{\"name\": \"add\", \"argumenty\": {}}</tool_call>", "", {}, {}});
  Check(options, "<tool_call>{\"name\": \"add\", \"arguments\": nil}</tool_call>", {"<tool_call>{\"name\": \"add\", \"arguments\": nil}</tool_call>", "", {}, {}});
  Check(options, "<tool_call>{\"na", {"<tool_call>{\"na", "", {}, {}});
  AnswerParserOptions single = options;
  single.parallel = false;
  Check(single, "<tool_call>{\"name\": \"add\"}</tool_call><tool_call>{\"name\": \"get_weather\"}</tool_call>", {"", "", {{"add", "{}"}}, {}});
  AnswerParserOptions none = options;
  none.tools.clear();
  Check(none, "<tool_call>{\"name\": \"add\"}</tool_call>", {"<tool_call>{\"name\": \"add\"}</tool_call>", "", {}, {}});
}

TEST(AnswerParser, NamesComeBeforeArguments) {
  const std::string text = "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": 2}}</tool_call>";
  const Parsed got = Parse(Options(ToolFormat::kHermes), text, 3);
  ASSERT_GE(got.pieces.size(), 3u);
  EXPECT_EQ(got.pieces[0].kind, AnswerPiece::Kind::kCall);
  EXPECT_EQ(got.pieces[0].text, "add");
  EXPECT_EQ(got.pieces[1].kind, AnswerPiece::Kind::kArguments);
  EXPECT_EQ(got.pieces[1].text.substr(0, 1), "{");
}

TEST(AnswerParser, LlamaJson) {
  const AnswerParserOptions options = Options(ToolFormat::kLlamaJson);
  Check(options, "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Rome\"}}", {"", "", {{"get_weather", "{\"city\": \"Rome\"}"}}, {}});
  Check(options, "<|python_tag|>{\"type\": \"function\", \"name\": \"add\", \"parameters\": {\"a\": 1}}; {\"name\": \"add\", \"parameters\": {}}",
        {"", "", {{"add", "{\"a\": 1}"}, {"add", "{}"}}, {}});
  Check(options, "<|python_tag|>get_weather.call(city=\"Rome, IT\", days=3, now=True)", {"", "", {{"get_weather", R"({"city":"Rome, IT","days":3,"now":true})"}}, {}});
  Check(options, "{\"answer\": 42}", {"{\"answer\": 42}", "", {}, {}});
  Check(options, "{\"name\": \"Ada\", \"parameters\": {}}", {"{\"name\": \"Ada\", \"parameters\": {}}", "", {}, {}});
  Check(options, "add three numbers", {"add three numbers", "", {}, {}});
  Check(options, "Text {\"name\": \"add\"}", {"Text {\"name\": \"add\"}", "", {}, {}});
}

TEST(AnswerParser, Harmony) {
  const AnswerParserOptions options = Options(ToolFormat::kHarmony);
  Check(options,
        "<|channel|>analysis<|message|>Weather is wanted.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        "<|constrain|>json<|message|>{\"city\": \"Oslo\"}<|call|>",
        {"", "Weather is wanted.", {{"get_weather", "{\"city\": \"Oslo\"}"}}, {}});
  Check(options, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>", {"Hello.", "Hm.", {}, {}});
  Check(options, "Hello.", {"Hello.", "", {}, {}});
}

TEST(AnswerParser, Reasoning) {
  AnswerParserOptions options = Options(ToolFormat::kHermes);
  options.reasoning = true;
  Check(options, "<think>\nI add: </thin\n</think>\n\nIt is 3.", {"It is 3.", "I add: </thin\n", {}, {}});
  Check(options, "<think>x</think><tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>", {"", "x", {{"add", "{}"}}, {}});
  Check(options, "No thoughts <think>.", {"No thoughts <think>.", "", {}, {}});
  Check(options, "<think>cut o", {"", "cut o", {}, {}});
  options.begins_in_reasoning = true;
  Check(options, "\nso\n</think>\nYes", {"Yes", "so\n", {}, {}});
}

TEST(AnswerParser, FormatsByTemplate) {
  EXPECT_EQ(ToolFormatOf("{{ '<tool_call>' }}"), ToolFormat::kHermes);
  EXPECT_EQ(ToolFormatOf("<|start_header_id|>ipython"), ToolFormat::kLlamaJson);
  EXPECT_EQ(ToolFormatOf("<|channel|>final<|message|>"), ToolFormat::kHarmony);
  EXPECT_EQ(ToolFormatOf("<|im_start|>"), ToolFormat::kHermes);
  for (const ToolFormat format : {ToolFormat::kHermes, ToolFormat::kLlamaJson, ToolFormat::kHarmony}) EXPECT_EQ(ParseToolFormat(ToolFormatName(format)), format);
}

}  // namespace
}  // namespace loupe::testing
