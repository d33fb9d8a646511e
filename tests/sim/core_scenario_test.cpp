// Single situations of a request's life, step by step: what the client hears, and when the pages come back.
#include <memory>

#include "absl/strings/str_cat.h"
#include "engine/engine_core.h"
#include "gtest/gtest.h"
#include "tests/sim/fake_model.h"

namespace loupe {
namespace {

struct Heard {
  int started = 0;
  std::vector<int32_t> tokens;
  std::string text;
  std::optional<Finished> finished;
};

class CoreScenario : public testing::Test {
 protected:
  void Make(CoreLimits limits) {
    core_.reset();
    BackendOptions options;
    options.device = "cpu";
    options.num_threads = 1;
    backend_ = *MakeBackend(options);
    model_.backend = backend_.get();
    auto core = EngineCore::Create(limits, {backend_.get(), &model_, &tokenizer_, nullptr, &clock_, 1});
    ASSERT_TRUE(core.ok()) << core.status();
    core_ = *std::move(core);
  }
  static CoreLimits Limits() {
    CoreLimits limits;
    limits.kv_device_bytes = 6 * kSlabBytes;
    limits.max_context = 200;
    limits.max_sequences = 4;
    limits.max_step_rows = 32;
    limits.max_queue = 3;
    return limits;
  }
  void SetUp() override { Make(Limits()); }
  void TearDown() override {
    core_->cache().Audit();
    EXPECT_EQ(core_->num_running() + core_->num_waiting(), 0) << "the scenario left something in flight";
    EXPECT_EQ(core_->cache().Stats().resident_bytes, 0);
  }

  static Request Make(const std::string& id, int prompt_tokens, int max_tokens) {
    Request request;
    request.id = id;
    for (int i = 0; i < prompt_tokens; ++i) request.prompt.push_back(1 + i * 7 % (kFakeVocab - 1));
    request.sampling.temperature = 0;
    request.sampling.max_tokens = max_tokens;
    request.sampling.ignore_eos = true;
    return request;
  }
  std::shared_ptr<ResponseStream> Submit(Request request) {
    auto stream = core_->Submit(std::move(request));
    EXPECT_TRUE(stream.ok()) << stream.status();
    return *std::move(stream);
  }
  absl::Status Refused(Request request) { return core_->Submit(std::move(request)).status(); }
  void Step() {
    clock_.Advance(0.01);
    core_->Step();
  }
  // At most `steps` steps, until nothing is in flight.
  void Run(int steps = 2000) {
    for (int i = 0; i < steps; ++i) {
      clock_.Advance(0.01);
      if (core_->Step() == EngineCore::Outcome::kIdle) return;
    }
    FAIL() << "still busy after " << steps << " steps";
  }
  static void Listen(ResponseStream& stream, std::vector<Heard>* samples) {
    while (auto event = stream.TryNext()) {
      if (std::holds_alternative<Started>(*event)) {
        ++samples->at(0).started;
      } else if (auto* delta = std::get_if<Delta>(&*event)) {
        Heard& h = samples->at(static_cast<size_t>(delta->index));
        h.tokens.insert(h.tokens.end(), delta->token_ids.begin(), delta->token_ids.end());
        h.text += delta->text;
      } else {
        auto& finished = std::get<Finished>(*event);
        Heard& h = samples->at(static_cast<size_t>(finished.index));
        EXPECT_FALSE(h.finished.has_value()) << "ended twice";
        h.finished = finished;
      }
    }
  }
  static Heard Listen(ResponseStream& stream) {
    std::vector<Heard> samples(1);
    Listen(stream, &samples);
    return samples[0];
  }

