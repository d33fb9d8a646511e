// The whole engine on one thread, with a scripted model, a clock that is set and an arena that is far too small: random
// requests with cancels, deadlines, disconnects, priorities, several samples and drains. Every seed is a new history.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "engine/engine_core.h"
#include "gtest/gtest.h"
#include "tests/sim/fake_model.h"

namespace loupe {
namespace {

struct World {
  explicit World(const CoreLimits& limits, EngineObserver* observer = nullptr) {
    BackendOptions options;
    options.device = "cpu";
    options.num_threads = 1;
    backend = *MakeBackend(options);
    auto created = EngineCore::Create(limits, {backend.get(), &model, &tokenizer, observer, &clock, 99});
    EXPECT_TRUE(created.ok()) << created.status();
    core = *std::move(created);
    model.backend = backend.get();
  }

  std::unique_ptr<Backend> backend;
  FakeModel model;
  FakeTokenizer tokenizer;
  FakeClock clock;
  std::unique_ptr<EngineCore> core;
};

CoreLimits SmallLimits() {
  CoreLimits limits;
  limits.kv_device_bytes = 3 * kSlabBytes;  // 768 tokens if pages were full
  limits.max_context = 300;
  limits.max_sequences = 9;
  limits.max_step_rows = 64;
  limits.max_queue = 40;
  return limits;
}

// What a client sees of one sample.
struct Received {
  std::string text;
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs, scored;  // of the output; of the prompt, heard by the first sample
  std::optional<Finished> finished;
  int num_finished = 0;
};

struct Client {
  Request request;  // with the seed that was used
  std::shared_ptr<ResponseStream> stream;
  std::vector<Received> samples;
  int started = 0;
  bool left = false;  // dropped the stream
  int submitted_step = 0, ended_step = -1;
};

void Read(Client* client) {
  if (!client->stream) return;
  while (auto event = client->stream->TryNext()) {
    if (std::holds_alternative<Started>(*event)) {
      ++client->started;
      for (const Received& r : client->samples) EXPECT_TRUE(r.tokens.empty()) << "Started comes first";
    } else if (auto* scored = std::get_if<PromptScored>(&*event)) {
      EXPECT_TRUE(client->samples[0].scored.empty()) << "told twice";
      for (const Received& r : client->samples) EXPECT_TRUE(r.tokens.empty()) << "the prompt's numbers come first";
      client->samples[0].scored = std::move(scored->tokens);
    } else if (auto* delta = std::get_if<Delta>(&*event)) {
      Received& r = client->samples.at(static_cast<size_t>(delta->index));
      EXPECT_EQ(r.num_finished, 0) << "a delta after the end";
      r.text += delta->text;
      r.tokens.insert(r.tokens.end(), delta->token_ids.begin(), delta->token_ids.end());
      r.logprobs.insert(r.logprobs.end(), delta->logprobs.begin(), delta->logprobs.end());
    } else {
      auto& finished = std::get<Finished>(*event);
      Received& r = client->samples.at(static_cast<size_t>(finished.index));
      ++r.num_finished;
      r.finished = finished;
    }
  }
}

// Runs one request alone, sample by sample, in a core with plenty of room and other step limits.
class AloneRunner {
 public:
  AloneRunner() : world_(Limits()) {}
  Received Run(Request request, int index) {
    request.id = absl::StrCat("alone-", count_++);
    request.sampling.seed = *request.sampling.seed + static_cast<uint64_t>(index);
    request.n = 1;
    request.priority = 0;
    request.deadline.reset();
    Client client;
    client.samples.resize(1);
    auto stream = world_.core->Submit(request);
    EXPECT_TRUE(stream.ok()) << stream.status();
    client.stream = *std::move(stream);
    for (int steps = 0; !client.stream->done() && steps < 1000; ++steps) {
      world_.core->Step();
      Read(&client);
    }
    return client.samples[0];
  }

