// What tests of the gRPC listeners share: real sockets in front of an engine that runs a tiny random model.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "engine/load/load_model.h"
#include "loupe/v1/inference.grpc.pb.h"
#include "server/grpc_service.h"
#include "server/metrics.h"
#include "tests/support/tiny_model.h"

namespace loupe {

using std::chrono::milliseconds;

struct Answer {
  grpc::Status status;
  std::vector<v1::GenerateResponse> events;
  std::multimap<std::string, std::string> trailers;

  std::string text(int index = 0) const {
    std::string out;
    for (const auto& event : events) {
      if (event.has_delta() && event.delta().index() == index) out += event.delta().text();
    }
    return out;
  }
  std::vector<v1::Finished> finished() const {
    std::vector<v1::Finished> out;
    for (const auto& event : events) {
      if (event.has_finished()) out.push_back(event.finished());
    }
    return out;
  }
};

class GrpcServiceTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string path = (std::filesystem::temp_directory_path() / ("loupe-grpc-" + std::to_string(getpid()) + ".gguf")).string();
    loupe::testing::MakeTinyModel().Write(path);
    EngineConfig config;
    config.kv_device_bytes = 64 << 20;
    config.max_queue = 4;
    config.max_sequences = 4;
    auto model = LoadModel(path, config);
    std::filesystem::remove(path);
    ASSERT_TRUE(model.ok()) << model.status();
    engine_ = Engine::Create(config, *std::move(model)).value().release();
  }
  static void TearDownTestSuite() { delete engine_; }

  GrpcServiceTest() {
    context_.model_name = "tiny";
    context_.created_unix_s = 1234;
    context_.lifecycle = &lifecycle_;
    context_.metrics = &metrics_;
    context_.max_body_bytes = 1 << 20;
    context_.engine = engine_;
    server_ = GrpcServer::Start(context_, "127.0.0.1:0").value();
    channel_ = grpc::CreateChannel("127.0.0.1:" + std::to_string(server_->port()), grpc::InsecureChannelCredentials());
    stub_ = v1::Inference::NewStub(channel_);
  }

  static v1::GenerateRequest Ask(const std::string& prompt = "the other one", int max_tokens = 8) {
    v1::GenerateRequest request;
    request.set_prompt(prompt);
    request.mutable_sampling()->set_temperature(0);
    request.mutable_sampling()->set_max_tokens(max_tokens);
    request.mutable_sampling()->set_ignore_eos(true);
    return request;
  }
  Answer Generate(const v1::GenerateRequest& request, milliseconds timeout = milliseconds(20'000)) {
    Answer answer;
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + timeout);
    auto reader = stub_->Generate(&call, request);
    v1::GenerateResponse event;
    while (reader->Read(&event)) answer.events.push_back(event);
    answer.status = reader->Finish();
    for (const auto& [key, value] : call.GetServerTrailingMetadata()) {
      answer.trailers.emplace(std::string(key.data(), key.size()), std::string(value.data(), value.size()));
    }
    return answer;
  }
  void ExpectRefused(const v1::GenerateRequest& request, grpc::StatusCode code, const std::string& message) {
    const Answer answer = Generate(request);
    EXPECT_EQ(answer.status.error_code(), code) << answer.status.error_message();
    EXPECT_NE(answer.status.error_message().find(message), std::string::npos) << answer.status.error_message() << " lacks " << message;
    EXPECT_TRUE(answer.events.empty());
  }
  static bool WaitIdle() { return engine_->WaitIdle(std::chrono::steady_clock::now() + std::chrono::seconds(10)); }

  static inline Engine* engine_ = nullptr;
  Lifecycle lifecycle_;
  Metrics metrics_{"tiny"};
  ServerContext context_;
  std::unique_ptr<GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

// Requests that hold the engine until the test is through with them.
class BusyEngine {
 public:
  BusyEngine(Engine& engine, int count) {
    for (int i = 0; i < count; ++i) {
      Request request;
      request.id = "busy-" + std::to_string(i);
      request.prompt = {5, 6, 7};
      request.sampling.max_tokens = 500;
      request.sampling.ignore_eos = true;
      auto stream = engine.Submit(request);
      if (stream.ok()) streams_.push_back(*stream);
    }
  }
  ~BusyEngine() {
    for (const auto& stream : streams_) stream->Cancel();
  }
  size_t size() const { return streams_.size(); }

 private:
  std::vector<std::shared_ptr<ResponseStream>> streams_;
};

}  // namespace loupe