  std::unique_ptr<Backend> backend_;
  FakeModel model_{200};
  FakeTokenizer tokenizer_;
  FakeClock clock_;
  std::unique_ptr<EngineCore> core_;
};

TEST_F(CoreScenario, LengthWithExactNumbers) {
  auto stream = Submit(Make("a", 17, 5));
  Run();
  const Heard heard = Listen(*stream);
  ASSERT_TRUE(heard.finished);
  EXPECT_TRUE(stream->done());
  EXPECT_EQ(heard.started, 1);
  EXPECT_EQ(heard.finished->reason, FinishReason::kLength);
  EXPECT_EQ(heard.finished->stop_reason, "");
  EXPECT_EQ(heard.tokens.size(), 5u);
  EXPECT_EQ(heard.finished->usage.prompt_tokens, 17);
  EXPECT_EQ(heard.finished->usage.completion_tokens, 5);
  const KvReport& kv = heard.finished->usage.kv;
  EXPECT_EQ(kv.policy, "full");
  EXPECT_EQ(kv.reason, "auto: no budget is asked for and the server has no other policy (--kv)");
  EXPECT_EQ(kv.lists, 16);
  // The last token was sampled and never computed.
  EXPECT_EQ(kv.entries_kept, 16 * (17 + 4));
  EXPECT_EQ(kv.full_bytes, int64_t{16} * (17 + 4) * 4 * 128);
  EXPECT_GE(kv.bytes_ratio, 1.0);
  const Timings& t = heard.finished->timings;
  EXPECT_NEAR(t.decode, 0.04, 1e-9) << "four steps of 10 ms after the first token";
  EXPECT_GT(t.first_token, 0);
  EXPECT_GE(t.total, t.first_token + t.decode - 1e-9);
  const EngineStats stats = core_->queue().Stats();
  EXPECT_EQ(stats.prompt_tokens, 17);
  EXPECT_EQ(stats.generated_tokens, 5);
  EXPECT_EQ(stats.last_step_age_s, 0);
}

TEST_F(CoreScenario, NoTokensWanted) {
  auto stream = Submit(Make("a", 200, 0));
  Run();
  const Heard heard = Listen(*stream);
  ASSERT_TRUE(heard.finished);
  EXPECT_EQ(heard.finished->reason, FinishReason::kLength);
  EXPECT_TRUE(heard.tokens.empty());
  EXPECT_EQ(core_->queue().Stats().prompt_tokens, 200) << "the prompt was computed";
}

TEST_F(CoreScenario, EndsWhenTheContextIsFull) {
  for (const int max_tokens : {-1, 500}) {
    auto stream = Submit(Make("a", 190, max_tokens));
    Run();
    const Heard heard = Listen(*stream);
    ASSERT_TRUE(heard.finished);
    EXPECT_EQ(heard.tokens.size(), 10u);
    EXPECT_EQ(heard.finished->reason, FinishReason::kLength);
    EXPECT_EQ(heard.finished->stop_reason, "context");
  }
  auto stream = Submit(Make("exact", 190, 10));
  Run();
  EXPECT_EQ(Listen(*stream).finished->stop_reason, "") << "as many as asked";
}

TEST_F(CoreScenario, StopTokenStringAndEndOfAnswer) {
  auto plain = Submit(Make("plain", 9, 12));
  Run();
  const std::vector<int32_t> tokens = Listen(*plain).tokens;
  ASSERT_EQ(tokens.size(), 12u);
  const int32_t stop = tokens[6];
  const size_t first = static_cast<size_t>(std::find(tokens.begin(), tokens.end(), stop) - tokens.begin());

  Request by_id = Make("by-id", 9, 12);
  by_id.sampling.stop_token_ids = {stop};
  auto stream = Submit(by_id);
  Run();
  Heard heard = Listen(*stream);
  EXPECT_EQ(heard.finished->reason, FinishReason::kStop);
  EXPECT_EQ(heard.finished->stop_reason, std::to_string(stop));
  EXPECT_EQ(heard.tokens, std::vector<int32_t>(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(first)));

  Request by_text = Make("by-text", 9, 12);
  by_text.sampling.stop = {std::string(tokenizer_.TokenBytes(stop))};
  stream = Submit(by_text);
  Run();
  heard = Listen(*stream);
  EXPECT_EQ(heard.finished->reason, FinishReason::kStop);
  EXPECT_EQ(heard.finished->stop_reason, by_text.sampling.stop[0]);
  EXPECT_EQ(heard.text.size(), first) << "text before the stop string, one letter a token";

  Request ends = Make("ends", 9, 12);
  ends.sampling.ignore_eos = false;
  ends.sampling.logit_bias = {{0, 100.0f}};
  ends.sampling.min_tokens = 3;
  stream = Submit(ends);
  Run();
  heard = Listen(*stream);
  EXPECT_EQ(heard.finished->reason, FinishReason::kStop);
  EXPECT_EQ(heard.finished->stop_reason, "");
  EXPECT_EQ(heard.tokens.size(), 3u) << "no end before min_tokens, and the ending token is not part of the answer";
}

TEST_F(CoreScenario, CancelAndDisconnectAreSeenWithinOneStep) {
  auto by_id = Submit(Make("by-id", 20, 100)), by_stream = Submit(Make("by-stream", 20, 100));
  auto dropped = Submit(Make("dropped", 20, 100));
  Step();
  Step();
  EXPECT_EQ(core_->num_running(), 3);
  EXPECT_TRUE(core_->queue().Cancel("by-id"));
  EXPECT_FALSE(core_->queue().Cancel("nobody"));
  by_stream->Cancel();
  auto copy = dropped;
  dropped.reset();
  Step();
  EXPECT_EQ(core_->num_running(), 1) << "a copy of the handle is still held";
  copy.reset();
  Step();
  EXPECT_EQ(core_->num_running(), 0);
  EXPECT_EQ(core_->cache().Stats().resident_bytes, 0);
  EXPECT_EQ(Listen(*by_id).finished->reason, FinishReason::kCancelled);
  EXPECT_EQ(Listen(*by_stream).finished->reason, FinishReason::kCancelled);
  EXPECT_FALSE(core_->queue().Cancel("by-id")) << "it has ended";
}

TEST_F(CoreScenario, DeadlineInTheQueueAndInTheMiddle) {
  Request late = Make("late", 20, 100);
  late.deadline = clock_.Now();
  auto stream = Submit(late);
  Step();
  Heard heard = Listen(*stream);
  EXPECT_EQ(heard.finished->reason, FinishReason::kDeadline);
  EXPECT_EQ(heard.finished->stop_reason, "deadline");
  EXPECT_EQ(heard.started, 0);
  EXPECT_TRUE(heard.text.empty());
  EXPECT_EQ(model_.passes, 0) << "nothing was computed for it";

  Request partial = Make("partial", 20, 100);
  partial.deadline = clock_.Now() + std::chrono::milliseconds(55);
  stream = Submit(partial);
  Run();
  heard = Listen(*stream);
  EXPECT_EQ(heard.finished->reason, FinishReason::kDeadline);
  EXPECT_EQ(heard.tokens.size(), 5u) << "steps of 10 ms";
  EXPECT_EQ(heard.text.size(), 5u);
}

TEST_F(CoreScenario, SamplesShareThePromptAndEqualSingleRequests) {
  Request many = Make("many", 40, 12);
  many.n = 3;
  many.sampling.temperature = 1.2f;
  many.sampling.seed = 50;
  auto stream = Submit(many);
  std::vector<Heard> samples(3);
  Run();
  Listen(*stream, &samples);
  EXPECT_EQ(core_->queue().Stats().prompt_tokens, 40) << "computed once";
  for (int i = 0; i < 3; ++i) {
    Request one = many;
    one.id = absl::StrCat("one-", i);
    one.n = 1;
    one.sampling.seed = 50 + static_cast<uint64_t>(i);
    auto single = Submit(one);
    Run();
    const Heard heard = Listen(*single);
    ASSERT_TRUE(samples[static_cast<size_t>(i)].finished);
    EXPECT_EQ(samples[static_cast<size_t>(i)].tokens, heard.tokens) << i;
    EXPECT_EQ(samples[static_cast<size_t>(i)].finished->usage.prompt_tokens, 40);
  }
  EXPECT_NE(samples[0].tokens, samples[1].tokens);
  // More samples than places: those that find none are computed on their own.
  Request crowd = many;
  crowd.id = "crowd";
  crowd.n = 9;
  stream = Submit(crowd);
  std::vector<Heard> heard(9);
  Run();
  Listen(*stream, &heard);
  EXPECT_TRUE(stream->done());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(heard[static_cast<size_t>(i)].tokens, samples[static_cast<size_t>(i)].tokens) << i;
}

TEST_F(CoreScenario, RefusalsCarryNumbersAndLeaveNothingBehind) {
  const auto expect = [&](Request request, absl::StatusCode code, std::vector<std::string> parts) {
    const absl::Status status = Refused(std::move(request));
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& part : parts) EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  expect(Make("x", 0, 5), kInvalid, {"0 tokens"});
  expect(Make("x", 200, 5), kInvalid, {"context_length_exceeded: ", "200"});
  expect(Make("x", 5000, -1), kInvalid, {"context_length_exceeded: ", "5000", "200"});
  Request request = Make("x", 5, 5);
  request.prompt[2] = kFakeVocab;
  expect(request, kInvalid, {"59", "58"});
  request.prompt[2] = -1;
  expect(request, kInvalid, {"-1"});
  request = Make("x", 5, 5);
  request.kv = KvOptions{.policy = "sekv"};
  expect(request, kInvalid, {"kv.policy", "sekv", "auto, full"});
  for (const int n : {0, -1, 129}) {
    request = Make("x", 5, 5);
    request.n = n;
    expect(request, kInvalid, {std::to_string(n), "128"});
  }
  request = Make("x", 5, 5);
  request.sampling.logit_bias = {{99, 1.0f}};
  expect(request, kInvalid, {"logit_bias", "99"});
  request = Make("x", 5, 5);
  request.sampling.temperature = std::nanf("");
  expect(request, kInvalid, {"temperature"});
  request = Make("x", 5, 5);
  request.sampling.max_tokens = -2;
  expect(request, kInvalid, {"max_tokens", "-2"});

  std::vector<std::shared_ptr<ResponseStream>> streams;
  for (const char* id : {"a", "b", "c"}) streams.push_back(Submit(Make(id, 5, 3)));
  expect(Make("a", 5, 3), absl::StatusCode::kAlreadyExists, {"'a'"});
  expect(Make("d", 5, 3), absl::StatusCode::kResourceExhausted, {"3"});
  const auto refused_all = [&](const std::vector<const char*>& ids) {
    std::vector<Request> requests;
    for (const char* id : ids) requests.push_back(Make(id, 5, 3));
    return core_->SubmitAll(std::move(requests)).status();
  };
  const absl::Status never = refused_all({"d", "e", "f", "g"});
  EXPECT_EQ(never.code(), kInvalid);
  EXPECT_EQ(std::string(never.message()).rfind("prompt: has 4 prompts, but at most 3 ", 0), 0u) << never;
  EXPECT_EQ(refused_all({"d", "e"}).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(core_->queue().Stats().requests_waiting, 3);
  EXPECT_EQ(core_->queue().Stats().queue_prompt_tokens, 15);
  Step();
  EXPECT_EQ(core_->queue().Stats().requests_waiting, 0) << "they have started, so there is room again";
  streams.push_back(Submit(Make("d", 5, 3)));
  Run();
  streams.push_back(Submit(Make("a", 5, 3)));
  Run();
  for (const auto& stream : streams) EXPECT_TRUE(Listen(*stream).finished);
}

TEST_F(CoreScenario, DrainFinishesAndAbortEnds) {
  auto running = Submit(Make("running", 10, 20)), waiting = Submit(Make("waiting", 10, 20));
  Step();
  core_->queue().BeginDrain();
  EXPECT_EQ(Refused(Make("late", 5, 5)).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(core_->queue().WaitIdle(SteadyTime{}));
  Run();
  EXPECT_TRUE(core_->queue().WaitIdle(SteadyTime{}));
  EXPECT_EQ(Listen(*running).tokens.size(), 20u);
  EXPECT_EQ(Listen(*waiting).tokens.size(), 20u);

  Make(Limits());
  running = Submit(Make("running", 10, 20));
  Step();
  waiting = Submit(Make("waiting", 10, 20));
  core_->queue().AbortAll();
  EXPECT_EQ(core_->Step(), EngineCore::Outcome::kIdle);
  for (const auto& stream : {running, waiting}) {
    const Heard heard = Listen(*stream);
    EXPECT_EQ(heard.finished->reason, FinishReason::kCancelled);
    EXPECT_EQ(heard.finished->stop_reason, "drain");
  }
  auto again = Submit(Make("again", 10, 2));
  Run();
  EXPECT_EQ(Listen(*again).finished->reason, FinishReason::kLength) << "an abort is over when it is over";
}

TEST_F(CoreScenario, DestructionEndsWhatIsInFlight) {
  Request many = Make("many", 10, 20);
  many.n = 3;
  auto stream = Submit(many), other = Submit(Make("other", 10, 20));
  Step();
  auto queued = Submit(Make("queued", 10, 20));
  Make(Limits());  // destroys the core
  std::vector<Heard> samples(3);
  Listen(*stream, &samples);
  for (const Heard& h : samples) EXPECT_EQ(h.finished->reason, FinishReason::kCancelled);
  EXPECT_EQ(Listen(*other).finished->reason, FinishReason::kCancelled);
  EXPECT_EQ(Listen(*queued).finished->reason, FinishReason::kCancelled);
}

TEST_F(CoreScenario, BrokenLogitsEndOnlyTheirSample) {
  model_.broken = true;
  std::vector<std::shared_ptr<ResponseStream>> streams;
  int errors = 0, whole = 0;
  for (int i = 0; i < 12; ++i) {
    streams.push_back(Submit(Make(absl::StrCat("s", i), 1 + i, i % 2 == 0 ? 1 : 6)));
    Step();
  }
  Run();
  for (const auto& stream : streams) {
    const Heard heard = Listen(*stream);
    ASSERT_TRUE(heard.finished);
    errors += heard.finished->reason == FinishReason::kError;
    whole += heard.finished->reason == FinishReason::kLength;
    EXPECT_EQ(heard.finished->error.ok(), heard.finished->reason != FinishReason::kError);
  }
  EXPECT_GT(errors, 0);
  EXPECT_GT(whole, 0);
}

TEST_F(CoreScenario, HigherPriorityTakesThePlaceOfTheLowest) {
  CoreLimits limits = Limits();
  limits.max_sequences = 2;
  Make(limits);
  Request low = Make("low", 20, 60), lowest = Make("lowest", 20, 60), equal = Make("equal", 20, 10), high = Make("high", 20, 10);
  low.priority = 0, lowest.priority = -1, equal.priority = -1, high.priority = 5;
  auto low_stream = Submit(low), lowest_stream = Submit(lowest);
  for (int i = 0; i < 10; ++i) Step();
  auto equal_stream = Submit(equal);
  Step();
  EXPECT_EQ(core_->queue().Stats().preemptions, 0) << "equal priority displaces nobody";
  auto high_stream = Submit(high);
  Step();
  EXPECT_EQ(core_->queue().Stats().preemptions, 1);
  while (!Listen(*high_stream).finished) Step();
  EXPECT_FALSE(equal_stream->done());
  Run();
  EXPECT_EQ(core_->queue().Stats().preemptions, 1) << "no ping-pong";
  const Heard displaced = Listen(*lowest_stream);
  EXPECT_EQ(displaced.tokens.size(), 60u);
  auto alone = Submit(Make("alone", 20, 60));
  Run();
  EXPECT_EQ(displaced.tokens, Listen(*alone).tokens) << "recomputed bit by bit";
  EXPECT_GT(core_->queue().Stats().recomputed_tokens, 20);
}

// Case R42 of the list of real faults: whoever was preempted lost its place.
TEST_F(CoreScenario, R42APreemptedSampleReturnsBeforeLaterOnesOfItsPriority) {
  CoreLimits limits = Limits();
  limits.max_sequences = 1;
  Make(limits);
  auto first = Submit(Make("first", 20, 30));
  for (int i = 0; i < 10; ++i) Step();
  auto waiting = Submit(Make("waiting", 20, 5));
  Request high = Make("high", 20, 5);
  high.priority = 1;
  auto high_stream = Submit(high);
  Step();
  EXPECT_EQ(core_->queue().Stats().preemptions, 1);
  auto later = Submit(Make("later", 20, 5));
  std::vector<std::string> ends;
  for (int i = 0; i < 200 && ends.size() < 4; ++i) {
    Step();
    for (const auto& stream : {first, waiting, high_stream, later}) {
      while (auto event = stream->TryNext()) {
        if (std::holds_alternative<Finished>(*event)) ends.push_back(stream->id());
      }
    }
  }
  EXPECT_EQ(ends, (std::vector<std::string>{"high", "first", "waiting", "later"}));
  EXPECT_EQ(core_->queue().Stats().preemptions, 1);
}

// Case R39: admission that looks at the next chunk only, and samples that leave and return without end.
TEST_F(CoreScenario, R39SamplesThatOutgrowTheArenaLeaveSeldomAndAllEnd) {
  CoreLimits limits = Limits();
  limits.kv_device_bytes = 2 * kSlabBytes;  // 512 tokens if pages are full
  limits.max_sequences = 8;
  limits.max_queue = 16;
  Make(limits);
  std::vector<std::shared_ptr<ResponseStream>> streams;
  for (int i = 0; i < 12; ++i) streams.push_back(Submit(Make(absl::StrCat("s", i), 8, 180)));
  Run(20000);
  for (const auto& stream : streams) EXPECT_EQ(Listen(*stream).tokens.size(), 180u);
  const EngineStats stats = core_->queue().Stats();
  EXPECT_GT(stats.preemptions, 0) << "the arena was too large to test this";
  EXPECT_LE(stats.preemptions, 12 * 4) << "32, 64, 128 tokens of headroom, then all that is left";
  EXPECT_LT(stats.recomputed_tokens, 2 * 12 * 188);
}

TEST_F(CoreScenario, ALongPromptDelaysNeitherDecodeNorAShortPrompt) {
  auto decoding = Submit(Make("decoding", 4, 100));
  Step();
  EXPECT_EQ(Listen(*decoding).tokens.size(), 1u);
  auto prompt = Submit(Make("long", 190, 5)), brief = Submit(Make("short", 8, 1));
  Step();
  EXPECT_TRUE(Listen(*brief).finished) << "the short prompt got its share of the first step";
  for (int i = 0; i < 3; ++i) {
    Step();
    EXPECT_EQ(Listen(*decoding).tokens.size(), i == 0 ? 2u : 1u) << "a token a step";
  }
  decoding->Cancel();
  Run();
  EXPECT_EQ(Listen(*prompt).tokens.size(), 5u);
}

// Whatever was accepted runs to its end when it is alone, in any arena, and whoever was there before.
TEST_F(CoreScenario, ALoneRequestRunsToTheEndOfThePublishedContext) {
  FakeModel large(100000);
  for (const int slabs : {1, 2, 3, 4, 5, 8, 9}) {
    CoreLimits limits = Limits();
    limits.kv_device_bytes = slabs * kSlabBytes;
    limits.max_context = 100000;
    limits.max_sequences = 9;
    limits.max_step_rows = 512;
    auto core = EngineCore::Create(limits, {backend_.get(), &large, &tokenizer_, nullptr, &clock_, 1});
    ASSERT_TRUE(core.ok()) << core.status();
    const int context = (*core)->max_context();
    EXPECT_GE(context, (slabs - 1) * 256 - slabs / 8 * 256) << slabs;
    for (const int prompt : {1, 16, 17, 63, 64, 65, context / 2 + 1, context - 66, context - 17, context - 1}) {
      SCOPED_TRACE(testing::Message() << slabs << " slabs, context " << context << ", prompt " << prompt);
      // Decoding the whole of a large context takes long and shows nothing more.
      if (prompt < context - 300 && slabs > 1) continue;
      auto others = (*core)->Submit(Make(absl::StrCat("others-", prompt), 15, 40));
      ASSERT_TRUE(others.ok()) << others.status();
      auto stream = (*core)->Submit(Make(absl::StrCat("lone-", prompt), prompt, context - prompt));
      ASSERT_TRUE(stream.ok()) << stream.status();
      (*core)->Step();
      (*others)->Cancel();
      while ((*core)->Step() != EngineCore::Outcome::kIdle) {
      }
      const Heard heard = Listen(**stream);
      ASSERT_TRUE(heard.finished);
      EXPECT_TRUE(heard.finished->error.ok()) << heard.finished->error;
      EXPECT_EQ(heard.finished->stop_reason, "") << "max_tokens is the reason";
      EXPECT_EQ(static_cast<int>(heard.tokens.size()), context - prompt);
    }
    (*core)->cache().Audit();
  }
}

TEST_F(CoreScenario, AnArenaTooSmallForTheContextLowersIt) {
  CoreLimits limits = Limits();
  limits.kv_device_bytes = kSlabBytes;
  FakeModel large(100000);
  auto core = EngineCore::Create(limits, {backend_.get(), &large, &tokenizer_, nullptr, &clock_, 1});
  ASSERT_TRUE(core.ok()) << core.status();
  EXPECT_EQ((*core)->max_context(), 200);
  limits.max_context = 5000;
  core = EngineCore::Create(limits, {backend_.get(), &large, &tokenizer_, nullptr, &clock_, 1});
  ASSERT_TRUE(core.ok()) << core.status();
  EXPECT_EQ((*core)->max_context(), 4 * 64) << "four pages a list";
  // The longest that is accepted does end well.
  auto stream = (*core)->Submit(Make("longest", 100, -1));
  ASSERT_TRUE(stream.ok());
  while ((*core)->Step() != EngineCore::Outcome::kIdle) {
  }
  const Heard heard = Listen(**stream);
  EXPECT_EQ(heard.finished->reason, FinishReason::kLength);
  EXPECT_EQ(heard.finished->stop_reason, "context");
  EXPECT_EQ(heard.finished->usage.prompt_tokens + heard.finished->usage.completion_tokens, (*core)->max_context());

  limits = Limits();
  limits.kv_device_bytes = kSlabBytes - 1;
  EXPECT_EQ(EngineCore::Create(limits, {backend_.get(), &large, &tokenizer_, nullptr, &clock_, 1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  limits = Limits();
  limits.max_context = 201;
  const absl::Status status = EngineCore::Create(limits, {backend_.get(), &model_, &tokenizer_, nullptr, &clock_, 1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find("201"), std::string::npos) << status;
}

}  // namespace
}  // namespace loupe
