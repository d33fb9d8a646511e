#include "server/openai_prompt.h"

#include "gtest/gtest.h"
#include "server/openai_text.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

// One token a byte; token 256 is "<|end|>" and comes first of all when asked for specials.
class ByteTokenizer : public Tokenizer {
 public:
  ByteTokenizer() {
    for (int i = 0; i < 256; ++i) tokens_.push_back(std::string(1, static_cast<char>(i)));
    tokens_.push_back("<|end|>");
  }
  std::vector<int32_t> Encode(std::string_view text, bool add_special, bool parse_special) const override {
    std::vector<int32_t> ids;
    if (add_special) ids.push_back(256);
    for (size_t i = 0; i < text.size(); ++i) {
      if (parse_special && text.substr(i).starts_with("<|end|>")) {
        ids.push_back(256);
        i += 6;
      } else {
        ids.push_back(static_cast<unsigned char>(text[i]));
      }
    }
    return ids;
  }
  std::string_view TokenBytes(int32_t id) const override { return tokens_[static_cast<size_t>(id)]; }
  bool IsControl(int32_t id) const override { return id == 256; }
  bool IsEndOfGeneration(int32_t id) const override { return id == 256; }
  std::string_view Piece(int32_t id) const override { return TokenBytes(id); }
  int vocab_size() const override { return 257; }
  int32_t bos() const override { return 256; }
  int32_t eos() const override { return 256; }
  bool add_bos() const override { return true; }

 private:
  std::vector<std::string> tokens_;
};

constexpr const char* kTemplate =
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt "
    "%}[assistant]{% endif %}";

class OpenAiPromptTest : public testing::Test {
 protected:
  OpenAiPromptTest() {
    ChatTemplateContext context;
    context.bos_token = context.eos_token = "<|end|>";
    auto parsed = ChatTemplate::Parse(kTemplate, std::move(context));
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    template_ = *std::move(parsed);
  }
  absl::StatusOr<std::string> Render(const std::string& body) {
    auto request = ParseApiRequest(Endpoint::kChat, body, false);
    if (!request.ok()) return request.status();
    return RenderChat(*request, *template_);
  }
  ByteTokenizer tokenizer_;
  std::unique_ptr<ChatTemplate> template_;
};

TEST_F(OpenAiPromptTest, RendersConversations) {
  EXPECT_EQ(*Render(R"({"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}]})"),
            "[system]s<|end|>[user]u<|end|>[assistant]");
  EXPECT_EQ(*Render(R"({"messages":[{"role":"user","content":"u"}],"add_generation_prompt":false})"), "[user]u<|end|>");
  EXPECT_EQ(*Render(R"({"messages":[{"role":"developer","content":"d"}]})"), "[system]d<|end|>[assistant]")
      << "the template knows no developer";
}

TEST_F(OpenAiPromptTest, ContinuesTheFinalMessage) {
  EXPECT_EQ(
      *Render(
          R"({"messages":[{"role":"user","content":"u"},{"role":"assistant","content":"The answer is "}],"continue_final_message":true})"),
      "[user]u<|end|>[assistant]The answer is ");
  EXPECT_FALSE(Render(R"({"messages":[{"role":"assistant","content":"  "}],"continue_final_message":true})").ok());
}

TEST_F(OpenAiPromptTest, RawTextGetsSpecialsAndAChatBringsItsOwn) {
  const PromptLimits limits{100, 7};
  auto request = ParseApiRequest(Endpoint::kCompletion, R"({"prompt":["a<|end|>","b"]})", false);
  auto prompts = BuildPrompts(*request, *template_, tokenizer_, limits);
  ASSERT_TRUE(prompts.ok());
  EXPECT_EQ(*prompts, (std::vector<std::vector<int32_t>>{{256, 'a', 256}, {256, 'b'}}));
  request = ParseApiRequest(Endpoint::kCompletion, R"({"prompt":"a","add_special_tokens":false})", false);
  EXPECT_EQ(*BuildPrompts(*request, *template_, tokenizer_, limits), (std::vector<std::vector<int32_t>>{{'a'}}));
  request = ParseApiRequest(Endpoint::kChat, R"({"messages":[{"role":"user","content":"u"}]})", false);
  prompts = BuildPrompts(*request, *template_, tokenizer_, limits);
  ASSERT_TRUE(prompts.ok());
  EXPECT_EQ((*prompts)[0][0], '[');
}

