// Answers over a real socket, from streams that the test writes as the step thread would.
#include "server/openai_answer.h"

#include <thread>

#include "gtest/gtest.h"
#include "server/http_server.h"
#include "tests/unit/server/raw_client.h"

namespace loupe {
namespace {

namespace asio = boost::asio;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Counts how often the answer wakes up.
class CountingExchange : public HttpExchange {
 public:
  CountingExchange(HttpExchange& inner, std::atomic<int>* waits) : inner_(inner), waits_(waits) {}
  asio::awaitable<bool> Respond(HttpResponse response) override { return inner_.Respond(std::move(response)); }
  asio::awaitable<bool> StartStream(HttpResponse head) override { return inner_.StartStream(std::move(head)); }
  asio::awaitable<bool> Write(std::string data) override { return inner_.Write(std::move(data)); }
  bool started() const override { return inner_.started(); }
  asio::awaitable<void> Wait(SteadyTime until) override {
    ++*waits_;
    return inner_.Wait(until);
  }
  std::function<void()> Waker() override { return inner_.Waker(); }
  asio::awaitable<void> Compute(std::function<void()> work, bool slow) override { return inner_.Compute(std::move(work), slow); }
  bool client_gone() const override { return inner_.client_gone(); }

 private:
  HttpExchange& inner_;
  std::atomic<int>* waits_;
};

class OpenAiAnswerTest : public testing::Test {
 protected:
  OpenAiAnswerTest() {
    context_.lifecycle = &lifecycle_;
    context_.metrics = &metrics_;
    HttpServerOptions options;
    options.count_and_log = false;
    HttpRouter router;
    router.Add("GET", "/", [this](const HttpRequest&, HttpExchange& exchange) { return Handle(exchange); });
    server_ = *HttpServer::Start(context_, router, "127.0.0.1:0", options);
  }

  // The request that the handler answers, with `prompts` streams.
  void Prepare(bool stream, int prompts = 1, int n = 1) {
    request_.endpoint = Endpoint::kCompletion;
    request_.stream = stream;
    request_.engine.n = n;
    request_.timeout_ms = 250;
    for (int i = 0; i < prompts; ++i) streams_.push_back(std::make_shared<ResponseStream>("r" + std::to_string(i), n));
  }

  asio::awaitable<void> Handle(HttpExchange& exchange) {
    Answer answer(request_, "r", "m", std::vector<std::vector<int32_t>>(streams_.size(), {1}));
    StreamSet set(streams_);
    CountingExchange counting(exchange, &waits_);
    outcome_ = co_await RunAnswer(request_, answer, set, counting, ping_);
    ended_ = true;
  }

  void PushText(const std::string& text, int prompt = 0, int sample = 0) {
    Delta delta;
    delta.index = sample;
    delta.text = text;
    delta.token_ids = {1};
    streams_[static_cast<size_t>(prompt)]->Push(std::move(delta));
  }
  void PushEnd(FinishReason reason, int tokens, int prompt = 0, int sample = 0, const std::string& stop_reason = "",
               absl::Status error = {}) {
    Finished finished;
    finished.index = sample;
    finished.reason = reason;
    finished.stop_reason = stop_reason;
    finished.error = std::move(error);
    finished.usage.completion_tokens = tokens;
    streams_[static_cast<size_t>(prompt)]->Push(std::move(finished));
  }

  std::string Ask(RawClient& client) {
    client.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    return request_.stream ? client.ReadUntil("\r\n0\r\n\r\n") : client.ReadAnswer();
  }
  bool Eventually(const std::function<bool()>& holds) {
    for (int i = 0; i < 500 && !holds(); ++i) std::this_thread::sleep_for(milliseconds(10));
    return holds();
  }

