// The engine with its thread and the default model.
#include "engine/engine.h"

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/load/load_model.h"
#include "gtest/gtest.h"

namespace loupe {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

std::string ModelPath() {
  const char* path = std::getenv("LOUPE_TEST_MODEL");
  return path != nullptr ? path : "models/SmolLM2-135M-Instruct.Q4_1.gguf";
}

EngineConfig Config() {
  EngineConfig config;
  config.kv_device_bytes = int64_t{96} << 20;
  config.max_context = 512;
  config.max_sequences = 8;
  config.max_step_tokens = 64;
  return config;
}

struct Answer {
  std::string text;
  std::vector<int32_t> tokens;
  Finished finished;
  int ends = 0;
};

void Add(const Event& event, Answer* answer) {
  if (const auto* delta = std::get_if<Delta>(&event)) {
    answer->text += delta->text;
    answer->tokens.insert(answer->tokens.end(), delta->token_ids.begin(), delta->token_ids.end());
  } else if (const auto* finished = std::get_if<Finished>(&event)) {
    answer->finished = *finished;
    ++answer->ends;
  }
}

Answer Collect(ResponseStream& stream, Answer answer = {}) {
  const auto give_up = steady_clock::now() + seconds(120);
  while (!stream.done()) {
    auto event = stream.WaitNext(give_up);
    if (!event) {
      ADD_FAILURE() << "nothing came for two minutes";
      break;
    }
    Add(*event, &answer);
  }
  return answer;
}

class EngineTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    ASSERT_TRUE(std::filesystem::exists(ModelPath()))
        << "no model at " << ModelPath() << "; ./deploy/quickstart.sh brings it, or set LOUPE_TEST_MODEL to its path";
    auto model = LoadModel(ModelPath(), Config());
    ASSERT_TRUE(model.ok()) << model.status();
    auto engine = Engine::Create(Config(), *std::move(model));
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = engine->release();
  }
  static void TearDownTestSuite() {
    delete engine_;
    engine_ = nullptr;
  }
  void SetUp() override { ASSERT_NE(engine_, nullptr); }

  static Request Make(const std::string& id, const std::string& prompt, int max_tokens) {
    Request request;
    request.id = id;
    request.prompt = engine_->tokenizer().Encode(prompt, true, true);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = max_tokens;
    request.arrival = steady_clock::now();
    return request;
  }
  static std::shared_ptr<ResponseStream> Submit(Request request) {
    auto stream = engine_->Submit(std::move(request));
    EXPECT_TRUE(stream.ok()) << stream.status();
    return *std::move(stream);
  }

  static Engine* engine_;
};
Engine* EngineTest::engine_ = nullptr;

TEST_F(EngineTest, KnowsTheCapitalAndReportsItsNumbers) {
  auto stream = Submit(Make("capital", "The capital of France is", 8));
  const Answer answer = Collect(*stream);
  EXPECT_NE(answer.text.find("Paris"), std::string::npos) << answer.text;
  EXPECT_EQ(answer.ends, 1);
  EXPECT_EQ(answer.finished.reason, FinishReason::kLength);
  EXPECT_EQ(answer.tokens.size(), 8u);
  EXPECT_EQ(answer.finished.usage.kv.lists, 90);
  EXPECT_EQ(answer.finished.usage.kv.full_bytes, int64_t{90} * (5 + 7) * 4 * 64);
  EXPECT_GT(answer.finished.timings.first_token, 0);
}

TEST_F(EngineTest, SameTokensAloneAndAmongOthersAndNoPageIsLeft) {
  const std::string prompts[] = {"Once upon a time", "The sun is a star that", "def fibonacci(n):", "1, 2, 3, 4,",
                                 "Roses are red,",   "In 1969, humans",        "The recipe needs", "Dear Sir or Madam,"};
  std::vector<Answer> alone;
  const auto request = [&](const std::string& kind, size_t i) {
    Request r = Make(absl::StrCat(kind, i), prompts[i], 12);
    if (i % 2 == 1) r.sampling.temperature = 0.9f, r.sampling.seed = 40 + i;
    return r;
  };
  for (size_t i = 0; i < std::size(prompts); ++i) alone.push_back(Collect(*Submit(request("alone", i))));
  std::vector<std::shared_ptr<ResponseStream>> streams;
  for (size_t i = 0; i < std::size(prompts); ++i) streams.push_back(Submit(request("together", i)));
  // Some that leave in the middle.
  for (int i = 0; i < 4; ++i) Submit(Make(absl::StrCat("leaver", i), "A long list of animals:", 200)).reset();
  for (size_t i = 0; i < streams.size(); ++i) {
    const Answer together = Collect(*streams[i]);
    EXPECT_EQ(together.tokens, alone[i].tokens) << prompts[i];
    EXPECT_EQ(together.text, alone[i].text);
  }
  ASSERT_TRUE(engine_->WaitIdle(steady_clock::now() + seconds(60)));
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.kv.resident_bytes, 0);
  EXPECT_EQ(stats.requests_running + stats.requests_waiting, 0);
}

TEST_F(EngineTest, CancelsDeadlinesAndDisconnectsFromManyThreads) {
  std::atomic<int> ended{0};
  std::vector<std::thread> clients;
  for (int c = 0; c < 6; ++c) {
    clients.emplace_back([&, c] {
      for (int i = 0; i < 3; ++i) {
        const std::string id = absl::StrCat("c", c, "-", i);
        Request request = Make(id, "Tell me about everything:", 100);
        if (i % 3 == 0) request.deadline = steady_clock::now() + std::chrono::milliseconds(30 * i);
        auto stream = Submit(std::move(request));
        const auto first = stream->WaitNext(steady_clock::now() + std::chrono::milliseconds(20));
        if (i % 3 == 1) engine_->Cancel(id);
        if (i % 3 == 2) continue;  // the handle goes
        Answer answer = Collect(*stream);
        if (first && std::holds_alternative<Finished>(*first)) {  // a deadline that had passed already
          ++answer.ends;
          answer.finished = std::get<Finished>(*first);
        }
        EXPECT_EQ(answer.ends, 1);
        EXPECT_TRUE(stream->done());
        EXPECT_TRUE(answer.finished.reason == FinishReason::kDeadline || answer.finished.reason == FinishReason::kCancelled)
            << static_cast<int>(answer.finished.reason);
        ++ended;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(ended, 12);
  ASSERT_TRUE(engine_->WaitIdle(steady_clock::now() + seconds(60)));
  EXPECT_EQ(engine_->Stats().kv.resident_bytes, 0);
}

}  // namespace
}  // namespace loupe