 private:
  static CoreLimits Limits() {
    CoreLimits limits = SmallLimits();
    limits.kv_device_bytes = 12 * kSlabBytes;
    limits.max_sequences = 1;
    limits.max_step_rows = 37;
    return limits;
  }
  World world_;
  int count_ = 0;
};

class Observer : public EngineObserver {
 public:
  void OnStep(const StepReport& step) override {
    ++steps;
    rows += step.num_rows;
    EXPECT_GT(step.num_rows, 0);
    EXPECT_LE(step.prompt_rows, step.num_rows);
    EXPECT_GT(step.kv_read_bytes, 0);
    EXPECT_GT(step.kv_write_bytes, 0);
  }
  void OnFirstToken(double seconds) override {
    ++first_tokens;
    EXPECT_GE(seconds, 0);
  }
  void OnNextToken(double seconds) override {
    ++next_tokens;
    EXPECT_GE(seconds, 0);
  }
  void OnFinished(const Finished& finished) override { ++finished_by_reason[finished.reason]; }
  void OnPreempted(const Preemption& preemption) override {
    ++preempted[preemption.request_id];
    EXPECT_GE(preemption.num_tokens, 0);
    EXPECT_GE(preemption.bytes, 0) << "nothing, if all its pages are shared";
  }

  std::map<std::string, int> preempted;
  int steps = 0, rows = 0, first_tokens = 0, next_tokens = 0;
  std::map<FinishReason, int> finished_by_reason;
};

// One history. `seed` decides everything.
class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed), world_(SmallLimits(), &observer_) {}

  void Run(int num_requests) {
    while (static_cast<int>(clients_.size()) < num_requests || Busy()) {
      if (static_cast<int>(clients_.size()) < num_requests && Chance(0.4)) SubmitOne();
      if (Chance(0.05)) Disturb();
      if (Chance(0.002)) world_.core->queue().AbortAll(), log_ << "abort\n";
      world_.clock.Advance(0.001 * Uniform(1, 20));
      world_.core->Step();
      ++step_;
      ReadAll();
      if (step_ % 16 == 0) world_.core->cache().Audit();
      ASSERT_LT(step_, 20000) << "no end in sight";
    }
  }

  void CheckEnd() {
    world_.core->cache().Audit();
    const KvStats kv = world_.core->cache().Stats();
    EXPECT_EQ(kv.resident_bytes, 0);
    EXPECT_EQ(kv.num_sequences, 0);
    const EngineStats stats = world_.core->queue().Stats();
    EXPECT_EQ(stats.requests_running, 0);
    EXPECT_EQ(stats.requests_waiting, 0);
    EXPECT_EQ(stats.queue_prompt_tokens, 0);
    EXPECT_EQ(stats.kv.resident_bytes, 0);
    EXPECT_EQ(stats.generated_tokens, observer_.first_tokens + observer_.next_tokens);
    EXPECT_TRUE(world_.core->queue().WaitIdle(SteadyTime{}));
    int samples = 0, finished = 0;
    for (const auto& client : clients_) samples += client->request.n;
    for (const auto& [reason, count] : observer_.finished_by_reason) finished += count;
    EXPECT_EQ(samples, finished) << "every sample ends exactly once, those that nobody reads too";
    preemptions += stats.preemptions;
    recomputed += stats.recomputed_tokens;
  }

  // Everything that was heard is what the request says when it runs alone.
  void CompareWithAlone(AloneRunner& alone) {
    for (const auto& client : clients_) {
      for (int i = 0; i < client->request.n; ++i) {
        const Received& heard = client->samples[static_cast<size_t>(i)];
        if (client->left) continue;
        ASSERT_EQ(heard.num_finished, 1) << client->request.id << " sample " << i;
        const FinishReason reason = heard.finished->reason;
        EXPECT_EQ(heard.finished->usage.completion_tokens, static_cast<int>(heard.tokens.size()));
        const Received reference = alone.Run(client->request, i);
        const bool whole = reason == FinishReason::kStop || reason == FinishReason::kLength;
        ASSERT_LE(heard.tokens.size(), reference.tokens.size());
        EXPECT_TRUE(std::equal(heard.tokens.begin(), heard.tokens.end(), reference.tokens.begin()))
            << client->request.id << " sample " << i << " differs from the one that ran alone";
        if (!whole) continue;
        EXPECT_EQ(heard.tokens, reference.tokens) << client->request.id << " sample " << i;
        if (i == 0) ExpectSameScores(heard.scored, reference.scored, client->request);
        EXPECT_EQ(heard.text, reference.text);
        EXPECT_EQ(reason, reference.finished->reason);
        EXPECT_EQ(heard.finished->stop_reason, reference.finished->stop_reason);
        ++compared;
      }
    }
  }

