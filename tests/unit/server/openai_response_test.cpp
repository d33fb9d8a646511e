#include "server/openai_response.h"

#include <limits>

#include "gtest/gtest.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

ApiRequest Ask(Endpoint endpoint, int n = 1) {
  ApiRequest request;
  request.endpoint = endpoint;
  request.engine.n = n;
  request.prompts.resize(2);
  request.prompts[0].text = "Zwölf";
  request.prompts[1].text = "x";
  return request;
}

Delta Text(int index, const std::string& text, std::vector<int32_t> ids = {1}) {
  Delta delta;
  delta.index = index;
  delta.text = text;
  delta.token_ids = std::move(ids);
  return delta;
}

Finished End(int index, FinishReason reason, int tokens) {
  Finished finished;
  finished.index = index;
  finished.reason = reason;
  finished.usage.prompt_tokens = 3;
  finished.usage.completion_tokens = tokens;
  finished.usage.cached_tokens = 2;
  finished.usage.kv.policy = "full";
  finished.usage.kv.device_bytes = 100;
  finished.usage.kv.full_bytes = 80;
  finished.usage.kv.prompt_full_bytes = 60;
  finished.usage.kv.bytes_ratio = index == 0 ? 0.5 : 0.25;
  finished.usage.kv.entries_by_format = {{"dense", 10}};
  return finished;
}

std::vector<Json> Frames(const std::string& text) {
  std::vector<Json> frames;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find("\n\n", at);
    const std::string frame = text.substr(at, end - at);
    EXPECT_EQ(frame.rfind("data: ", 0), 0u) << frame;
    frames.push_back(frame == "data: [DONE]" ? Json("DONE") : Json::parse(frame.substr(6)));
    at = end + 2;
  }
  return frames;
}

