#include "server/openai_request.h"

#include "gtest/gtest.h"
#include "server/http_json.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

const Json kHello = Json::array({{{"role", "user"}, {"content", "hi"}}});

absl::StatusOr<ApiRequest> Chat(Json extra, bool strict = false) {
  Json body = {{"messages", kHello}};
  if (!extra.is_null()) body.update(extra);
  return ParseApiRequest(Endpoint::kChat, body.dump(), strict);
}

absl::StatusOr<ApiRequest> Completion(Json extra, bool strict = false) {
  Json body = {{"prompt", "hi"}};
  if (!extra.is_null()) body.update(extra);
  return ParseApiRequest(Endpoint::kCompletion, body.dump(), strict);
}

// "" if it was accepted; else the message, which must open with the field.
std::string Error(const absl::StatusOr<ApiRequest>& request) {
  if (request.ok()) return "";
  EXPECT_EQ(request.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(request.status().message());
}

TEST(OpenAiRequest, Defaults) {
  const auto chat = Chat({});
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_EQ(chat->engine.sampling.max_tokens, -1);
  EXPECT_EQ(chat->engine.sampling.temperature, 1.0f);
  EXPECT_EQ(chat->engine.n, 1);
  EXPECT_EQ(chat->engine.sampling.logprobs, -1);
  EXPECT_FALSE(chat->stream);
  EXPECT_FALSE(chat->engine.kv.has_value());
  const auto completion = Completion({});
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(completion->engine.sampling.max_tokens, 16);
}

TEST(OpenAiRequest, TakesEveryField) {
  const auto r = Chat({{"model", "m"},
                       {"temperature", 0.5},
                       {"top_p", 0.9},
                       {"n", 3},
                       {"stream", true},
                       {"stop", {"a", "b"}},
                       {"max_tokens", 7},
                       {"presence_penalty", 1.5},
                       {"seed", 42},
                       {"frequency_penalty", -1},
                       {"logit_bias", {{"5", -100}, {"7", 2.5}}},
                       {"logprobs", true},
                       {"top_logprobs", 4},
                       {"user", "u"},
                       {"metadata", Json::object()},
                       {"store", false},
                       {"service_tier", "auto"},
                       {"top_k", 40},
                       {"min_p", 0.05},
                       {"priority", 2},
                       {"stop_token_ids", {1, 2}},
                       {"ignore_eos", true},
                       {"min_tokens", 3},
                       {"timeout_ms", 500},
                       {"cache_salt", "s"},
                       {"return_token_ids", true},
                       {"repetition_penalty", 1.1},
                       {"stream_options", {{"include_usage", true}, {"continuous_usage_stats", true}}},
                       {"include_stop_str_in_output", true},
                       {"kv", {{"policy", "full"}}},
                       {"chat_template_kwargs", {{"enable_thinking", false}}},
                       {"add_generation_prompt", true},
                       {"tools", Json::array()},
                       {"tool_choice", "none"},
                       {"response_format", {{"type", "text"}}}});
  ASSERT_TRUE(r.ok()) << r.status();
  const SamplingParams& s = r->engine.sampling;
  EXPECT_EQ(r->model, "m");
  EXPECT_FLOAT_EQ(s.temperature, 0.5f);
  EXPECT_FLOAT_EQ(s.top_p, 0.9f);
  EXPECT_EQ(s.top_k, 40);
  EXPECT_FLOAT_EQ(s.min_p, 0.05f);
  EXPECT_FLOAT_EQ(s.repetition_penalty, 1.1f);
  EXPECT_FLOAT_EQ(s.frequency_penalty, -1);
  EXPECT_FLOAT_EQ(s.presence_penalty, 1.5f);
  EXPECT_EQ(s.seed, 42u);
  EXPECT_EQ(s.max_tokens, 7);
  EXPECT_EQ(s.min_tokens, 3);
  EXPECT_TRUE(s.ignore_eos);
  EXPECT_EQ(s.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(s.stop_token_ids, (std::vector<int32_t>{1, 2}));
  EXPECT_TRUE(s.include_stop_str_in_output);
  EXPECT_EQ(s.logprobs, 4);
  ASSERT_EQ(s.logit_bias.size(), 2u);
  EXPECT_EQ(s.logit_bias[1], (std::pair<int32_t, float>{7, 2.5f}));
  EXPECT_EQ(r->engine.n, 3);
  EXPECT_EQ(r->engine.priority, 2);
  EXPECT_EQ(r->engine.kv.value().policy, "full");
  EXPECT_EQ(r->timeout_ms, 500);
  EXPECT_TRUE(r->stream && r->include_usage && r->continuous_usage && r->return_token_ids);
  EXPECT_EQ(r->template_kwargs["enable_thinking"], false);
}

TEST(OpenAiRequest, EveryFieldMayBeNull) {
  for (const char* name : {"model",
                           "max_tokens",
                           "max_completion_tokens",
                           "temperature",
                           "top_p",
                           "n",
                           "stream",
                           "stream_options",
                           "stop",
                           "seed",
                           "presence_penalty",
                           "frequency_penalty",
                           "logit_bias",
                           "logprobs",
                           "top_logprobs",
                           "user",
                           "metadata",
                           "store",
                           "service_tier",
                           "kv",
                           "top_k",
                           "min_p",
                           "tools",
                           "tool_choice",
                           "response_format",
                           "regex",
                           "choice",
                           "audio",
                           "modalities",
                           "reasoning_effort",
                           "timeout_ms",
                           "chat_template_kwargs",
                           "functions"}) {
    EXPECT_EQ(Error(Chat({{name, nullptr}})), "") << name;
  }
}

TEST(OpenAiRequest, NewerNameOfTheLimitWins) {
  EXPECT_EQ(Chat({{"max_completion_tokens", 5}, {"max_tokens", 9}})->engine.sampling.max_tokens, 5);
  EXPECT_EQ(Chat({{"max_tokens", 9}, {"max_completion_tokens", 5}})->engine.sampling.max_tokens, 5);
}

TEST(OpenAiRequest, SeedsOfEverySize) {
  EXPECT_EQ(Chat({{"seed", -1}})->engine.sampling.seed, UINT64_MAX);
  EXPECT_EQ(Chat({{"seed", UINT64_MAX}})->engine.sampling.seed, UINT64_MAX);
}

TEST(OpenAiRequest, PromptsOfEveryKind) {
  EXPECT_EQ(Completion({{"prompt", {"a", "b"}}})->prompts.size(), 2u);
  const auto ids = Completion({{"prompt", {1, 2, 3}}});
  ASSERT_TRUE(ids.ok());
  ASSERT_EQ(ids->prompts.size(), 1u);
  EXPECT_FALSE(ids->prompts[0].is_text);
  EXPECT_EQ(ids->prompts[0].ids, (std::vector<int32_t>{1, 2, 3}));
  const auto lists = Completion({{"prompt", {{1, 2}, {3}}}});
  ASSERT_TRUE(lists.ok());
  EXPECT_EQ(lists->prompts[1].ids, (std::vector<int32_t>{3}));
  EXPECT_EQ(ParseApiRequest(Endpoint::kCompletion, R"({"prompt_token_ids":[4,5]})", false)->prompts[0].ids,
            (std::vector<int32_t>{4, 5}));
  EXPECT_EQ(ParseApiRequest(Endpoint::kChat, R"({"prompt_token_ids":[4,5]})", false)->prompts[0].ids,
            (std::vector<int32_t>{4, 5}));
}

TEST(OpenAiRequest, MessagesAreNormalised) {
  const auto r =
      Chat({{"messages",
             {{{"role", "system"}, {"content", "s"}},
              {{"role", "user"},
               {"content", {{{"type", "text"}, {"text", "a"}}, {{"type", "text"}, {"text", "b"}}}},
               {"name", "bob"}},
              {{"role", "assistant"},
               {"content", nullptr},
               {"tool_calls",
                {{{"id", "1"}, {"type", "function"}, {"function", {{"name", "f"}, {"arguments", "{\"x\":1}"}}}}}}},
              {{"role", "tool"}, {"content", "r"}, {"tool_call_id", "1"}, {"unknown", 5}}}}});
  ASSERT_TRUE(r.ok()) << r.status();
  EXPECT_EQ(r->messages[1]["content"], "a\nb");
  EXPECT_EQ(r->messages[1]["name"], "bob");
  EXPECT_EQ(r->messages[2]["content"], "");
  EXPECT_EQ(r->messages[2]["tool_calls"][0]["function"]["arguments"]["x"], 1);
  EXPECT_FALSE(r->messages[3].contains("unknown"));
}

TEST(OpenAiRequest, UnknownFieldsAreIgnoredUnlessStrict) {
  EXPECT_EQ(Error(Chat({{"no_such_field", 1}})), "");
  EXPECT_EQ(Error(Chat({{"no_such_field", 1}}, true)).rfind("no_such_field: ", 0), 0u);
  EXPECT_EQ(Error(Chat({{"prompt", "x"}})), "");  // a field of the other endpoint is unknown here
}

// Every field against values of the wrong type: the answer is an error that names the field.
TEST(OpenAiRequest, WrongTypesAreRefusedByName) {
  const Json values[] = {"text",
                         "",
                         1,
                         -1,
                         1.5,
                         true,
                         false,
                         Json::array(),
                         Json::object(),
                         Json::array({nullptr}),
                         Json::array({1.5}),
                         Json::array({Json::object()})};
  struct Case {
    std::vector<const char*> names;
    std::vector<int> accepted;  // indexes into values
  };
  const Case cases[] = {
      {{"stream", "ignore_eos", "include_stop_str_in_output", "logprobs", "return_token_ids", "add_generation_prompt",
        "parallel_tool_calls"},
       {5, 6}},
      {{"temperature"}, {2, 4}},
      {{"top_p", "min_p"}, {2}},
      {{"frequency_penalty", "presence_penalty"}, {2, 3, 4}},
      {{"repetition_penalty"}, {2, 4}},
      {{"top_k"}, {2, 3}},
      {{"prompt_logprobs"}, {2}},
      {{"seed", "priority"}, {2, 3}},
      {{"n", "max_tokens", "max_completion_tokens", "timeout_ms"}, {2}},
      {{"stop"}, {0, 7}},
      {{"stop_token_ids"}, {7}},
      {{"logit_bias", "metadata", "chat_template_kwargs", "kv", "stream_options"}, {8}},
      {{"model", "user", "cache_salt", "safety_identifier", "prompt_cache_key", "regex"}, {0, 1}},
      {{"store"}, {6}},
      {{"tools", "functions"}, {7}},
      {{"messages", "tool_choice", "response_format", "modalities", "service_tier", "verbosity", "audio",
        "choice", "reasoning_effort", "guided_json", "web_search_options", "documents"},
       {}},
  };
  int refused = 0;
  for (const Case& c : cases) {
    for (const char* name : c.names) {
      for (int i = 0; i < static_cast<int>(std::size(values)); ++i) {
        const bool accepted = std::find(c.accepted.begin(), c.accepted.end(), i) != c.accepted.end();
        const std::string error = Error(Chat({{name, values[i]}}));
        if (accepted) {
          EXPECT_EQ(error, "") << name << " " << values[i];
        } else {
          EXPECT_EQ(error.rfind(name, 0), 0u) << name << " " << values[i] << ": " << error;
          ++refused;
        }
      }
    }
  }
  EXPECT_GT(refused, 300);
}

TEST(OpenAiRequest, ValuesOutOfRangeAreRefusedWithNumbers) {
  const std::pair<const char*, Json> cases[] = {{"temperature", -1},
                                                {"temperature", 1e9},
                                                {"temperature", 2.01},
                                                {"top_p", 0},
                                                {"top_p", 1.5},
                                                {"n", 0},
                                                {"n", 129},
                                                {"n", 1LL << 40},
                                                {"max_tokens", -5},
                                                {"max_completion_tokens", -1},
                                                {"presence_penalty", 3},
                                                {"frequency_penalty", -2.5},
                                                {"top_k", -3},
                                                {"min_p", 2},
                                                {"min_p", -0.1},
                                                {"repetition_penalty", 0},
                                                {"repetition_penalty", -1},
                                                {"timeout_ms", -1},
                                                {"timeout_ms", 0},
                                                {"min_tokens", -1},
                                                {"logit_bias", {{"1", 101}}},
                                                {"logit_bias", {{"-1", 1}}},
                                                {"logit_bias", {{"x", 1}}},
                                                {"logit_bias", {{"1", "a"}}},
                                                {"stop", Json(std::vector<std::string>(17, "a"))},
                                                {"stop", Json::array({""})},
                                                {"stop", std::string(5000, 'x')},
                                                {"kv", {{"policy", 1}}},
                                                {"kv", {{"floor", {{"bits", 5}}}}},
                                                {"kv", {{"floor", {{"ratio", 1.5}}}}},
                                                {"kv", {{"floor", {{"rate", 0.5}}}}},
                                                {"kv", {{"on_miss", "block"}}},
                                                {"kv", {{"protect", {{"sinks", -1}}}}},
                                                {"kv", {{"protect", {{"ranges", {{1, 2, 3}}}}}}},
                                                {"kv", {{"params", {{"x", true}}}}},
                                                {"kv", {{"bits", {{"key", 5}}}}},
                                                {"kv", {{"bits", {{"value", "4"}}}}},
                                                {"kv", {{"bits", 4}}},
                                                {"kv", {{"nonsense", 1}}},
                                                {"stream_options", {{"include_usage", "yes"}}},
                                                {"stream_options", {{"unknown", true}}},
                                                {"best_of", 2}};
  for (const auto& [name, value] : cases) {
    const std::string error = Error(Chat({{"stream", true}, {name, value}}));
    EXPECT_EQ(error.rfind(name == std::string("max_completion_tokens") ? "max_completion_tokens" : name, 0), 0u)
        << name << " " << value << ": " << error;
  }
  EXPECT_NE(Error(Chat({{"n", 129}})).find("129"), std::string::npos);
  EXPECT_NE(Error(Chat({{"n", 129}})).find("128"), std::string::npos);
}

TEST(OpenAiRequest, LogprobsOfThePrompt) {
  const auto sampling = [](const Json& body) { return ParseApiRequest(Endpoint::kCompletion, body.dump(), true)->engine.sampling; };
  const SamplingParams plain = sampling({{"prompt", "x"}, {"logprobs", 3}});
  EXPECT_EQ(plain.prompt_logprobs, -1);
  EXPECT_FALSE(plain.end_logprobs);
  EXPECT_EQ(sampling({{"prompt", "x"}, {"echo", true}}).prompt_logprobs, -1);
  const SamplingParams echo = sampling({{"prompt", "x"}, {"echo", true}, {"logprobs", 3}, {"max_tokens", 0}});
  EXPECT_EQ(echo.prompt_logprobs, 3);
  EXPECT_TRUE(echo.end_logprobs);
  EXPECT_EQ(sampling({{"prompt", "x"}, {"echo", true}, {"logprobs", 0}}).prompt_logprobs, 0);
  EXPECT_EQ(sampling({{"prompt", "x"}, {"prompt_logprobs", 0}}).prompt_logprobs, 0);
  EXPECT_EQ(sampling({{"prompt", "x"}, {"prompt_logprobs", 7}, {"echo", true}, {"logprobs", 2}}).prompt_logprobs, 7) << "the larger";
  EXPECT_EQ(sampling({{"prompt", "x"}, {"prompt_logprobs", 1}, {"echo", true}, {"logprobs", 2}}).prompt_logprobs, 2);
  EXPECT_EQ(sampling({{"prompt", "x"}, {"prompt_logprobs", 7}}).logprobs, -1);
}

TEST(OpenAiRequest, FieldsThatExcludeEachOther) {
  EXPECT_NE(Error(Chat({{"top_logprobs", 2}})), "");
  EXPECT_NE(Error(Chat({{"logprobs", true}, {"top_logprobs", 21}})), "");
  EXPECT_NE(Error(Chat({{"stream_options", {{"include_usage", true}}}})), "");
  EXPECT_NE(Error(Chat({{"min_tokens", 9}, {"max_tokens", 3}})), "");
  EXPECT_NE(Error(Chat({{"continue_final_message", true}})), "");
  EXPECT_NE(Error(Chat({{"chat_template_kwargs", {{"messages", nlohmann::json::array()}}}})), "");
  EXPECT_NE(Error(Chat({{"prompt_token_ids", {1}}})), "");
  EXPECT_NE(Error(Completion({{"prompt_token_ids", {1}}})), "");
  EXPECT_NE(Error(Completion({{"prompt_logprobs", 21}})), "");
  EXPECT_NE(Error(Completion({{"prompt_logprobs", -1}})), "");
  EXPECT_NE(Error(Completion({{"logprobs", 21}})), "");
  EXPECT_NE(Error(Completion({{"logprobs", true}})), "");
  EXPECT_NE(Error(Completion({{"suffix", "x"}})), "");
  EXPECT_NE(Error(Completion({{"prompt", Json(std::vector<std::string>(100, "a"))}, {"n", 3}})).find("300"),
            std::string::npos);
  EXPECT_NE(Error(Completion({{"prompt", Json(std::vector<std::string>(129, "a"))}})).find("129"), std::string::npos);
}

TEST(OpenAiRequest, BrokenMessagesAreRefusedByPath) {
  const std::pair<Json, const char*> cases[] = {
      {Json::array({1}), "messages[0]:"},
      {Json::array({Json::object()}), "messages[0].role:"},
      {Json::array({{{"role", "king"}, {"content", "x"}}}), "messages[0].role:"},
      {Json::array({{{"role", 1}, {"content", "x"}}}), "messages[0].role:"},
      {Json::array({{{"role", "user"}}}), "messages[0].content:"},
      {Json::array({{{"role", "user"}, {"content", nullptr}}}), "messages[0].content:"},
      {Json::array({{{"role", "user"}, {"content", 5}}}), "messages[0].content:"},
      {Json::array({{{"role", "user"}, {"content", {5}}}}), "messages[0].content[0]:"},
      {Json::array({{{"role", "user"}, {"content", {{{"type", "text"}}}}}}), "messages[0].content[0].text:"},
      {Json::array({{{"role", "user"}, {"content", {{{"text", "x"}}}}}}), "messages[0].content[0].type:"},
      {Json::array({{{"role", "user"}, {"content", {{{"type", "image_url"}}}}}}), "messages[0].content[0].type:"},
      {Json::array({{{"role", "user"}, {"content", "x"}, {"name", 4}}}), "messages[0].name:"},
      {Json::array({{{"role", "user"}, {"content", "x"}, {"tool_calls", Json::array()}}}), "messages[0].tool_calls:"},
      {Json::array({{{"role", "assistant"}, {"tool_calls", "x"}}}), "messages[0].tool_calls:"},
      {Json::array({{{"role", "assistant"}, {"tool_calls", {1}}}}), "messages[0].tool_calls[0].function:"},
      {Json::array({{{"role", "assistant"}, {"tool_calls", {{{"function", Json::object()}}}}}}),
       "messages[0].tool_calls[0].function.name:"},
      {Json::array({{{"role", "assistant"}, {"tool_calls", {{{"function", {{"name", "f"}, {"arguments", "{"}}}}}}}}),
       "messages[0].tool_calls[0].function.arguments:"},
  };
  for (const auto& [messages, path] : cases) {
    const std::string error = Error(Chat({{"messages", messages}}));
    EXPECT_EQ(error.rfind(path, 0), 0u) << messages << ": " << error;
  }
}

TEST(OpenAiRequest, BodiesThatAreNoObject) {
  for (const char* body : {"", "[]", "null", "3", "\"x\"", "{", "{\"prompt\":\"x\",\"prompt\":\"y\"}", "{}"}) {
    EXPECT_FALSE(ParseApiRequest(Endpoint::kChat, body, false).ok()) << body;
    EXPECT_FALSE(ParseApiRequest(Endpoint::kCompletion, body, false).ok()) << body;
  }
}

TEST(OpenAiRequest, BadPrompts) {
  for (const Json& prompt : {Json(5), Json(Json::object()), Json::array(), Json::array({"a", 1}), Json::array({1, "a"}),
                             Json::array({Json::array()}), Json::array({1.5}), Json::array({nullptr}), Json(true)}) {
    EXPECT_EQ(Error(Completion({{"prompt", prompt}})).rfind("prompt", 0), 0u) << prompt;
  }
}

}  // namespace
}  // namespace loupe