  void ExpectSameScores(const std::vector<TokenLogprobs>& heard, const std::vector<TokenLogprobs>& reference, const Request& request) {
    ASSERT_EQ(heard.size(), request.sampling.prompt_logprobs < 0 ? 0 : request.prompt.size()) << request.id;
    ASSERT_EQ(heard.size(), reference.size());
    scored += static_cast<int>(heard.size());
    for (size_t i = 0; i < heard.size(); ++i) {
      EXPECT_EQ(heard[i].chosen.id, request.prompt[i]);
      EXPECT_EQ(heard[i].chosen.logprob, reference[i].chosen.logprob) << request.id << " token " << i;
      EXPECT_EQ(heard[i].top.size(), i == 0 ? 0 : static_cast<size_t>(request.sampling.prompt_logprobs));
    }
  }

  std::string log() const { return log_.str(); }
  const Observer& observer() const { return observer_; }
  int refused() const { return refused_; }

  int64_t preemptions = 0, recomputed = 0;
  int compared = 0, scored = 0;

 private:
  bool Chance(double p) { return std::uniform_real_distribution<>(0, 1)(random_) < p; }
  int Uniform(int low, int high) { return std::uniform_int_distribution<>(low, high)(random_); }
  bool Busy() const {
    return std::any_of(clients_.begin(), clients_.end(), [](const auto& c) { return c->ended_step < 0 && !c->left; }) ||
           world_.core->num_running() + world_.core->num_waiting() > 0;
  }

  Request MakeRequest() {
    Request request;
    request.id = absl::StrCat("r", clients_.size() + static_cast<size_t>(refused_));
    const int length = Chance(0.15) ? Uniform(150, 290) : Uniform(1, 70);
    for (int i = 0; i < length; ++i) request.prompt.push_back(Uniform(1, kFakeVocab - 1));
    SamplingParams& s = request.sampling;
    s.seed = static_cast<uint64_t>(Uniform(0, 1 << 30));
    s.temperature = Chance(0.3) ? 0.0f : 0.1f * static_cast<float>(Uniform(3, 15));
    if (Chance(0.3)) s.top_p = 0.8f;
    if (Chance(0.3)) s.top_k = Uniform(1, 20);
    if (Chance(0.2)) s.frequency_penalty = 0.5f, s.repetition_penalty = 1.2f;
    if (Chance(0.2)) s.logprobs = Uniform(0, 4);
    if (*s.seed % 5 == 0) s.prompt_logprobs = static_cast<int>(*s.seed / 5 % 4);
    if (Chance(0.2)) s.stop = {"B", "CD"};
    if (Chance(0.2)) s.ignore_eos = true;
    if (Chance(0.2)) s.min_tokens = Uniform(1, 20);
    if (Chance(0.1)) s.stop_token_ids = {Uniform(1, kFakeVocab - 1)};
    s.max_tokens = Chance(0.1) ? -1 : Chance(0.05) ? 0 : Uniform(1, 60);
    if (s.max_tokens < 0 && Chance(0.8)) s.max_tokens = 100;
    if (s.max_tokens >= 0) s.min_tokens = std::min(s.min_tokens, s.max_tokens);
    if (Chance(0.15)) request.n = Uniform(2, 4);
    if (Chance(0.2)) request.priority = Uniform(-1, 2);
    request.arrival = world_.clock.Now();
    if (Chance(0.15)) request.deadline = request.arrival + std::chrono::milliseconds(Uniform(0, 1500));
    return request;
  }