TEST(OpenAiResponse, WholeChat) {
  const ApiRequest request = Ask(Endpoint::kChat);
  Answer answer(request, "r1", "m", {{1, 2, 3}});
  answer.Add(0, Text(0, "Par"), nullptr);
  answer.Add(0, Text(0, "is"), nullptr);
  EXPECT_FALSE(answer.finished());
  answer.Add(0, End(0, FinishReason::kStop, 2), nullptr);
  ASSERT_TRUE(answer.finished());
  const Json whole = answer.Whole();
  EXPECT_EQ(whole["id"], "chatcmpl-r1");
  EXPECT_EQ(whole["object"], "chat.completion");
  EXPECT_EQ(whole["model"], "m");
  EXPECT_GT(whole["created"].get<int64_t>(), 1'700'000'000);
  const Json& choice = whole["choices"][0];
  EXPECT_EQ(choice["message"], (Json{{"role", "assistant"}, {"content", "Paris"}, {"refusal", nullptr}}));
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(choice["stop_reason"], nullptr);
  EXPECT_EQ(choice["logprobs"], nullptr);
  EXPECT_EQ(whole["usage"]["prompt_tokens"], 3);
  EXPECT_EQ(whole["usage"]["completion_tokens"], 2);
  EXPECT_EQ(whole["usage"]["total_tokens"], 5);
  EXPECT_EQ(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 2);
  EXPECT_EQ(whole["usage"]["kv"]["policy"], "full");
  EXPECT_EQ(whole["usage"]["kv"]["bytes"]["device"], 100);
}

TEST(OpenAiResponse, ManyPromptsAndSamples) {
  const ApiRequest request = Ask(Endpoint::kCompletion, 2);
  Answer answer(request, "r", "m", {{1, 2, 3}, {4}});
  for (int prompt = 0; prompt < 2; ++prompt) {
    for (int sample : {1, 0}) {
      answer.Add(prompt, Text(sample, std::to_string(prompt) + std::to_string(sample)), nullptr);
      answer.Add(prompt, End(sample, FinishReason::kLength, 1), nullptr);
    }
  }
  ASSERT_TRUE(answer.finished());
  const Json whole = answer.Whole();
  ASSERT_EQ(whole["choices"].size(), 4u);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(whole["choices"][i]["index"], i);
    EXPECT_EQ(whole["choices"][i]["text"], std::to_string(i / 2) + std::to_string(i % 2));
  }
  EXPECT_EQ(whole["usage"]["prompt_tokens"], 4);
  EXPECT_EQ(whole["usage"]["completion_tokens"], 4);
  EXPECT_EQ(whole["usage"]["kv"]["bytes"]["device"], 400);
  EXPECT_EQ(whole["usage"]["kv"]["bytes_ratio"], 0.375) << "at the end of the prompts, not of the answers";
  EXPECT_EQ(whole["usage"]["kv"]["entries_by_format"]["dense"], 40);
  EXPECT_EQ(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
}

TEST(OpenAiResponse, StreamOfAChat) {
  ApiRequest request = Ask(Endpoint::kChat);
  request.stream = request.include_usage = true;
  Answer answer(request, "r", "m", {{1, 2, 3}});
  std::string text;
  answer.Add(0, Text(0, ""), &text);  // half a character: the role, no content
  answer.Add(0, Text(0, "\xf0\x9f\xa6\x8a"), &text);
  Finished end = End(0, FinishReason::kStop, 2);
  end.stop_reason = "END";
  answer.Add(0, end, &text);
  text += answer.LastFrames();
  const std::vector<Json> frames = Frames(text);
  ASSERT_EQ(frames.size(), 5u);
  EXPECT_EQ(frames[0]["choices"][0]["delta"], (Json{{"role", "assistant"}, {"content", ""}}));
  EXPECT_EQ(frames[0]["object"], "chat.completion.chunk");
  EXPECT_EQ(frames[0]["usage"], nullptr);
  EXPECT_EQ(frames[1]["choices"][0]["delta"], (Json{{"content", "\xf0\x9f\xa6\x8a"}}));
  EXPECT_EQ(frames[1]["choices"][0]["finish_reason"], nullptr);
  EXPECT_EQ(frames[2]["choices"][0]["delta"], Json::object());
  EXPECT_EQ(frames[2]["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(frames[2]["choices"][0]["stop_reason"], "END");
  EXPECT_EQ(frames[3]["choices"], Json::array());
  EXPECT_EQ(frames[3]["usage"]["completion_tokens"], 2);
  EXPECT_EQ(frames[4], "DONE");
}

TEST(OpenAiResponse, StreamWithoutUsageHasNone) {
  ApiRequest request = Ask(Endpoint::kCompletion);
  Answer answer(request, "r", "m", {{1}});
  std::string text;
  answer.Add(0, Text(0, "a"), &text);
  answer.Add(0, End(0, FinishReason::kDeadline, 1), &text);
  text += answer.LastFrames();
  const auto frames = Frames(text);
  ASSERT_EQ(frames.size(), 3u);
  EXPECT_FALSE(frames[0].contains("usage"));
  EXPECT_EQ(frames[0]["object"], "text_completion");
  EXPECT_EQ(frames[0]["choices"][0]["text"], "a");
  EXPECT_EQ(frames[1]["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(frames[1]["choices"][0]["stop_reason"], "deadline");
}

TEST(OpenAiResponse, EchoComesFirst) {
  ApiRequest request = Ask(Endpoint::kCompletion);
  request.echo = true;
  Answer answer(request, "r", "m", {{1, 2}});
  std::string text;
  answer.Add(0, Text(0, " Uhr"), &text);
  const auto frames = Frames(text);
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_EQ(frames[0]["choices"][0]["text"], "Zwölf");
  EXPECT_EQ(frames[1]["choices"][0]["text"], " Uhr");
  Answer whole(request, "r", "m", {{1, 2}});
  whole.Add(0, Text(0, " Uhr"), nullptr);
  whole.Add(0, End(0, FinishReason::kStop, 1), nullptr);
  EXPECT_EQ(whole.Whole()["choices"][0]["text"], "Zwölf Uhr");
}

TEST(OpenAiResponse, TokenIdsWhenAsked) {
  ApiRequest request = Ask(Endpoint::kCompletion);
  request.return_token_ids = true;
  Answer answer(request, "r", "m", {{7, 8}});
  answer.Add(0, Text(0, "a", {5, 6}), nullptr);
  answer.Add(0, End(0, FinishReason::kStop, 2), nullptr);
  EXPECT_EQ(answer.Whole()["choices"][0]["token_ids"], (Json{5, 6}));
  EXPECT_EQ(answer.Whole()["choices"][0]["prompt_token_ids"], (Json{7, 8}));
}

TEST(OpenAiResponse, StopReasons) {
  SamplingParams sampling;
  sampling.stop = {"42"};
  Finished finished;
  finished.stop_reason = "42";
  EXPECT_EQ(StopReason(finished, sampling), "42");
  finished.stop_reason = "7";
  EXPECT_EQ(StopReason(finished, sampling), 7);
  finished.reason = FinishReason::kLength;
  finished.stop_reason = "context";
  EXPECT_EQ(StopReason(finished, sampling), "context");
  finished = {};
  EXPECT_EQ(StopReason(finished, sampling), nullptr);
  finished.reason = FinishReason::kCancelled;
  EXPECT_EQ(StopReason(finished, sampling), "cancelled");
  EXPECT_STREQ(OpenAiFinishReason(FinishReason::kCancelled), "length");
}

TokenLogprobs Token(const std::string& bytes, float logprob) {
  TokenLogprobs token;
  token.chosen = {1, logprob, bytes};
  token.top = {{1, logprob, bytes}, {2, -std::numeric_limits<float>::infinity(), "\xf0\x9f"}};
  return token;
}

TEST(OpenAiResponse, ChatLogprobsAreFiniteAndExactInBytes) {
  const Json json = ChatLogprobs({Token("é", -0.5f), Token("\xff", std::nanf(""))});
  EXPECT_EQ(json["content"][0]["token"], "é");
  EXPECT_EQ(json["content"][0]["bytes"], (Json{0xc3, 0xa9}));
  EXPECT_EQ(json["content"][0]["logprob"], -0.5);
  EXPECT_EQ(json["content"][0]["top_logprobs"][1]["logprob"], -9999.0);
  EXPECT_EQ(json["content"][1]["logprob"], -9999.0);
  EXPECT_EQ(json["content"][1]["bytes"], (Json{0xff}));
}

TEST(OpenAiResponse, CompletionLogprobsCountCharacters) {
  int64_t offset = 10;
  const Json json = CompletionLogprobs({Token("é", -1), Token("ab", -2), Token("\xf0\x9f", -3)}, 2, &offset);
  EXPECT_EQ(json["text_offset"], (Json{10, 11, 13}));
  EXPECT_EQ(json["tokens"], (Json{"é", "ab", "bytes:\\xf0\\x9f"}));
  EXPECT_EQ(json["token_logprobs"], (Json{-1.0, -2.0, -3.0}));
  EXPECT_EQ(json["top_logprobs"][0]["bytes:\\xf0\\x9f"], -9999.0);
  EXPECT_EQ(json["top_logprobs"][2].size(), 1u);
}

TEST(OpenAiResponse, AnEchoedPromptHasLogprobsInFrontOfTheAnswers) {
  ApiRequest request = Ask(Endpoint::kCompletion);
  request.echo = request.logprobs = true;
  request.top_logprobs = 1;
  request.prompt_logprobs = 2;
  const PromptScored scored{{Token("Zw", 0), Token("öl", -2), Token("f", -3)}};
  Delta delta = Text(0, "!");
  delta.logprobs = {Token("!", -0.5f)};
  const Json four = {{"text_offset", {0, 2, 4, 5}}, {"token_logprobs", {nullptr, -2.0, -3.0, -0.5}}, {"tokens", {"Zw", "öl", "f", "!"}},
                     {"top_logprobs", {nullptr, {{"öl", -2.0}}, {{"f", -3.0}}, {{"!", -0.5}}}}};
  const Json by_id = {nullptr,
                      {{"1", {{"logprob", -2.0}, {"rank", 1}, {"decoded_token", "öl"}}}, {"2", {{"logprob", -9999.0}, {"rank", 2}, {"decoded_token", "\xf0\x9f"}}}},
                      {{"1", {{"logprob", -3.0}, {"rank", 1}, {"decoded_token", "f"}}}, {"2", {{"logprob", -9999.0}, {"rank", 2}, {"decoded_token", "\xf0\x9f"}}}}};
  Answer whole(request, "r", "m", {{1, 2, 3}});
  whole.Add(0, scored);
  whole.Add(0, delta, nullptr);
  whole.Add(0, End(0, FinishReason::kLength, 1), nullptr);
  EXPECT_EQ(whole.Whole()["choices"][0]["logprobs"], four) << whole.Whole()["choices"][0]["logprobs"];
  EXPECT_EQ(whole.Whole()["choices"][0]["prompt_logprobs"], by_id);
  EXPECT_EQ(whole.Whole()["choices"][0]["text"], "Zwölf!");

  Answer streamed(request, "r", "m", {{1, 2, 3}});
  std::string text;
  streamed.Add(0, scored);
  EXPECT_TRUE(text.empty());
  streamed.Add(0, delta, &text);
  const auto frames = Frames(text);
  ASSERT_EQ(frames.size(), 2u);
  Json joined = frames[0]["choices"][0]["logprobs"];
  EXPECT_EQ(joined["tokens"], (Json{"Zw", "öl", "f"}));
  for (auto& [list, values] : joined.items()) {
    for (const Json& value : frames[1]["choices"][0]["logprobs"][list]) values.push_back(value);
  }
  EXPECT_EQ(joined, four);
}

TEST(OpenAiResponse, EchoWithLogprobsButNoAnswer) {
  ApiRequest request = Ask(Endpoint::kCompletion, 2);
  request.echo = request.logprobs = true;
  request.engine.sampling.max_tokens = 0;
  for (const bool known : {false, true}) {  // cancelled before the prompt was through, or not
    Answer answer(request, "r", "m", {{1, 2}});
    if (known) answer.Add(0, PromptScored{{Token("Zw", 0), Token("ölf", -2)}});
    for (const int i : {0, 1}) answer.Add(0, End(i, FinishReason::kLength, 0), nullptr);
    const Json out = answer.Whole();
    for (const int i : {0, 1}) {
      EXPECT_EQ(out["choices"][i]["text"], "Zwölf");
      EXPECT_EQ(out["choices"][i]["logprobs"]["tokens"], known ? (Json{"Zw", "ölf"}) : Json::array());
      EXPECT_EQ(out["choices"][i]["logprobs"]["token_logprobs"], known ? (Json{nullptr, -2.0}) : Json::array());
      EXPECT_FALSE(out["choices"][i].contains("prompt_logprobs"));
    }
  }
}

TEST(OpenAiResponse, ATokenInFrontOfTheTextCountsInNoOffset) {
  const std::vector<TokenLogprobs> tokens = {Token("<s>", 0), Token("é", -1), Token("ab", -2), Token("c", -2)};
  EXPECT_EQ(EchoLogprobs(tokens, 0, "éabc")["text_offset"], (Json{0, 0, 1, 3}));
  EXPECT_EQ(EchoLogprobs(tokens, 0, "<s>éabc")["text_offset"], (Json{0, 3, 4, 6}));
}

TEST(OpenAiResponse, AChatsPromptLogprobsStandAtTheTop) {
  ApiRequest request = Ask(Endpoint::kChat, 2);
  request.prompt_logprobs = 0;
  const Json expected = {nullptr, {{"7", {{"logprob", -2.0}, {"rank", nullptr}, {"decoded_token", "b"}}}}};
  TokenLogprobs second = Token("b", -2);
  second.chosen.id = 7;
  const PromptScored scored{{Token("a", 0), second}};
  Answer whole(request, "r", "m", {{1, 7}});
  std::string text;
  whole.Add(0, scored);
  for (const int i : {0, 1}) whole.Add(0, End(i, FinishReason::kStop, 0), &text);
  EXPECT_EQ(whole.Whole()["prompt_logprobs"], expected);
  int with = 0;
  for (const Json& frame : Frames(text)) with += frame.contains("prompt_logprobs");
  EXPECT_EQ(with, 1) << "once a request";
  EXPECT_EQ(Frames(text)[0]["prompt_logprobs"], expected);
}

TEST(OpenAiResponse, StreamedOffsetsContinue) {
  ApiRequest request = Ask(Endpoint::kCompletion);
  request.logprobs = true;
  Answer answer(request, "r", "m", {{1}});
  std::string text;
  Delta delta = Text(0, "ab");
  delta.logprobs = {Token("ab", -1)};
  answer.Add(0, delta, &text);
  answer.Add(0, delta, &text);
  const auto frames = Frames(text);
  EXPECT_EQ(frames[0]["choices"][0]["logprobs"]["text_offset"], (Json{0}));
  EXPECT_EQ(frames[1]["choices"][0]["logprobs"]["text_offset"], (Json{2}));
}

}  // namespace
}  // namespace loupe
