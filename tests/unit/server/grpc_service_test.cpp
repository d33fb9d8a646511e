// The gRPC listeners over real sockets, in front of an engine that runs a tiny random model.
#include "server/grpc_service.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <thread>

#include "grpc/health/v1/health.grpc.pb.h"
#include "loupe/v1/admin.grpc.pb.h"
#include "loupe/v1/inference.grpc.pb.h"
#include "tests/unit/server/grpc_fixture.h"

namespace loupe {
namespace {

TEST_F(GrpcServiceTest, GenerateStreamsStartedDeltasFinished) {
  const Answer answer = Generate(Ask());
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  ASSERT_GE(answer.events.size(), 3u);
  EXPECT_TRUE(answer.events.front().has_started());
  EXPECT_EQ(answer.events.front().started().prompt_tokens(), static_cast<int>(engine_->tokenizer().Encode("the other one", true, true).size()));
  std::vector<int32_t> ids;
  for (const auto& event : answer.events) {
    if (event.has_delta()) ids.insert(ids.end(), event.delta().token_ids().begin(), event.delta().token_ids().end());
  }
  EXPECT_EQ(ids.size(), 8u);
  ASSERT_TRUE(answer.events.back().has_finished());
  const v1::Finished& finished = answer.events.back().finished();
  EXPECT_EQ(finished.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(finished.usage().completion_tokens(), 8);
  EXPECT_EQ(finished.usage().total_tokens(), finished.usage().prompt_tokens() + 8);
  EXPECT_EQ(finished.usage().kv().policy(), "full");
  EXPECT_EQ(finished.usage().kv().lists(), 4);  // two layers, two kv heads
  EXPECT_GT(finished.usage().kv().device_bytes(), 0);
}

TEST_F(GrpcServiceTest, IdsAndTextGiveTheSame) {
  v1::TokenizeRequest tokenize;
  tokenize.set_text("the other one");
  v1::TokenizeResponse tokens;
  grpc::ClientContext call;
  ASSERT_TRUE(stub_->Tokenize(&call, tokenize, &tokens).ok());
  ASSERT_GT(tokens.tokens_size(), 0);
  EXPECT_EQ(tokens.tokens_size(), tokens.pieces_size());
  v1::GenerateRequest by_ids = Ask();
  *by_ids.mutable_prompt_token_ids()->mutable_ids() = tokens.tokens();
  EXPECT_EQ(Generate(by_ids).text(), Generate(Ask()).text());

  v1::DetokenizeRequest detokenize;
  *detokenize.mutable_tokens() = tokens.tokens();
  v1::DetokenizeResponse text;
  grpc::ClientContext second;
  ASSERT_TRUE(stub_->Detokenize(&second, detokenize, &text).ok());
  EXPECT_EQ(text.text(), "the other one");
}

TEST_F(GrpcServiceTest, SamplesEchoAndLogprobs) {
  v1::GenerateRequest request = Ask("the one", 4);
  request.mutable_sampling()->set_n(3);
  request.mutable_sampling()->set_logprobs(2);
  request.set_echo(true);
  const Answer answer = Generate(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.finished().size(), 3u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(answer.text(i).rfind("the one", 0), 0u) << answer.text(i);
  // The prompt's tokens, of which the first has none, then those of the answer.
  const int prompt_tokens = answer.finished()[0].usage().prompt_tokens();
  std::map<int, int> seen;
  for (const auto& event : answer.events) {
    for (const auto& token : event.delta().logprobs()) {
      const bool first = seen[event.delta().index()]++ == 0;
      EXPECT_EQ(token.chosen().has_logprob(), !first);
      EXPECT_EQ(token.top_size(), first ? 0 : 2);
      EXPECT_LE(token.chosen().logprob(), 0);
    }
  }
  ASSERT_EQ(seen.size(), 3u);
  for (const auto& [index, count] : seen) EXPECT_EQ(count, prompt_tokens + 4) << index;
  request.set_echo(false);
  size_t without = 0;
  for (const auto& event : Generate(request).events) without += static_cast<size_t>(event.delta().logprobs_size());
  EXPECT_EQ(without, 12u);
}

TEST_F(GrpcServiceTest, EchoOfIdsIsTextEvenIfTheyAreNoUtf8) {
  v1::GenerateRequest request = Ask("", 1);
  request.set_echo(true);
  for (int32_t id = 0; id < engine_->vocab_size(); ++id) {
    if (engine_->tokenizer().TokenBytes(id) == "\xff") request.mutable_prompt_token_ids()->add_ids(id);
  }
  ASSERT_EQ(request.prompt_token_ids().ids_size(), 1);
  const Answer answer = Generate(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.text().rfind("\xEF\xBF\xBD", 0), 0u) << answer.text();
}

TEST_F(GrpcServiceTest, ChatGoesThroughTheTemplate) {
  v1::ChatRequest request;
  auto* message = request.add_messages();
  message->set_role("user");
  message->set_content("the one");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(6);
  request.mutable_sampling()->set_ignore_eos(true);
  grpc::ClientContext call;
  auto reader = stub_->Chat(&call, request);
  std::string text;
  v1::ChatResponse event;
  while (reader->Read(&event)) text += event.delta().text();
  const grpc::Status status = reader->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(text, Generate(Ask("<|im_start|>user\nthe one<|im_end|>\n<|im_start|>assistant\n", 6)).text());
}

TEST_F(GrpcServiceTest, BadRequestsAreRefusedWithNumbers) {
  using C = grpc::StatusCode;
  v1::GenerateRequest request = Ask();
  request.set_model("gpt-9");
  ExpectRefused(request, C::NOT_FOUND, "gpt-9");
  (request = Ask()).mutable_sampling()->set_temperature(-1);
  ExpectRefused(request, C::INVALID_ARGUMENT, "temperature: is -1");
  (request = Ask()).mutable_sampling()->set_top_p(2);
  ExpectRefused(request, C::INVALID_ARGUMENT, "top_p: is 2");
  (request = Ask()).mutable_sampling()->set_n(1000);
  ExpectRefused(request, C::INVALID_ARGUMENT, "128");
  (request = Ask()).mutable_sampling()->set_max_tokens(-2);
  ExpectRefused(request, C::INVALID_ARGUMENT, "max_tokens");
  (request = Ask()).set_timeout_ms(-1);
  ExpectRefused(request, C::INVALID_ARGUMENT, "timeout_ms");
  (request = Ask()).mutable_kv()->set_policy("magic");
  ExpectRefused(request, C::INVALID_ARGUMENT, "magic");
  (request = Ask()).mutable_kv()->mutable_budget()->set_ratio(-0.5);
  ExpectRefused(request, C::INVALID_ARGUMENT, "kv.budget.ratio");
  (request = Ask()).mutable_kv()->mutable_bits()->set_key(5);
  ExpectRefused(request, C::INVALID_ARGUMENT, "kv.bits.key");
  (request = Ask()).mutable_kv()->set_strategy("mine");
  ExpectRefused(request, C::INVALID_ARGUMENT, "kv.strategy");
  (request = Ask()).mutable_kv()->mutable_floor()->set_bits(5);
  ExpectRefused(request, C::INVALID_ARGUMENT, "kv.floor");
  (request = Ask()).mutable_kv()->set_on_miss("block");
  ExpectRefused(request, C::INVALID_ARGUMENT, "kv.on_miss");
  request = Ask();
  request.clear_prompt();
  ExpectRefused(request, C::INVALID_ARGUMENT, "prompt");
  ExpectRefused(Ask(""), C::INVALID_ARGUMENT, "0 tokens");
  ExpectRefused(Ask(std::string(600, 'q')), C::INVALID_ARGUMENT, "512");         // the context
  ExpectRefused(Ask(std::string(900'000, 'q')), C::INVALID_ARGUMENT, "512");     // refused by its length
  ExpectRefused(Ask(std::string(2 << 20, 'q')), C::RESOURCE_EXHAUSTED, "1048576");  // the largest message
  (request = Ask()).set_request_id(std::string(300, 'i'));
  ExpectRefused(request, C::INVALID_ARGUMENT, "300");
  for (const int32_t id : {-1, engine_->vocab_size(), INT32_MAX}) {
    for (const bool echo : {false, true}) {
      request = Ask();
      request.mutable_prompt_token_ids()->add_ids(id);
      request.set_echo(echo);
      ExpectRefused(request, C::INVALID_ARGUMENT, std::to_string(id));
    }
  }
}

TEST_F(GrpcServiceTest, HarmlessKvFieldsAreTaken) {
  v1::GenerateRequest request = Ask();
  v1::KvOptions* kv = request.mutable_kv();
  kv->set_policy("full");
  kv->mutable_budget()->set_ratio(1);
  kv->mutable_bits()->set_key(16);
  kv->mutable_protect()->set_sinks(4);
  const Answer answer = Generate(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.text(), Generate(Ask()).text());
}

TEST_F(GrpcServiceTest, BadChatsAreRefused) {
  const auto refused = [&](const v1::ChatRequest& request) {
    grpc::ClientContext call;
    auto reader = stub_->Chat(&call, request);
    v1::ChatResponse event;
    EXPECT_FALSE(reader->Read(&event));
    const grpc::Status status = reader->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    return status.error_message();
  };
  v1::ChatRequest request;
  EXPECT_NE(refused(request).find("messages"), std::string::npos);
  request.add_messages()->set_content("x");
  EXPECT_NE(refused(request).find("messages[0].role"), std::string::npos);
}

TEST_F(GrpcServiceTest, DeadlineBeforeTheFirstTokenAndAfterIt) {
  v1::GenerateRequest request = Ask("the one", 500);
  request.set_timeout_ms(1);
  Answer late = Generate(request);
  if (late.finished().empty()) {
    EXPECT_EQ(late.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << late.status.error_message();
  }
  const Answer partial = Generate(Ask("the one", 500), milliseconds(130));  // 30 ms for the engine
  if (partial.status.ok()) {
    ASSERT_EQ(partial.finished().size(), 1u);
    if (partial.finished()[0].finish_reason() == v1::FINISH_REASON_DEADLINE) {
      EXPECT_EQ(partial.finished()[0].stop_reason(), "deadline");
      EXPECT_GT(partial.finished()[0].usage().completion_tokens(), 0);
      EXPECT_LT(partial.finished()[0].usage().completion_tokens(), 500);
    }
  } else {
    EXPECT_EQ(partial.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << partial.status.error_message();
  }
  EXPECT_TRUE(WaitIdle());
}

TEST_F(GrpcServiceTest, FullQueueAsksForPatience) {
  std::optional<Answer> refused;
  for (int attempt = 0; attempt < 20 && !refused; ++attempt) {
    const BusyEngine busy(*engine_, 100);
    Answer answer = Generate(Ask("the one", 1));
    if (answer.status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) refused = std::move(answer);
  }
  ASSERT_TRUE(refused) << "the queue never filled";
  ASSERT_EQ(refused->trailers.count("grpc-retry-pushback-ms"), 1u);
  EXPECT_GT(std::stoi(refused->trailers.find("grpc-retry-pushback-ms")->second), 0);
  EXPECT_TRUE(WaitIdle());
}

TEST_F(GrpcServiceTest, CancelByIdAndByLeaving) {
  v1::GenerateRequest request = Ask("the one", 400);
  request.set_request_id("mine");
  v1::GenerateResponse event;
  {
    grpc::ClientContext call;
    auto reader = stub_->Generate(&call, request);
    ASSERT_TRUE(reader->Read(&event));
    v1::CancelRequest cancel;
    cancel.set_request_id("mine");
    v1::CancelResponse found;
    grpc::ClientContext second;
    ASSERT_TRUE(stub_->Cancel(&second, cancel, &found).ok());
    while (reader->Read(&event)) {
    }
    const grpc::Status status = reader->Finish();
    if (found.found()) {
      EXPECT_TRUE(event.has_finished()) << event.ShortDebugString();
      EXPECT_TRUE(status.error_code() == grpc::StatusCode::CANCELLED || event.finished().finish_reason() == v1::FINISH_REASON_LENGTH);
    }
    v1::CancelResponse again;
    grpc::ClientContext repeated;
    ASSERT_TRUE(stub_->Cancel(&repeated, cancel, &again).ok());
    EXPECT_EQ(again.found(), found.found()) << "idempotent";
    cancel.set_request_id("nobody");
    grpc::ClientContext third;
    ASSERT_TRUE(stub_->Cancel(&third, cancel, &found).ok());
    EXPECT_FALSE(found.found());
  }
  for (int i = 0; i < 20; ++i) {  // at every point of the call's life
    request.set_request_id("leaver-" + std::to_string(i));
    grpc::ClientContext call;
    auto reader = stub_->Generate(&call, request);
    for (int reads = 0; reads < i % 5 && reader->Read(&event); ++reads) {
    }
    call.TryCancel();
    reader->Finish();
  }
  EXPECT_TRUE(WaitIdle());
  EXPECT_EQ(engine_->Stats().kv.num_sequences, 0);
}

TEST_F(GrpcServiceTest, TheSameIdTwiceIsRefused) {
  v1::GenerateRequest request = Ask("the one", 450);
  request.set_request_id("twice");
  grpc::ClientContext call;
  auto reader = stub_->Generate(&call, request);
  v1::GenerateResponse event;
  ASSERT_TRUE(reader->Read(&event));
  const Answer second = Generate(request);
  call.TryCancel();
  reader->Finish();
  if (!second.status.ok()) {  // otherwise the first was through already
    EXPECT_EQ(second.status.error_code(), grpc::StatusCode::ALREADY_EXISTS) << second.status.error_message();
    EXPECT_NE(second.status.error_message().find("twice"), std::string::npos);
  }
  EXPECT_TRUE(WaitIdle());
}

TEST_F(GrpcServiceTest, ManyStreamsAtOnce) {
  const std::string expected = Generate(Ask("the one", 20)).text();
  std::vector<std::thread> clients;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 6; ++i) {
    clients.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        const Answer answer = Generate(Ask("the one", 20));
        const bool refused = answer.status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
        wrong += !refused && (!answer.status.ok() || answer.text() != expected);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(GrpcServiceTest, PoliciesAreListedAndLoadingIsUnavailable) {
  grpc::ClientContext call;
  v1::ListKvPoliciesResponse policies;
  ASSERT_TRUE(stub_->ListKvPolicies(&call, {}, &policies).ok());
  const auto snapkv = std::find_if(policies.policies().begin(), policies.policies().end(), [](const auto& p) { return p.name() == "snapkv"; });
  ASSERT_NE(snapkv, policies.policies().end());
  EXPECT_EQ(snapkv->parameters(0).name(), "window");
  EXPECT_EQ(snapkv->parameters(0).default_number(), 64);
  EXPECT_EQ(snapkv->parameters(0).max(), 512);
  for (const auto& p : policies.policies()) EXPECT_NE(p.name(), "random") << "a baseline is offered";
  v1::ListModelsResponse models;
  grpc::ClientContext second;
  ASSERT_TRUE(stub_->ListModels(&second, {}, &models).ok());
  ASSERT_EQ(models.models_size(), 1);
  EXPECT_EQ(models.models(0).id(), "tiny");
  EXPECT_EQ(models.models(0).max_model_len(), 512);

  context_.engine = nullptr;
  lifecycle_.Set(Phase::kLoading);
  const Answer answer = Generate(Ask());
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_NE(answer.status.error_message().find("loading"), std::string::npos) << answer.status.error_message();
}

TEST_F(GrpcServiceTest, HealthFollowsServing) {
  const auto health = grpc::health::v1::Health::NewStub(channel_);
  const auto serving = [&](const std::string& service) {
    grpc::ClientContext call;
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    grpc::health::v1::HealthCheckResponse response;
    EXPECT_TRUE(health->Check(&call, request, &response).ok());
    return response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
  };
  for (const char* service : {"", "loupe.v1.Inference"}) EXPECT_FALSE(serving(service));
  server_->SetServing(true);
  for (const char* service : {"", "loupe.v1.Inference"}) EXPECT_TRUE(serving(service));
  server_->SetServing(false);
  EXPECT_FALSE(serving(""));
}

TEST_F(GrpcServiceTest, PortInUseAndBadAddressesAreNamed) {
  const std::string taken = "127.0.0.1:" + std::to_string(server_->port());
  const auto second = GrpcServer::Start(context_, taken);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_NE(std::string(second.status().message()).find(taken), std::string::npos) << second.status();
  for (const char* address : {"", "8001", ":8001", "localhost:", "127.0.0.1:99999", "127.0.0.1:http"}) {
    EXPECT_FALSE(GrpcServer::Start(context_, address).ok()) << address;
  }
}

TEST_F(GrpcServiceTest, ShutdownLetsRunningStreamsFinish) {
  grpc::ClientContext call;
  auto reader = stub_->Generate(&call, Ask("the one", 300));
  v1::GenerateResponse event;
  ASSERT_TRUE(reader->Read(&event));
  std::thread shutdown([&] { server_->Shutdown(std::chrono::steady_clock::now() + std::chrono::seconds(20)); });
  while (reader->Read(&event)) {
  }
  const grpc::Status status = reader->Finish();
  shutdown.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(event.finished().usage().completion_tokens(), 300);
}

TEST_F(GrpcServiceTest, ShutdownCutsWhatIsLeftAtItsDeadline) {
  const BusyEngine busy(*engine_, 4);
  grpc::ClientContext call;
  auto reader = stub_->Generate(&call, Ask("the one", 480));
  std::this_thread::sleep_for(milliseconds(20));
  server_->Shutdown(std::chrono::steady_clock::now() + milliseconds(1));
  v1::GenerateResponse event;
  while (reader->Read(&event)) {
  }
  reader->Finish();  // any status: it must only end
  SUCCEED();
}

TEST_F(GrpcServiceTest, AdminStatsDrainAndWhatComesLater) {
  std::atomic<int> drains{0};
  auto admin = GrpcServer::StartAdmin(context_, "127.0.0.1:0", [&] { ++drains; });
  ASSERT_TRUE(admin.ok()) << admin.status();
  const auto channel = grpc::CreateChannel("127.0.0.1:" + std::to_string((*admin)->port()), grpc::InsecureChannelCredentials());
  const auto stub = v1::Admin::NewStub(channel);
  v1::GetStatsResponse stats;
  grpc::ClientContext first, second, third, fourth;
  ASSERT_TRUE(stub->GetStats(&first, {}, &stats).ok());
  EXPECT_GT(stats.kv_capacity_bytes(), 0);
  EXPECT_GT(stats.weight_bytes(), 0);
  v1::DrainResponse drained;
  EXPECT_TRUE(stub->Drain(&second, {}, &drained).ok());
  EXPECT_EQ(drains, 1);
  v1::ResetPrefixCacheResponse reset;
  EXPECT_EQ(stub->ResetPrefixCache(&third, {}, &reset).error_code(), grpc::StatusCode::UNIMPLEMENTED);
  v1::ListModelsResponse models;
  EXPECT_EQ(v1::Inference::NewStub(channel)->ListModels(&fourth, {}, &models).error_code(), grpc::StatusCode::UNIMPLEMENTED)
      << "the admin listener serves Admin only";
}

}  // namespace
}  // namespace loupe
