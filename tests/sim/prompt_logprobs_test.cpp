// Log-probabilities of prompt tokens against an oracle: each prefix of the prompt as a request of its own whose only token
// is forced to be the next one. Rows do not depend on what runs beside them, so the numbers are equal to the last bit,
// however the prompt is cut into steps, preempted or shared; and no row is asked twice.
#include <gtest/gtest.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "engine/engine_core.h"
#include "engine/validate.h"
#include "tests/sim/fake_model.h"
#include "tests/support/strategies.h"

namespace loupe {
namespace {

struct Heard {
  std::vector<PromptScored> scored;
  bool delta_first = false;  // a token came before them
  std::vector<std::vector<TokenLogprobs>> logprobs;  // by sample
  std::vector<std::vector<int32_t>> tokens;
  std::vector<Finished> finished;
};

class PromptLogprobsSim : public ::testing::Test {
 protected:
  void Make(int max_step_rows, int max_sequences = 4, int slabs = 6) {
    core_.reset();
    BackendOptions options;
    options.device = "cpu";
    options.num_threads = 1;
    backend_ = *MakeBackend(options);
    model_.backend = backend_.get();
    CoreLimits limits;
    limits.kv_device_bytes = slabs * kSlabBytes;
    limits.max_context = 400;
    limits.max_sequences = max_sequences;
    limits.max_step_rows = max_step_rows;
    limits.max_queue = 64;
    auto core = EngineCore::Create(limits, {backend_.get(), &model_, &tokenizer_, nullptr, &clock_, 1,
                                            {std::nullopt, true, {{testing::RandomStrategy(4, 4)}, {}}}});
    ASSERT_TRUE(core.ok()) << core.status();
    core_ = *std::move(core);
  }
  void SetUp() override { Make(32); }
  void TearDown() override {
    core_->cache().Audit();
    EXPECT_EQ(core_->num_running() + core_->num_waiting(), 0);
    EXPECT_EQ(core_->cache().Stats().resident_bytes, 0);
  }

  static Request Ask(const std::string& id, int prompt_tokens, int max_tokens, int top) {
    Request request;
    request.id = id;
    for (int i = 0; i < prompt_tokens; ++i) request.prompt.push_back(1 + (i * 7 + i * i % 11) % (kFakeVocab - 1));
    request.sampling.temperature = 0;
    request.sampling.max_tokens = max_tokens;
    request.sampling.ignore_eos = true;
    request.sampling.prompt_logprobs = top;
    return request;
  }
  std::shared_ptr<ResponseStream> Submit(Request request) {
    auto stream = core_->Submit(std::move(request));
    EXPECT_TRUE(stream.ok()) << stream.status();
    return *std::move(stream);
  }
  void Run() {
    for (int i = 0; i < 5000; ++i) {
      clock_.Advance(0.01);
      if (core_->Step() == EngineCore::Outcome::kIdle) return;
    }
    FAIL() << "still busy";
  }
  static Heard Listen(ResponseStream& stream, int n = 1) {
    Heard heard;
    heard.logprobs.resize(static_cast<size_t>(n));
    heard.tokens.resize(static_cast<size_t>(n));
    while (auto event = stream.TryNext()) {
      if (auto* scored = std::get_if<PromptScored>(&*event)) heard.scored.push_back(std::move(*scored));
      if (auto* delta = std::get_if<Delta>(&*event)) {
        heard.delta_first |= heard.scored.empty();
        auto& logprobs = heard.logprobs[static_cast<size_t>(delta->index)];
        logprobs.insert(logprobs.end(), delta->logprobs.begin(), delta->logprobs.end());
        auto& tokens = heard.tokens[static_cast<size_t>(delta->index)];
        tokens.insert(tokens.end(), delta->token_ids.begin(), delta->token_ids.end());
      }
      if (auto* finished = std::get_if<Finished>(&*event)) heard.finished.push_back(*finished);
    }
    return heard;
  }
  Heard Run(const Request& request) {
    auto stream = Submit(request);
    Run();
    return Listen(*stream, request.n);
  }