  Lifecycle lifecycle_;
  Metrics metrics_{"test"};
  ServerContext context_;
  ApiRequest request_;
  std::vector<std::shared_ptr<ResponseStream>> streams_;
  milliseconds ping_{15'000};
  AnswerOutcome outcome_;
  std::atomic<bool> ended_{false};
  std::atomic<int> waits_{0};
  std::unique_ptr<HttpServer> server_;
};

TEST_F(OpenAiAnswerTest, WholeAnswer) {
  Prepare(false, 2, 2);
  std::thread writer([&] {
    for (int i = 0; i < 4; ++i) {
      std::this_thread::sleep_for(milliseconds(5));
      PushText("t" + std::to_string(i), i / 2, i % 2);
      PushEnd(FinishReason::kStop, 1, i / 2, i % 2);
    }
  });
  RawClient client(server_->port());
  const std::string answer = Ask(client);
  writer.join();
  EXPECT_EQ(answer.rfind("HTTP/1.1 200", 0), 0u) << answer;
  const auto json = nlohmann::json::parse(answer.substr(answer.find("\r\n\r\n") + 4));
  ASSERT_EQ(json["choices"].size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(json["choices"][i]["text"], "t" + std::to_string(i));
}

TEST_F(OpenAiAnswerTest, ALongWaitIsASleep) {
  ping_ = milliseconds(50);
  for (const bool stream : {false, true}) {
    streams_.clear();
    waits_ = 0;
    Prepare(stream);
    std::thread writer([&] {
      std::this_thread::sleep_for(milliseconds(500));
      PushText("late");
      PushEnd(FinishReason::kStop, 1);
    });
    RawClient client(server_->port());
    EXPECT_NE(Ask(client).find("late"), std::string::npos);
    writer.join();
    EXPECT_LE(waits_, 20) << (stream ? "stream" : "whole");  // ten pings at most, and the end
  }
}

TEST_F(OpenAiAnswerTest, StreamedAnswerLosesNothing) {
  Prepare(true);
  std::string expected;
  for (int i = 0; i < 2000; ++i) expected += std::to_string(i) + " ";
  std::thread writer([&] {
    for (int i = 0; i < 2000; ++i) PushText(std::to_string(i) + " ");
    PushEnd(FinishReason::kLength, 2000);
  });
  RawClient client(server_->port());
  const std::string answer = Ask(client);
  writer.join();
  EXPECT_NE(answer.find("Content-Type: text/event-stream"), std::string::npos);
  std::string text;
  for (size_t at = answer.find("data: {"); at != std::string::npos; at = answer.find("data: {", at + 1)) {
    const auto json = nlohmann::json::parse(answer.substr(at + 6, answer.find("\n\n", at) - at - 6));
    text += json["choices"][0]["text"].get<std::string>();
  }
  EXPECT_EQ(text, expected);
  EXPECT_NE(answer.find("data: [DONE]\n\n"), std::string::npos);
}

TEST_F(OpenAiAnswerTest, DeadlineBeforeTheFirstTokenIs408) {
  for (const bool stream : {false, true}) {
    streams_.clear();
    Prepare(stream);
    PushEnd(FinishReason::kDeadline, 0, 0, 0, "deadline");
    RawClient client(server_->port());
    client.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    const std::string answer = client.ReadAnswer();
    EXPECT_EQ(answer.rfind("HTTP/1.1 408", 0), 0u) << answer;
    EXPECT_NE(answer.find("250 ms"), std::string::npos);
  }
}

TEST_F(OpenAiAnswerTest, DeadlineAfterTheFirstTokenIsAnAnswer) {
  Prepare(false);
  PushText("some");
  PushEnd(FinishReason::kDeadline, 1, 0, 0, "deadline");
  RawClient client(server_->port());
  const std::string answer = Ask(client);
  EXPECT_EQ(answer.rfind("HTTP/1.1 200", 0), 0u) << answer;
  EXPECT_NE(answer.find("\"finish_reason\":\"length\",\"stop_reason\":\"deadline\""), std::string::npos) << answer;
}

TEST_F(OpenAiAnswerTest, ErrorBeforeTheFirstByteIsAStatus) {
  Prepare(true);
  PushEnd(FinishReason::kError, 0, 0, 0, "", absl::ResourceExhaustedError("the cache has 10 bytes, this needs 20"));
  RawClient client(server_->port());
  client.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string answer = client.ReadAnswer();
  EXPECT_EQ(answer.rfind("HTTP/1.1 429", 0), 0u) << answer;
  EXPECT_NE(answer.find("Retry-After"), std::string::npos);
}

TEST_F(OpenAiAnswerTest, ErrorAfterTheFirstByteIsAFrameThenDone) {
  Prepare(true, 1, 2);
  PushText("some");
  RawClient client(server_->port());
  client.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  client.ReadUntil("\"text\":\"some\"");
  PushEnd(FinishReason::kError, 1, 0, 1, "", absl::InternalError("step failed"));
  const std::string rest = client.ReadUntil("\r\n0\r\n\r\n");
  EXPECT_NE(rest.find("data: {\"error\":{\"message\":\"step failed\",\"type\":\"server_error\""), std::string::npos)
      << rest;
  EXPECT_NE(rest.find("}\n\ndata: [DONE]\n\n"), std::string::npos) << rest;
  EXPECT_TRUE(Eventually([&] { return streams_[0]->cancelled(); })) << "the other sample is ended";
}

TEST_F(OpenAiAnswerTest, ACutByTheDrainSaysSo) {
  Prepare(false);
  PushEnd(FinishReason::kCancelled, 0, 0, 0, "drain");
  RawClient client(server_->port());
  EXPECT_EQ(Ask(client).rfind("HTTP/1.1 503", 0), 0u);
}

TEST_F(OpenAiAnswerTest, AClientThatLeavesCancels) {
  for (const bool stream : {false, true}) {
    streams_.clear();
    ended_ = false;
    Prepare(stream, 2);
    {
      RawClient client(server_->port());
      client.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
      if (stream) {
        PushText("some");
        client.ReadUntil("some");
      } else {
        std::this_thread::sleep_for(milliseconds(50));
      }
      EXPECT_FALSE(streams_[0]->cancelled());
    }
    EXPECT_TRUE(Eventually([&] { return streams_[0]->cancelled() && streams_[1]->cancelled() && ended_; }));
    EXPECT_EQ(outcome_.status, 499);
  }
}

TEST_F(OpenAiAnswerTest, SilentStreamsSendComments) {
  ping_ = milliseconds(20);
  Prepare(true);
  RawClient client(server_->port());
  client.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string head = client.ReadUntil(": still working\n\n");
  EXPECT_NE(head.find("text/event-stream"), std::string::npos);
  PushText("late");
  PushEnd(FinishReason::kStop, 1);
  EXPECT_NE(client.ReadUntil("\r\n0\r\n\r\n").find("\"text\":\"late\""), std::string::npos);
}

TEST_F(OpenAiAnswerTest, AWakeThatComesTooLateDoesNoHarm) {
  Prepare(false);
  PushText("a");
  PushEnd(FinishReason::kStop, 1);
  std::function<void()> wake;
  {
    RawClient client(server_->port());
    EXPECT_EQ(Ask(client).rfind("HTTP/1.1 200", 0), 0u);
  }
  server_->Stop(Clock::now());
  server_.reset();
  PushText("nobody listens");
}

}  // namespace
}  // namespace loupe
