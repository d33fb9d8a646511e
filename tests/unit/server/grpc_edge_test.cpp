// What hostile or careless clients send to the gRPC listener, and how it ends in spite of them.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "server/openai_prompt.h"
#include "tests/unit/server/grpc_fixture.h"

namespace loupe {
namespace {

class GrpcEdgeTest : public GrpcServiceTest {};

TEST_F(GrpcEdgeTest, IdsGiveAllTheirTextControlTokensIncluded) {
  v1::DetokenizeRequest detokenize;
  for (const int32_t id : {2, 1, 40, 0}) detokenize.add_tokens(id);
  v1::DetokenizeResponse text;
  grpc::ClientContext call;
  ASSERT_TRUE(stub_->Detokenize(&call, detokenize, &text).ok());
  const std::vector<int32_t> ids(detokenize.tokens().begin(), detokenize.tokens().end());
  EXPECT_EQ(text.text(), engine_->tokenizer().Decode(ids, /*skip_control=*/false));
  EXPECT_EQ(text.text().rfind("<|im_end|><|im_start|>", 0), 0u) << text.text();
  v1::GenerateRequest echo = Ask("", 1);
  echo.set_echo(true);
  *echo.mutable_prompt_token_ids()->mutable_ids() = detokenize.tokens();
  EXPECT_EQ(Generate(echo).text().rfind(text.text(), 0), 0u);
}

TEST_F(GrpcEdgeTest, BytesThatAreNoRequestAreInvalid) {
  grpc::GenericStub stub(channel_);
  const auto call = [&](const std::string& method, const std::string& bytes) {
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const grpc::Slice slice(bytes);
    auto reader = stub.PrepareUnaryCall(&context, method, grpc::ByteBuffer(&slice, 1), &queue);
    reader->StartCall();
    grpc::ByteBuffer response;
    grpc::Status status;
    reader->Finish(&response, &status, this);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return status;
  };
  for (const char* method : {"Generate", "Chat", "Tokenize", "Cancel"}) {
    const std::string path = std::string("/loupe.v1.Inference/") + method;
    for (const std::string& bytes : {std::string("\xff\xff\xff"), std::string("\x0a\x02\xff\xfe")}) {
      const grpc::Status status = call(path, bytes);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method << ": " << status.error_message();
      EXPECT_NE(status.error_message(), "");
    }
  }
  EXPECT_EQ(call("/loupe.v1.Inference/Nothing", "").error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(GrpcEdgeTest, TextHasALimit) {
  context_.max_body_bytes = 16 << 20;
  const auto server = GrpcServer::Start(context_, "127.0.0.1:0").value();
  const auto stub = v1::Inference::NewStub(
      grpc::CreateChannel("127.0.0.1:" + std::to_string(server->port()), grpc::InsecureChannelCredentials()));
  v1::TokenizeRequest request;
  request.set_text(std::string(kMaxTextBytes + 1, 'x'));
  v1::TokenizeResponse tokens;
  grpc::ClientContext call;
  const grpc::Status status = stub->Tokenize(&call, request, &tokens);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  for (const int64_t number : {kMaxTextBytes, kMaxTextBytes + 1}) {
    EXPECT_NE(status.error_message().find(std::to_string(number)), std::string::npos) << status.error_message();
  }
}

TEST_F(GrpcEdgeTest, ChatIsCheckedAsHttpDoes) {
  v1::ChatRequest replaced, continued;
  for (v1::ChatRequest* request : {&replaced, &continued}) {
    auto* message = request->add_messages();
    message->set_role("user");
    message->set_content("the one");
  }
  (*replaced.mutable_chat_template_kwargs()->mutable_fields())["messages"].mutable_list_value();
  continued.set_continue_final_message(true);
  for (const auto& [request, field] : {std::pair{replaced, "chat_template_kwargs.messages: "}, {continued, "continue_final_message: "}}) {
    grpc::ClientContext call;
    auto reader = stub_->Chat(&call, request);
    v1::ChatResponse event;
    EXPECT_FALSE(reader->Read(&event));
    const grpc::Status status = reader->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message().rfind(field, 0), 0u) << status.error_message();
  }
}

TEST_F(GrpcEdgeTest, ShutdownDoesNotWaitForWatchersOfTheHealthService) {
  grpc::GenericStub stub(channel_);
  grpc::ClientContext call;
  grpc::CompletionQueue queue;
  const auto wait = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto watcher = stub.PrepareCall(&call, "/grpc.health.v1.Health/Watch", &queue);
  watcher->StartCall(nullptr);
  ASSERT_TRUE(wait());
  grpc::Slice nothing;
  watcher->WriteLast(grpc::ByteBuffer(&nothing, 1), {}, nullptr);
  ASSERT_TRUE(wait());
  grpc::ByteBuffer state;
  watcher->Read(&state, nullptr);
  ASSERT_TRUE(wait()) << "the watcher hears the state";
  const auto start = std::chrono::steady_clock::now();
  server_->Shutdown(start + std::chrono::seconds(20));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
  grpc::Status status;
  watcher->Finish(&status, nullptr);
  ASSERT_TRUE(wait());
  EXPECT_FALSE(status.ok());
}

}  // namespace
}  // namespace loupe