  std::vector<TokenLogprobs> Oracle(const std::vector<int32_t>& prompt, int top) {
    std::vector<TokenLogprobs> all(1);
    all[0].chosen = {prompt[0], 0, std::string(tokenizer_.TokenBytes(prompt[0]))};
    for (size_t i = 1; i < prompt.size(); ++i) {
      Request forced;
      forced.id = absl::StrCat("oracle-", i);
      forced.prompt.assign(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(i));
      forced.sampling.temperature = 0;
      forced.sampling.max_tokens = 1;
      forced.sampling.logprobs = top;
      forced.sampling.logit_bias = {{prompt[i], 100.f}};
      const Heard heard = Run(forced);
      EXPECT_EQ(heard.tokens[0], std::vector<int32_t>{prompt[i]}) << "not forced";
      all.push_back(heard.logprobs[0].at(0));
    }
    return all;
  }
  static void ExpectEqual(const Heard& heard, const std::vector<TokenLogprobs>& want, size_t top, const std::string& what) {
    ASSERT_EQ(heard.scored.size(), 1u) << what;
    EXPECT_FALSE(heard.delta_first) << what;
    const std::vector<TokenLogprobs>& got = heard.scored[0].tokens;
    ASSERT_EQ(got.size(), want.size()) << what;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].chosen.id, want[i].chosen.id) << what << " token " << i;
      EXPECT_EQ(got[i].chosen.logprob, want[i].chosen.logprob) << what << " token " << i;
      EXPECT_EQ(got[i].chosen.bytes, want[i].chosen.bytes) << what << " token " << i;
      ASSERT_EQ(got[i].top.size(), i == 0 ? 0 : top) << what << " token " << i;
      for (size_t k = 0; k < got[i].top.size(); ++k) {
        EXPECT_EQ(got[i].top[k].id, want[i].top[k].id) << what << " token " << i << " best " << k;
        EXPECT_EQ(got[i].top[k].logprob, want[i].top[k].logprob) << what << " token " << i << " best " << k;
        EXPECT_EQ(got[i].top[k].bytes, want[i].top[k].bytes) << what << " token " << i << " best " << k;
      }
    }
  }

  std::unique_ptr<Backend> backend_;
  FakeModel model_{400};
  FakeTokenizer tokenizer_;
  FakeClock clock_;
  std::unique_ptr<EngineCore> core_;
};

TEST_F(PromptLogprobsSim, EqualForcedDecodingHoweverThePromptIsCut) {
  for (const int length : {1, 2, 31, 63, 64, 65, 131}) {
    Make(512);
    const std::vector<TokenLogprobs> want = Oracle(Ask("x", length, 0, 3).prompt, 3);
    for (const int rows : {1, 7, 32, 512}) {
      for (const int max_tokens : {0, 4}) {
        Make(rows);
        model_.rows_asked = 0;
        ExpectEqual(Run(Ask("a", length, max_tokens, 3)), want, 3, absl::StrCat(length, " tokens in steps of ", rows));
        EXPECT_EQ(model_.rows_asked, length - 1);
      }
    }
  }
}

TEST_F(PromptLogprobsSim, OnlyWhoAsksPays) {
  const Heard heard = Run(Ask("plain", 50, 3, -1));
  EXPECT_TRUE(heard.scored.empty());
  EXPECT_EQ(model_.rows_asked, 0);
}

TEST_F(PromptLogprobsSim, OtherRequestsAndTheNumberOfAlternativesChangeNothing) {
  const std::vector<TokenLogprobs> want = Oracle(Ask("x", 90, 0, 5).prompt, 5);
  Make(48, 8, 12);
  std::vector<std::shared_ptr<ResponseStream>> streams;
  for (int i = 0; i < 8; ++i) streams.push_back(Submit(Ask(absl::StrCat("s", i), 90, i, i % 2 == 0 ? i : -1)));
  Run();
  for (int i = 0; i < 8; ++i) {
    const Heard heard = Listen(*streams[static_cast<size_t>(i)]);
    if (i % 2 == 1) {
      EXPECT_TRUE(heard.scored.empty());
    } else {
      std::vector<TokenLogprobs> cut = i <= 5 ? want : std::vector<TokenLogprobs>();
      for (TokenLogprobs& token : cut) token.top.resize(std::min(token.top.size(), static_cast<size_t>(i)));
      if (i <= 5) ExpectEqual(heard, cut, static_cast<size_t>(i), absl::StrCat("request ", i));
    }
  }
}

TEST_F(PromptLogprobsSim, SamplesShareThem) {
  const std::vector<TokenLogprobs> want = Oracle(Ask("x", 70, 0, 2).prompt, 2);
  for (const int n : {3, 9}) {  // as many as run at a time, and more
    Request many = Ask(absl::StrCat("many", n), 70, 5, 2);
    many.n = n;
    model_.rows_asked = 0;
    const Heard heard = Run(many);
    ExpectEqual(heard, want, 2, absl::StrCat(n, " samples"));
    EXPECT_EQ(heard.finished.size(), static_cast<size_t>(n));
    EXPECT_EQ(model_.rows_asked, 69) << "computed once";
  }
}

