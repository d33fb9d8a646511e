#include "server/http_server.h"

#include <thread>

#include "gtest/gtest.h"
#include "server/logging.h"
#include "server/openai_answer.h"
#include "tests/unit/server/raw_client.h"

namespace loupe {
namespace {

namespace asio = boost::asio;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

// A listener with routes of its own: what a handler sees and what comes back over a real socket.
class HttpServerTest : public testing::Test {
 protected:
  HttpServerTest() {
    context_.lifecycle = &lifecycle_;
    context_.metrics = &metrics_;
    context_.max_body_bytes = 3 << 20;
    options_.count_and_log = false;
    router_.Add("GET", "/hello", Immediate([](const HttpRequest&) { return Body("hello"); }));
    router_.Add("POST", "/echo", Immediate([](const HttpRequest& request) { return Body(request.body); }));
    router_.Add("GET", "/throw",
                Immediate([](const HttpRequest&) -> HttpResponse { throw std::runtime_error("boom"); }));
    router_.Add("GET", "/nothing", [](const HttpRequest&, HttpExchange&) -> asio::awaitable<void> { co_return; });
    router_.Add("GET", "/wait", [this](const HttpRequest&, HttpExchange& exchange) { return WaitForever(exchange); });
    router_.Add("GET", "/flood", [this](const HttpRequest&, HttpExchange& exchange) { return Flood(exchange); });
    router_.Add("POST", "/work", Computed([this](const HttpRequest& request) { return Work(request); }));
    router_.Add("GET", "/three", [](const HttpRequest&, HttpExchange& exchange) { return Three(exchange); });
  }

  static HttpResponse Body(const std::string& text) {
    HttpResponse response;
    response.body = text;
    response.content_type = "text/plain";
    return response;
  }

  // Work on a body that takes until it is released.
  HttpResponse Work(const HttpRequest& request) {
    ++waiting_;
    while (!release_) std::this_thread::sleep_for(milliseconds(1));
    --waiting_;
    if (request.body.starts_with("throw")) throw std::runtime_error("boom");
    return Body(std::to_string(request.body.size()));
  }
  static asio::awaitable<void> Three(HttpExchange& exchange) {
    HttpResponse head;
    co_await exchange.StartStream(std::move(head));
    for (const char* part : {"one ", "two ", "three"}) {
      std::string data = part;
      co_await exchange.Write(std::move(data));
    }
  }
  asio::awaitable<void> WaitForever(HttpExchange& exchange) {
    ++waiting_;
    while (!exchange.client_gone() && !release_) co_await exchange.Wait(Clock::now() + milliseconds(20));
    if (!exchange.client_gone()) {
      HttpResponse response = Body("released");
      co_await exchange.Respond(std::move(response));
    }
    --waiting_;
  }
  // Writes until the client is gone; its buffers fill up soon.
  asio::awaitable<void> Flood(HttpExchange& exchange) {
    ++waiting_;
    HttpResponse head;
    bool going = co_await exchange.StartStream(std::move(head));
    while (going) {
      std::string data(1 << 20, 'x');
      going = co_await exchange.Write(std::move(data));
    }
    --waiting_;
  }

