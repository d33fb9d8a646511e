// What clients get to see: OpenAI's objects from what the engine streams. An Answer gathers the events of one HTTP
// request (all its prompts and samples) and makes either frames as they come or one object at the end. Used by one
// handler, on its strand; knows nothing of sockets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/response_stream.h"
#include "engine/text/answer_parser.h"
#include "nlohmann/json.hpp"
#include "server/openai_request.h"

namespace loupe {

struct ToolCall {
  std::string name, arguments;
};

// One choice of the answer: one sample of one prompt.
struct Choice {
  std::string text;
  std::optional<AnswerParser> parser;  // of an answer that may hold more than text
  std::string reasoning;
  std::vector<ToolCall> calls;
  std::vector<int32_t> token_ids;
  std::vector<TokenLogprobs> logprobs;
  bool opened = false;  // its first frame is out
  bool finished = false;
  Finished end;
  int64_t text_offset = 0;  // characters before the next token, for completion logprobs
};

class Answer {
 public:
  // `prompts` are the ids that were submitted, one entry a prompt; choice index = prompt * n + sample. `parser`: how a
  // chat's answer is taken apart; none: it is text.
  Answer(const ApiRequest& request, std::string id, std::string model, std::vector<std::vector<int32_t>> prompts,
         const std::optional<AnswerParserOptions>& parser = std::nullopt);

  // Gather. The frames of a streaming answer ("data: {...}\n\n") are appended to `frames` if it is not null.
  // PromptScored gives no frame: its numbers go out with the first one of each choice.
  void Add(int prompt, PromptScored scored) { scores_[static_cast<size_t>(prompt)] = std::move(scored.tokens); }
  void Add(int prompt, const Delta& delta, std::string* frames);
  void Add(int prompt, const Finished& finished, std::string* frames);

  bool finished() const { return num_finished_ == choices_.size(); }
  const std::vector<Choice>& choices() const { return choices_; }
  int completion_tokens() const;
  int prompt_tokens() const;

  // The whole answer (chat.completion, text_completion).
  nlohmann::ordered_json Whole() const;
  // What closes a stream: the usage chunk if asked for, then [DONE].
  std::string LastFrames() const;

  nlohmann::ordered_json Usage() const;

 private:
  nlohmann::ordered_json Chunk(nlohmann::ordered_json choices) const;
  nlohmann::ordered_json ChunkChoice(int index, const std::string& text) const;
  void Open(int index, std::string* frames);
  // Takes the pieces of a choice in, and tells them in deltas if frames are wanted; `first` is what the first frame holds.
  void Tell(int index, std::vector<AnswerPiece> pieces, nlohmann::ordered_json first, std::string* frames);
  std::string CallId(size_t choice, size_t call) const;
  nlohmann::ordered_json Message(size_t choice) const;
  const std::vector<TokenLogprobs>& ScoresOf(size_t choice) const;
  nlohmann::ordered_json ChoiceLogprobs(size_t choice) const;

  const ApiRequest& request_;
  const std::string id_;
  const std::string model_;
  const int64_t created_unix_s_;
  const std::vector<std::vector<int32_t>> prompts_;
  std::vector<std::vector<TokenLogprobs>> scores_;  // of the prompts' tokens, if asked for and known
  std::vector<Choice> choices_;
  size_t num_finished_ = 0;
};

// ---- the parts, for themselves
std::string SseFrame(const nlohmann::ordered_json& json);  // "data: {...}\n\n"
inline constexpr const char* kSseDone = "data: [DONE]\n\n";
inline constexpr const char* kSsePing = ": still working\n\n";

// The `id` of an answer's objects, from the request's: "chatcmpl-..." or "cmpl-...".
std::string ShownId(Endpoint endpoint, const std::string& id);
const char* OpenAiFinishReason(FinishReason reason);
// The exact cause: the matched stop string, the matched token id as a number, "deadline", "context"; null for a plain
// end.
nlohmann::ordered_json StopReason(const Finished& finished, const SamplingParams& sampling);
nlohmann::ordered_json ChatLogprobs(const std::vector<TokenLogprobs>& tokens);
// OpenAI's four lists. `num_top` best beside each; `offset` is advanced by the characters of the tokens.
nlohmann::ordered_json CompletionLogprobs(const std::vector<TokenLogprobs>& tokens, int num_top, int64_t* offset);
// Those of an echoed prompt: the first token has none, and does not count in the offsets if `text` does not begin with it.
nlohmann::ordered_json EchoLogprobs(const std::vector<TokenLogprobs>& tokens, int num_top, const std::string& text);
// As vLLM has them: null for the first token, then objects by token id; `rank` is null beyond the best.
nlohmann::ordered_json PromptLogprobs(const std::vector<TokenLogprobs>& tokens, int num_top);
// The sum of several samples' reports.
KvReport SumReports(const std::vector<KvReport>& reports);
// OpenAI's clients and JSON know no infinity: an impossible token has -9999.
double SafeLogprob(float logprob);

}  // namespace loupe