  void SubmitOne() {
    Request request = MakeRequest();
    auto stream = world_.core->Submit(request);
    if (!stream.ok()) {
      EXPECT_EQ(stream.status().code(), absl::StatusCode::kResourceExhausted) << stream.status();
      ++refused_;
      log_ << request.id << " refused\n";
      return;
    }
    auto client = std::make_unique<Client>();
    client->samples.resize(static_cast<size_t>(request.n));
    client->request = std::move(request);
    client->stream = *std::move(stream);
    client->submitted_step = step_;
    clients_.push_back(std::move(client));
  }

  void Disturb() {
    std::vector<Client*> open;
    for (const auto& c : clients_) {
      if (c->ended_step < 0 && !c->left) open.push_back(c.get());
    }
    if (open.empty()) return;
    Client* client = open[static_cast<size_t>(Uniform(0, static_cast<int>(open.size()) - 1))];
    switch (Uniform(0, 2)) {
      case 0:
        EXPECT_TRUE(world_.core->queue().Cancel(client->request.id));
        break;
      case 1:
        client->stream->Cancel();
        break;
      case 2:
        client->stream.reset();
        client->left = true;
        break;
    }
    log_ << client->request.id << " disturbed\n";
  }

  void ReadAll() {
    for (const auto& c : clients_) {
      if (c->ended_step >= 0 || c->left) continue;
      Read(c.get());
      if (!c->stream->done()) continue;
      c->ended_step = step_;
      log_ << step_ << " " << c->request.id;
      for (const Received& r : c->samples) {
        EXPECT_EQ(r.num_finished, 1) << c->request.id;
        log_ << " | " << static_cast<int>(r.finished->reason) << " " << r.finished->stop_reason << " " << r.text;
        EXPECT_LE(c->started, 1);
        EXPECT_TRUE(r.tokens.empty() || c->started == 1);
        EXPECT_EQ(r.logprobs.size(), c->request.sampling.logprobs >= 0 ? r.tokens.size() : 0);
      }
      log_ << "\n";
      // 40 requests of 130 tokens or so wait at most, 64 rows a step: nobody may wait for more than that many times over.
      EXPECT_LT(c->ended_step - c->submitted_step, 2500) << c->request.id << " starved";
    }
  }

  std::mt19937_64 random_;
  Observer observer_;
  World world_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::ostringstream log_;
  int step_ = 0, refused_ = 0;
};

TEST(EngineSim, RandomHistoriesEndExactlyOnceLeakNothingAndSayWhatTheySayAlone) {
  AloneRunner alone;
  std::map<FinishReason, int> reasons;
  int64_t preemptions = 0, recomputed = 0;
  int compared = 0;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Simulation simulation(seed);
    simulation.Run(100);
    if (HasFatalFailure()) return;
    simulation.CheckEnd();
    simulation.CompareWithAlone(alone);
    preemptions += simulation.preemptions;
    recomputed += simulation.recomputed;
    compared += simulation.compared;
    for (const auto& [reason, count] : simulation.observer().finished_by_reason) reasons[reason] += count;
    if (HasFailure()) return;
  }
  // The histories were as rough as they are meant to be.
  EXPECT_GT(preemptions, 20);
  EXPECT_GT(recomputed, 500);
  EXPECT_GT(compared, 200);
  EXPECT_GT(reasons[FinishReason::kStop], 50);
  EXPECT_GT(reasons[FinishReason::kLength], 50);
  EXPECT_GT(reasons[FinishReason::kCancelled], 20);
  EXPECT_GT(reasons[FinishReason::kDeadline], 10);
  EXPECT_EQ(reasons[FinishReason::kError], 0);
}

TEST(EngineSim, SameSeedGivesTheSameLog) {
  std::string logs[2];
  for (std::string& log : logs) {
    Simulation simulation(77);
    simulation.Run(60);
    log = simulation.log();
  }
  EXPECT_EQ(logs[0], logs[1]);
  Simulation other(78);
  other.Run(60);
  EXPECT_NE(logs[0], other.log());
}

}  // namespace
}  // namespace loupe