  void Start() {
    auto server = HttpServer::Start(context_, router_, "127.0.0.1:0", options_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  bool Eventually(const std::function<bool()>& holds) {
    for (int i = 0; i < 500; ++i) {
      if (holds()) return true;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return false;
  }

  Lifecycle lifecycle_;
  Metrics metrics_{"test"};
  ServerContext context_;
  HttpServerOptions options_;
  HttpRouter router_;
  std::atomic<int> waiting_{0};
  std::atomic<bool> release_{false};
  std::unique_ptr<HttpServer> server_;  // last: handlers refer to the rest
};

TEST_F(HttpServerTest, AnswersAndKeepsTheConnection) {
  Start();
  RawClient client(server_->port());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(
        client.Send("GET /hello?x=1 HTTP/1.1\r\nHost: x\r\nX-Request-Id: my-" + std::to_string(i) + "\r\n\r\n"));
    const std::string answer = client.ReadAnswer();
    EXPECT_EQ(answer.rfind("HTTP/1.1 200 OK\r\n", 0), 0u) << answer;
    EXPECT_NE(answer.find("X-Request-Id: my-" + std::to_string(i) + "\r\n"), std::string::npos);
    EXPECT_EQ(answer.find("Connection: close"), std::string::npos);
    EXPECT_EQ(answer.substr(answer.size() - 5), "hello");
  }
}

TEST_F(HttpServerTest, PipelinedRequestsAreAnsweredInOrder) {
  Start();
  RawClient client(server_->port());
  std::string all;
  for (const char* body : {"a", "bb", "ccc"}) {
    all += std::string("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: ") + std::to_string(strlen(body)) +
           "\r\n\r\n" + body;
  }
  ASSERT_TRUE(client.Send(all));
  for (const char* body : {"a", "bb", "ccc"}) {
    const std::string answer = client.ReadAnswer();
    EXPECT_EQ(answer.substr(answer.find("\r\n\r\n") + 4), body);
  }
}

TEST_F(HttpServerTest, RequestsPipelinedBehindAWaitingOneAreKept) {
  Start();
  RawClient client(server_->port());
  ASSERT_TRUE(client.Send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"));
  ASSERT_TRUE(Eventually([&] { return waiting_ == 1; }));
  ASSERT_TRUE(client.Send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\nGET /hello HTTP/1.1\r\nHo"));
  std::this_thread::sleep_for(milliseconds(60));
  ASSERT_TRUE(client.Send("st: x\r\n\r\n"));
  release_ = true;
  EXPECT_NE(client.ReadAnswer().find("released"), std::string::npos);
  EXPECT_NE(client.ReadAnswer().find("hello"), std::string::npos);
  EXPECT_NE(client.ReadAnswer().find("hello"), std::string::npos);
}

TEST_F(HttpServerTest, RoutesMethodsHeadAndOptions) {
  Start();
  RawClient client(server_->port());
  client.Send("GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n");
  std::string answer = client.ReadAnswer();
  EXPECT_NE(answer.find("404"), std::string::npos);
  EXPECT_NE(answer.find("POST /echo"), std::string::npos) << "names the routes there are";
  client.Send("POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
  answer = client.ReadAnswer();
  EXPECT_NE(answer.find("405"), std::string::npos);
  EXPECT_NE(answer.find("Allow: GET, HEAD\r\n"), std::string::npos);
  client.Send("OPTIONS /echo HTTP/1.1\r\nHost: x\r\n\r\n");
  answer = client.ReadUntil("\r\n\r\n");
  EXPECT_NE(answer.find("204"), std::string::npos);
  EXPECT_NE(answer.find("Allow: POST\r\n"), std::string::npos);
  client.Send("HEAD /hello HTTP/1.1\r\nHost: x\r\n\r\nGET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  answer = client.ReadUntil("\r\n\r\n");
  EXPECT_NE(answer.find("Content-Length: 5\r\n"), std::string::npos);
  EXPECT_EQ(client.ReadAnswer().rfind("HTTP/1.1 200", 0), 0u) << "HEAD has no body";
}

TEST_F(HttpServerTest, ChunkedBodiesAndExpect) {
  Start();
  RawClient client(server_->port());
  client.Send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
  std::string answer = client.ReadAnswer();
  EXPECT_EQ(answer.substr(answer.find("\r\n\r\n") + 4), "abcde");
  client.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(client.ReadUntil("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  client.Send("ok");
  answer = client.ReadAnswer();
  EXPECT_EQ(answer.substr(answer.size() - 2), "ok");
}

TEST_F(HttpServerTest, LargeBodiesAreRefusedAndTheAnswerArrives) {
  Start();
  RawClient client(server_->port());
  const std::string body(4 << 20, 'x');
  client.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
  const std::string answer = client.ReadAnswer();
  EXPECT_EQ(answer.rfind("HTTP/1.1 413", 0), 0u) << answer;
  EXPECT_NE(answer.find("3145728"), std::string::npos) << "the limit is named";
  RawClient chunked(server_->port());
  chunked.Send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n400000\r\n" + body +
               "\r\n0\r\n\r\n");
  EXPECT_EQ(chunked.ReadAnswer().rfind("HTTP/1.1 413", 0), 0u);
}

TEST_F(HttpServerTest, OnlySoManyLargeBodiesAtATime) {
  options_.max_large_bodies = 1;
  Start();
  RawClient first(server_->port());
  first.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n" + std::string(1500000, 'y'));
  std::this_thread::sleep_for(milliseconds(100));
  RawClient second(server_->port());
  second.Send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1e8480\r\n" + std::string(1500000, 'z'));
  const std::string answer = second.ReadAnswer();
  EXPECT_EQ(answer.rfind("HTTP/1.1 503", 0), 0u) << answer;
  EXPECT_NE(answer.find("Retry-After: "), std::string::npos);
  first.Send(std::string(500000, 'y'));
  EXPECT_EQ(first.ReadAnswer().rfind("HTTP/1.1 200", 0), 0u);
  // Its answer is out, so there is room again.
  RawClient third(server_->port());
  third.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n" + std::string(2000000, 'z'));
  EXPECT_EQ(third.ReadAnswer().rfind("HTTP/1.1 200", 0), 0u);
}

TEST_F(HttpServerTest, BodiesThatAreOnlyAnnouncedTakeNoPlace) {
  options_.max_large_bodies = 1;
  Start();
  std::vector<std::unique_ptr<RawClient>> slow;
  for (int i = 0; i < 4; ++i) {
    slow.push_back(std::make_unique<RawClient>(server_->port()));
    const char* framing = i % 2 == 0 ? "Content-Length: 3000000\r\n\r\nabc" : "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n";
    slow.back()->Send(std::string("POST /echo HTTP/1.1\r\nHost: x\r\n") + framing);
  }
  std::this_thread::sleep_for(milliseconds(100));
  RawClient client(server_->port());
  client.Send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n");
  EXPECT_EQ(client.ReadAnswer().rfind("HTTP/1.1 200", 0), 0u);
  client.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n" + std::string(2000000, 'z'));
  EXPECT_EQ(client.ReadAnswer().rfind("HTTP/1.1 200", 0), 0u);
}

TEST_F(HttpServerTest, WorkOnBigBodiesHoldsUpNobody) {
  options_.num_threads = 1;
  Start();
  std::vector<std::unique_ptr<RawClient>> big;
  for (int i = 0; i < 3; ++i) {  // more than there are workers
    big.push_back(std::make_unique<RawClient>(server_->port()));
    std::string body(100'000, 'x');
    if (i == 1) body.replace(0, 5, "throw");
    big.back()->Send("POST /work HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + body);
  }
  ASSERT_TRUE(Eventually([&] { return waiting_ == 2; }));
  RawClient client(server_->port());
  client.Send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_NE(client.ReadAnswer().find("hello"), std::string::npos);
  EXPECT_EQ(waiting_, 2);
  big[0]->Close();  // its work goes on and harms nobody
  release_ = true;
  EXPECT_EQ(big[1]->ReadAnswer().rfind("HTTP/1.1 500", 0), 0u);
  EXPECT_NE(big[2]->ReadAnswer().find("\r\n\r\n100000"), std::string::npos);
}

TEST_F(HttpServerTest, StopWaitsForWorkThatRefersToItsRequests) {
  Start();
  RawClient client(server_->port());
  client.Send("POST /work HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + std::string(100'000, 'x'));
  ASSERT_TRUE(Eventually([&] { return waiting_ == 1; }));
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(2500));
    release_ = true;
  });
  server_->Stop(Clock::now());
  EXPECT_EQ(waiting_, 0);
  late.join();
}

// Whatever leaves room for two readings of where a request ends is refused, and what follows it is never taken for a
// request.
TEST_F(HttpServerTest, AmbiguousFramingIsRefusedAndTheConnectionClosed) {
  Start();
  for (const char* framing :
       {"Transfer-Encoding: gzip", "Transfer-Encoding: xchunked", "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: identity", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked, chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Content-Length: 5\r\nTransfer-Encoding: chunked", "Content-Length: 5\r\nTransfer-Encoding: gzip",
        "Transfer-Encoding: gzip\r\nContent-Length: 5", "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5\r\nContent-Length: 5", "Content-Length: +5", "Content-Length: 5, 5", "Content-Length: 5, 6",
        "Transfer-Encoding:", "Transfer-Encoding: \"chunked\""}) {
    RawClient client(server_->port());
    client.Send(std::string("POST /echo HTTP/1.1\r\nHost: x\r\n") + framing +
                "\r\n\r\n0\r\n\r\nGET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
    client.ShutdownSend();
    const std::string answer = client.ReadAll();
    EXPECT_EQ(answer.rfind("HTTP/1.1 400", 0), 0u) << framing << " gave " << answer;
    EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos) << framing;
    EXPECT_EQ(answer.find("HTTP/1.1 200"), std::string::npos) << framing << " let a second request through";
  }
}

TEST_F(HttpServerTest, HostExpectAndTheFormOfTheTarget) {
  Start();
  const std::tuple<std::string, const char*> cases[] = {
      {"GET /hello HTTP/1.1\r\n", "400"},
      {"GET /hello HTTP/1.1\r\nHost: a\r\nHost: b\r\n", "400"},
      {"GET /hello HTTP/1.0\r\n", "200"},
      {"GET http://a.b:80/hello?x HTTP/1.1\r\nHost: a.b:80\r\n", "200"},
      {"GET HTTP://a.b/nowhere HTTP/1.1\r\nHost: a.b\r\n", "404"},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nExpect: foo\r\n", "417"},
      {"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n", "404"},
      {"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n", "405"},
  };
  for (const auto& [head, status] : cases) {
    RawClient client(server_->port());
    client.Send(head + "\r\n");
    const std::string answer = client.ReadAnswer();
    EXPECT_EQ(answer.substr(9, 3), status) << head << " gave " << answer;
  }
}

TEST_F(HttpServerTest, GarbageIsRefusedAndHarmsNobody) {
  Start();
  const std::pair<std::string, const char*> cases[] = {
      {std::string("\0\1\2\r\n\r\n", 7), "400"},
      {"GET\r\n\r\n", "400"},
      {"GET /hello HTTP/9.9\r\n\r\n", "400"},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n", "400"},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: nine\r\n\r\n", "400"},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "400"},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nA: " + std::string(100'000, 'b') + "\r\n\r\n", "431"},
  };
  for (const auto& [bytes, status] : cases) {
    RawClient client(server_->port());
    client.Send(bytes);
    const std::string answer = client.ReadAll();
    EXPECT_EQ(answer.substr(0, 12), std::string("HTTP/1.1 ") + status) << bytes.substr(0, 60) << " gave " << answer;
  }
  RawClient client(server_->port());
  client.Send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(client.ReadAnswer().rfind("HTTP/1.1 200", 0), 0u);
}

TEST_F(HttpServerTest, UnfitRequestIdsAreReplaced) {
  Start();
  RawClient client(server_->port());
  for (const std::string& id : {std::string(200, 'a'), std::string("a b"), std::string("\xc3\xa9")}) {
    client.Send("GET /hello HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + id + "\r\n\r\n");
    const std::string answer = client.ReadAnswer();
    const size_t at = answer.find("X-Request-Id: ");
    ASSERT_NE(at, std::string::npos);
    EXPECT_EQ(answer.find("\r\n", at) - at - 14, 32u) << answer;
  }
}

TEST_F(HttpServerTest, HandlersThatFailAnswer500) {
  Start();
  RawClient client(server_->port());
  for (const char* path : {"/throw", "/nothing"}) {
    client.Send(std::string("GET ") + path + " HTTP/1.1\r\nHost: x\r\n\r\n");
    const std::string answer = client.ReadAnswer();
    EXPECT_EQ(answer.rfind("HTTP/1.1 500", 0), 0u) << answer;
    EXPECT_NE(answer.find("server_error"), std::string::npos);
    EXPECT_EQ(answer.find("boom"), std::string::npos) << "the inside stays inside";
  }
}

TEST_F(HttpServerTest, StreamsInChunksAndForOldClientsUntilTheEnd) {
  Start();
  RawClient client(server_->port());
  client.Send("GET /three HTTP/1.1\r\nHost: x\r\n\r\n");
  std::string answer = client.ReadUntil("0\r\n\r\n");
  EXPECT_NE(answer.find("Transfer-Encoding: chunked\r\n"), std::string::npos);
  EXPECT_NE(answer.find("4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n"), std::string::npos) << answer;
  client.Send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_NE(client.ReadAnswer().find("hello"), std::string::npos) << "the connection lives on";
  RawClient old(server_->port());
  old.Send("GET /three HTTP/1.0\r\n\r\n");
  answer = old.ReadAll();
  EXPECT_TRUE(old.closed());
  EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
  EXPECT_EQ(answer.substr(answer.find("\r\n\r\n") + 4), "one two three");
}

TEST_F(HttpServerTest, AClientThatLeavesIsNoticed) {
  Start();
  {
    RawClient client(server_->port());
    client.Send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
    ASSERT_TRUE(Eventually([&] { return waiting_ == 1; }));
  }
  EXPECT_TRUE(Eventually([&] { return waiting_ == 0; }));
}

// Whatever it sent ahead: unread bytes must not hide that it is gone.
TEST_F(HttpServerTest, AClientThatPipelinesAndLeavesIsNoticed) {
  Start();
  for (const size_t ahead : {size_t{1}, size_t{70'000}, size_t{262'144}, size_t{4} << 20}) {
    waiting_ = 0;
    std::string bytes = "GET /wait HTTP/1.1\r\nHost: x\r\n\r\n";
    const std::string next = "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n";
    RawClient client(server_->port());
    client.Send(bytes);
    ASSERT_TRUE(Eventually([&] { return waiting_ == 1; }));
    std::string flood;
    while (flood.size() < ahead) flood += next;
    client.Send(flood);
    client.Close();
    EXPECT_TRUE(Eventually([&] { return waiting_ == 0; })) << ahead;
  }
}

TEST_F(HttpServerTest, TheLogSaysWhatTheClientSaw) {
  testing::internal::CaptureStderr();
  InitLogging("info");
  options_.count_and_log = true;
  Start();
  {
    RawClient client(server_->port());
    client.Send("GET /wait HTTP/1.1\r\nHost: x\r\nX-Request-Id: left\r\n\r\n");
    ASSERT_TRUE(Eventually([&] { return waiting_ == 1; }));
  }
  ASSERT_TRUE(Eventually([&] { return waiting_ == 0; }));
  release_ = true;
  for (const char* path : {"/wait", "/three"}) {
    RawClient client(server_->port());
    client.Send(std::string("GET ") + path + " HTTP/1.0\r\nX-Request-Id: stayed\r\n\r\n");
    EXPECT_NE(client.ReadAll(), "");
  }
  server_->Stop(Clock::now() + seconds(5));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("\"request_id\":\"left\",\"method\":\"GET\",\"path\":\"/wait\",\"status\":499"), std::string::npos)
      << log;
  EXPECT_NE(log.find("\"request_id\":\"stayed\",\"method\":\"GET\",\"path\":\"/wait\",\"status\":200"),
            std::string::npos)
      << log;
  EXPECT_NE(log.find("\"request_id\":\"stayed\",\"method\":\"GET\",\"path\":\"/three\",\"status\":200"),
            std::string::npos)
      << log;
}

TEST_F(HttpServerTest, AReaderThatStopsReadingIsGivenUp) {
  options_.write_timeout = milliseconds(200);
  Start();
  RawClient client(server_->port());
  client.Send("GET /flood HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(Eventually([&] { return waiting_ == 1; }));
  EXPECT_TRUE(Eventually([&] { return waiting_ == 0; }));
}

TEST_F(HttpServerTest, IdleAndSlowClientsAreClosed) {
  options_.idle_timeout = milliseconds(100);
  options_.header_timeout = milliseconds(100);
  options_.body_timeout = milliseconds(100);
  Start();
  for (const char* bytes : {"", "GET /hel", "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1"}) {
    RawClient client(server_->port());
    client.Send(bytes);
    const auto start = Clock::now();
    EXPECT_EQ(client.ReadAll(), "") << bytes;
    EXPECT_LT(Clock::now() - start, seconds(5)) << bytes;
  }
}

TEST_F(HttpServerTest, ConnectionsHaveALimit) {
  context_.max_connections = 2;
  Start();
  RawClient a(server_->port()), b(server_->port());
  for (RawClient* client : {&a, &b}) {
    client->Send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_NE(client->ReadAnswer().find("hello"), std::string::npos);
  }
  RawClient c(server_->port());
  const std::string answer = c.ReadAnswer();
  EXPECT_EQ(answer.rfind("HTTP/1.1 503", 0), 0u) << answer;
  EXPECT_NE(answer.find("Retry-After: 1"), std::string::npos);
  a.Close();
  EXPECT_TRUE(Eventually([&] {
    RawClient d(server_->port());
    d.Send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
    return d.ReadAnswer().find("hello") != std::string::npos;
  }));
}

TEST_F(HttpServerTest, ClosesConnectionsWhileDraining) {
  Start();
  lifecycle_.Set(Phase::kDraining);
  RawClient client(server_->port());
  client.Send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string answer = client.ReadAll();
  EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
  EXPECT_TRUE(client.closed());
}

TEST_F(HttpServerTest, StopLetsRequestsFinishAndEndsIdleConnections) {
  Start();
  RawClient idle(server_->port()), busy(server_->port());
  idle.Send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  idle.ReadAnswer();
  busy.Send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(Eventually([&] { return waiting_ == 1; }));
  std::thread stopper([&] { server_->Stop(Clock::now() + seconds(30)); });
  EXPECT_EQ(idle.ReadAll(), "");
  EXPECT_TRUE(idle.closed());
  release_ = true;
  EXPECT_NE(busy.ReadAnswer().find("released"), std::string::npos);
  stopper.join();
  RawClient late(server_->port());
  EXPECT_FALSE(late.connected());
}

// Only a request that has come whole is worth waiting for.
TEST_F(HttpServerTest, StopDoesNotWaitForHalfSentRequests) {
  Start();
  std::vector<std::unique_ptr<RawClient>> clients;
  for (const char* bytes : {"GET /hel", "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1",
                            "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n"}) {
    clients.push_back(std::make_unique<RawClient>(server_->port()));
    clients.back()->Send(bytes);
  }
  std::this_thread::sleep_for(milliseconds(100));
  const auto start = Clock::now();
  server_->Stop(start + seconds(30));
  EXPECT_LT(Clock::now() - start, seconds(2));
}

TEST_F(HttpServerTest, StopHasAnEnd) {
  Start();
  RawClient busy(server_->port());
  busy.Send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(Eventually([&] { return waiting_ == 1; }));
  const auto start = Clock::now();
  server_->Stop(start + milliseconds(100));
  EXPECT_LT(Clock::now() - start, seconds(3));
  EXPECT_EQ(waiting_, 0);
}

TEST_F(HttpServerTest, AddressesThatDoNotWork) {
  Start();
  const std::string taken = "127.0.0.1:" + std::to_string(server_->port());
  auto second = HttpServer::Start(context_, router_, taken, options_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_NE(std::string(second.status().message()).find(taken), std::string::npos);
  for (const char* address :
       {"", "nonsense", "127.0.0.1", "127.0.0.1:99999", "no.such.host.invalid:0", "203.0.113.1:0"}) {
    EXPECT_EQ(HttpServer::Start(context_, router_, address, options_).status().code(),
              absl::StatusCode::kInvalidArgument)
        << address;
  }
}

}  // namespace
}  // namespace loupe