TEST_F(OpenAiPromptTest, HugeTextIsRefusedWithoutEncoding) {
  EXPECT_EQ(LongestTokenBytes(tokenizer_), 7);
  const PromptLimits limits{100, 7};
  EXPECT_TRUE(EncodePrompt(std::string(706, 'x'), false, tokenizer_, limits).ok());
  const auto status = EncodePrompt(std::string(707, 'x'), false, tokenizer_, limits).status();
  EXPECT_EQ(std::string(status.message()).rfind("context_length_exceeded: ", 0), 0u);
  EXPECT_NE(std::string(status.message()).find("101"), std::string::npos) << status;
  EXPECT_NE(std::string(status.message()).find("100"), std::string::npos) << status;
}

TEST_F(OpenAiPromptTest, ManyPromptsHaveALimitInAll) {
  ApiRequest request;
  request.endpoint = Endpoint::kCompletion;
  request.prompts.resize(3);
  for (ApiPrompt& prompt : request.prompts) prompt.text.assign(kMaxTextBytes / 3 + 1, 'x');
  const auto status = BuildPrompts(request, *template_, tokenizer_, {1 << 24, 7}).status();
  EXPECT_EQ(std::string(status.message()).rfind("prompt: has 4194306 bytes of text, at most 4194304", 0), 0u) << status;
  EXPECT_EQ(
      Tokenize(tokenizer_, *template_, "{\"text\":\"" + std::string(kMaxTextBytes + 1, 'x') + "\"}").status().code(),
      absl::StatusCode::kInvalidArgument);
}

TEST_F(OpenAiPromptTest, TokenizeAndBack) {
  auto json = Tokenize(tokenizer_, *template_, R"({"text":"a<|end|>"})");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ((*json)["count"], 8) << "special tokens only when asked";
  json = Tokenize(tokenizer_, *template_, R"({"text":"a<|end|>","parse_special":true,"add_special":true})");
  EXPECT_EQ((*json)["tokens"], (Json{256, 97, 256}));
  EXPECT_EQ((*json)["pieces"], (Json{"<|end|>", "a", "<|end|>"}));
  json = Tokenize(tokenizer_, *template_, R"({"messages":[{"role":"user","content":"u"}]})");
  EXPECT_EQ((*json)["count"], std::string("[user]u").size() + 1 + std::string("[assistant]").size());
  EXPECT_EQ((*Detokenize(tokenizer_, R"({"tokens":[104,105,256]})"))["text"], "hi<|end|>");
}

TEST_F(OpenAiPromptTest, BadTokenizeBodies) {
  for (const char* body :
       {"", "[]", "{}", R"({"text":5})", R"({"text":"a","messages":[]})", R"({"text":"a","add_special":1})",
        R"({"messages":[]})", R"({"messages":[{"role":"user"}]})"}) {
    EXPECT_EQ(Tokenize(tokenizer_, *template_, body).status().code(), absl::StatusCode::kInvalidArgument) << body;
  }
  for (const char* body : {"", "{}", R"({"tokens":"a"})", R"({"tokens":[257]})", R"({"tokens":[-1]})",
                           R"({"tokens":[1.5]})", R"({"tokens":[1e12]})"}) {
    EXPECT_EQ(Detokenize(tokenizer_, body).status().code(), absl::StatusCode::kInvalidArgument) << body;
  }
}

}  // namespace
}  // namespace loupe