TEST_F(PromptLogprobsSim, APreemptedPromptIsNotAskedTwice) {
  const std::vector<TokenLogprobs> want = Oracle(Ask("x", 150, 0, 2).prompt, 2);
  Make(16, 1);
  for (const int steps : {3, 12}) {  // in the middle of the prompt, and of the answer
    const int64_t before = core_->queue().Stats().preemptions;
    model_.rows_asked = 0;
    auto low = Submit(Ask("low", 150, 20, 2));
    for (int i = 0; i < steps; ++i) core_->Step();
    Request high = Ask("high", 20, 10, -1);
    high.priority = 1;
    auto high_stream = Submit(high);
    Run();
    EXPECT_GT(core_->queue().Stats().preemptions, before);
    ExpectEqual(Listen(*low), want, 2, absl::StrCat("after ", steps, " steps"));
    EXPECT_EQ(model_.rows_asked, 149);
    EXPECT_EQ(Listen(*high_stream).finished.size(), 1u);
  }
}

TEST_F(PromptLogprobsSim, TheyAreThoseOfTheWholePromptWhateverThePolicyKeeps) {
  const std::vector<TokenLogprobs> want = Oracle(Ask("x", 150, 0, 2).prompt, 2);
  Make(64);
  for (const PolicyRow& row : AllPolicies()) {
    Request request = Ask(std::string(row.name), 150, 3, 2);
    request.kv.emplace();
    request.kv->policy = std::string(row.name);
    if (row.name != "full") request.kv->budget = {KvBudget::Kind::kRatio, 0.4};
    model_.rows_asked = 0;
    ExpectEqual(Run(request), want, 2, std::string(row.name));
    EXPECT_EQ(model_.rows_asked, 149) << row.name << ": a policy that asks for surprisal shares the rows";
  }
}

TEST_F(PromptLogprobsSim, ACancelledPromptTellsNothing) {
  auto stream = Submit(Ask("a", 150, 5, 2));
  for (int i = 0; i < 3; ++i) core_->Step();
  stream->Cancel();
  Run();
  const Heard heard = Listen(*stream);
  EXPECT_TRUE(heard.scored.empty());
  ASSERT_EQ(heard.finished.size(), 1u);
  EXPECT_EQ(heard.finished[0].reason, FinishReason::kCancelled);
}

TEST_F(PromptLogprobsSim, BrokenLogitsEndTheRequestAndNoOther) {
  model_.broken = true;
  Request many = Ask("a", 60, 0, 1);
  many.n = 3;
  auto stream = Submit(many), other = Submit(Ask("b", 60, 0, -1));
  Run();
  const Heard heard = Listen(*stream, 3);
  EXPECT_TRUE(heard.scored.empty());
  ASSERT_EQ(heard.finished.size(), 3u);
  for (const Finished& finished : heard.finished) EXPECT_EQ(finished.error.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Listen(*other).finished.at(0).reason, FinishReason::kLength);
}

TEST_F(PromptLogprobsSim, TheTokenThatEndsAnAnswerIsToldIfAsked) {
  for (const bool asked : {false, true}) {
    Request request = Ask(asked ? "asked" : "plain", 40, 8, 1);
    request.sampling.ignore_eos = false;
    request.sampling.logit_bias = {{0, 100.f}};  // the end comes first
    request.sampling.logprobs = 2;
    request.sampling.end_logprobs = asked;
    const Heard heard = Run(request);
    EXPECT_TRUE(heard.tokens[0].empty());
    ASSERT_EQ(heard.logprobs[0].size(), asked ? 1u : 0u);
    if (asked) {
      EXPECT_EQ(heard.logprobs[0][0].chosen.id, 0);
    }
    EXPECT_EQ(heard.finished.at(0).usage.completion_tokens, 0);
    EXPECT_EQ(heard.finished.at(0).reason, FinishReason::kStop);
  }
}

TEST_F(PromptLogprobsSim, LimitsAreCheckedBeforeAnythingIsDone) {
  Request request = Ask("a", 40, 1, kMaxLogprobs + 1);
  EXPECT_EQ(core_->Submit(request).status().message(), "prompt_logprobs: is 21, must be at most 20");
  request.sampling.prompt_logprobs = 20;
  request.n = 128;
  std::vector<Request> most(9, request);  // 9 * 40 * 21 * 128
  for (size_t i = 0; i < most.size(); ++i) most[i].id = absl::StrCat("m", i);
  EXPECT_EQ(ValidatePromptLogprobs(most).code(), absl::StatusCode::kOk);
  most.push_back(request);
  const absl::Status refused = core_->SubmitAll(most).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(), "prompt_logprobs: 400 prompt tokens make 1075200 log-probabilities (those beside each token and all "
                               "samples counted), at most 1048576 go into one request; ask for fewer");
}

}  // namespace
}  // namespace loupe
