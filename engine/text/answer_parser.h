// Takes an answer apart as it comes: what the model thought, what it said, which tools it calls. Text is given in any cut;
// what is certain comes out at once, what may still become a tag is held back. The pieces of a call joined together are the
// same whatever the cuts were. One a sample; one thread at a time.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/call_scanner.h"

namespace loupe {

// How a model writes a call.
enum class ToolFormat {
  kHermes,     // <tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen)
  kLlamaJson,  // the answer is {"name": ..., "parameters": {...}}, several separated by semicolons; or name.call(key="value");
               // either may stand behind <|python_tag|> (Llama 3.x)
  kHarmony,    // channels: analysis, commentary to=functions.name, final (gpt-oss)
};
// By what a chat template mentions; hermes if that says nothing.
ToolFormat ToolFormatOf(std::string_view template_source);
const char* ToolFormatName(ToolFormat format);                       // hermes, llama, harmony
std::optional<ToolFormat> ParseToolFormat(std::string_view name);

struct AnswerPiece {
  enum class Kind {
    kContent,
    kReasoning,
    kCall,       // a call begins; text is the tool's name
    kArguments,  // the next piece of the arguments of `call`
  };
  Kind kind = Kind::kContent;
  std::string text;
  int call = -1;  // calls are numbered in the order of the answer
};

struct AnswerParserOptions {
  ToolFormat format = ToolFormat::kHermes;
  std::set<std::string> tools;     // that may be called; empty: calls are text like any other
  bool parallel = true;            // false: calls after the first are dropped
  bool reasoning = false;          // <think> ... </think> is told apart
  bool begins_in_reasoning = false;  // the prompt ends with <think>
};

class AnswerParser {
 public:
  explicit AnswerParser(AnswerParserOptions options);

  std::vector<AnswerPiece> Push(std::string_view text);
  // The answer is over: what was held back.
  std::vector<AnswerPiece> Finish();
  int num_calls() const { return num_calls_; }

 private:
  enum class State {
    kStart,      // nothing but white space yet
    kText,       // content
    kReasoning,
    kCall,       // inside of a call's JSON
    kAfterCall,  // behind it, where its closing tag or the next call comes
    kPython,     // Llama's name.call(...), until the answer's end
    kHeader,     // harmony: between <|start|> or <|channel|> and <|message|>
  };

  bool StepStart(bool last);
  bool StepText(bool last);
  bool StepReasoning(bool last);
  bool StepCall(bool last);
  bool StepAfterCall(bool last);
  bool StepHeader(bool last);
  void EndPython();
  void BeginCall();
  void Say(AnswerPiece::Kind kind, std::string text);
  // Moves what cannot be the beginning of one of the tags out of the buffer; true if a whole one stands at its front then.
  bool TakeUntil(const std::vector<std::string_view>& tags, AnswerPiece::Kind kind, std::string_view* found, bool last);
  std::vector<AnswerPiece> Run(bool last);

  AnswerParserOptions options_;
  State state_;
  std::string buffer_;  // not yet understood
  std::string raw_;     // of a call that may turn out to be none
  std::optional<CallScanner> scanner_;
  bool told_name_ = false;
  bool skip_space_ = false;      // line ends behind <think>, </think> and a call are no content
  bool first_line_end_ = false;  // directly behind <think>
  std::string channel_;          // harmony
  int num_calls_ = 0;
  std::vector<AnswerPiece> out_;
};

}  // namespace loupe
