// What the gateway costs a token: 32 streams whose tokens come from a script in place of the model's step, sent as SSE
// frames over HTTP and as messages over gRPC, to readers in a process of their own. Prints the CPU time of the serving
// process a token, as JSON lines; in it is the writer that stands for the step thread.
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "grpcpp/grpcpp.h"
#include "loupe/v1/inference.grpc.pb.h"
#include "server/grpc_stream.h"
#include "server/http_server.h"
#include "server/openai_answer.h"
#include "spdlog/spdlog.h"
#include "tests/unit/server/raw_client.h"

namespace loupe {
namespace {

using std::chrono::microseconds;
constexpr int kStreams = 32;
constexpr microseconds kStep{8000};  // of the model that is stood for: 32 streams at 125 tokens a second each

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

// Streams as requests open them, written a token at a time each, all within one step as the engine does.
class Script {
 public:
  explicit Script(int tokens) : tokens_(tokens) {}
  ~Script() {
    if (writer_.joinable()) writer_.join();
  }
  std::shared_ptr<ResponseStream> Open() {
    const std::lock_guard lock(mutex_);
    streams_.push_back(std::make_shared<ResponseStream>("s" + std::to_string(streams_.size()), 1));
    auto stream = streams_.back();
    if (streams_.size() == kStreams) writer_ = std::thread([this] { Write(); });
    return stream;
  }
  double cpu_s() const { return cpu_s_; }

 private:
  void Write() {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // every reader is there
    const double start = CpuSeconds();
    auto next = std::chrono::steady_clock::now();
    for (int t = 0; t < tokens_; ++t) {
      for (const auto& stream : streams_) {
        Delta delta;
        delta.text = " token";
        delta.token_ids = {t};
        stream->Push(std::move(delta));
      }
      std::this_thread::sleep_until(next += kStep);
    }
    cpu_s_ = CpuSeconds() - start;
    for (const auto& stream : streams_) {
      Finished finished;
      finished.usage.completion_tokens = tokens_;
      stream->Push(std::move(finished));
    }
  }

  const int tokens_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<ResponseStream>> streams_;
  std::thread writer_;
  std::atomic<double> cpu_s_{0};
};

void Print(const char* protocol, int tokens, double cpu_s) {
  std::printf("{\"case\": \"gateway\", \"protocol\": \"%s\", \"streams\": %d, \"tokens\": %d, \"cpu_us_per_token\": %.2f}\n", protocol, kStreams,
              kStreams * tokens, 1e6 * cpu_s / (kStreams * tokens));
  std::fflush(stdout);
}

// Runs `readers` in a child that learns the port through a pipe. To be called before this process has threads.
class Child {
 public:
  explicit Child(const std::function<int(int port)>& readers) {
    if (pipe(pipe_) != 0) std::abort();
    pid_ = fork();
    if (pid_ != 0) return;
    int port = 0;
    if (read(pipe_[0], &port, sizeof port) != sizeof port) _exit(3);
    _exit(readers(port));
  }
  bool Run(int port) {
    if (write(pipe_[1], &port, sizeof port) != sizeof port) return false;
    int status = 0;
    waitpid(pid_, &status, 0);
    return status == 0;
  }

 private:
  int pipe_[2];
  pid_t pid_ = 0;
};

int ReadHttp(int port) {
  std::vector<std::thread> readers;
  std::atomic<int> whole{0};
  for (int i = 0; i < kStreams; ++i) {
    readers.emplace_back([&] {
      RawClient client(port);
      client.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
      whole += client.ReadUntil("\r\n0\r\n\r\n").ends_with("\r\n0\r\n\r\n");
    });
  }
  for (auto& reader : readers) reader.join();
  return whole == kStreams ? 0 : 4;
}

bool BenchHttp(int tokens) {
  Child child(ReadHttp);
  Lifecycle lifecycle;
  Metrics metrics("script");
  ServerContext context;
  context.lifecycle = &lifecycle;
  context.metrics = &metrics;
  Script script(tokens);
  ApiRequest request;
  request.stream = true;
  HttpRouter router;
  router.Add("GET", "/", [&](const HttpRequest&, HttpExchange& exchange) -> boost::asio::awaitable<void> {
    Answer answer(request, "r", "script", {{1}});
    StreamSet streams({script.Open()});
    co_await RunAnswer(request, answer, streams, exchange);
  });
  HttpServerOptions options;
  options.count_and_log = false;
  auto server = HttpServer::Start(context, std::move(router), "127.0.0.1:0", options);
  if (!server.ok() || !child.Run((*server)->port())) return false;
  Print("http", tokens, script.cpu_s());
  return true;
}

class ScriptService : public v1::Inference::CallbackService {
 public:
  ScriptService(Script& script, Metrics& metrics) : script_(script), metrics_(metrics) {}
  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(grpc::CallbackServerContext* call, const v1::GenerateRequest*) override {
    auto stream = std::make_shared<GrpcStream<v1::GenerateResponse>>(pool_, GrpcCallLog(&metrics_, Api::kGrpcGenerate, "r"), call);
    stream->Begin(script_.Open(), "", false, 1);
    return stream.get();
  }

 private:
  Script& script_;
  Metrics& metrics_;
  boost::asio::thread_pool pool_{1};
};

int ReadGrpc(int port) {
  const auto stub = v1::Inference::NewStub(grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));
  std::vector<std::thread> readers;
  std::atomic<int> whole{0};
  for (int i = 0; i < kStreams; ++i) {
    readers.emplace_back([&] {
      grpc::ClientContext call;
      auto reader = stub->Generate(&call, {});
      v1::GenerateResponse event;
      bool finished = false;
      while (reader->Read(&event)) finished = event.has_finished();
      whole += finished && reader->Finish().ok();
    });
  }
  for (auto& reader : readers) reader.join();
  return whole == kStreams ? 0 : 4;
}

bool BenchGrpc(int tokens) {
  Child child(ReadGrpc);
  Metrics metrics("script");
  Script script(tokens);
  ScriptService service(script, metrics);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  const bool read = child.Run(port);
  server->Shutdown();
  if (read) Print("grpc", tokens, script.cpu_s());
  return read;
}

}  // namespace
}  // namespace loupe

int main(int argc, char** argv) {
  spdlog::set_level(spdlog::level::warn);
  const std::string protocol = argc > 1 ? argv[1] : "";
  const int tokens = argc > 2 ? std::atoi(argv[2]) : 2000;
  if ((protocol != "http" && protocol != "grpc") || tokens < 1) {
    std::fprintf(stderr, "usage: gateway_bench http|grpc [TOKENS]\n");
    return 2;
  }
  const bool done = protocol == "http" ? loupe::BenchHttp(tokens) : loupe::BenchGrpc(tokens);
  if (!done) std::fprintf(stderr, "error: not every reader got its whole answer\n");
  return done ? 0 : 1;
}
