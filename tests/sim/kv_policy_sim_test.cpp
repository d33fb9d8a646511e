// KV policies in the whole engine: one batch mixes them and every request gets what it gets alone, budgets are never
// exceeded, admission counts what a policy will hold, and a preemption changes nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "engine/engine_core.h"
#include "tests/sim/fake_model.h"
#include "tests/support/strategies.h"

namespace loupe {
namespace {

struct Heard {
  std::vector<int32_t> tokens;
  std::optional<Finished> finished;
};

class KvPolicySim : public ::testing::Test {
 protected:
  void Make(CoreLimits limits, KvDefaults kv = {}) {
    core_.reset();
    BackendOptions options;
    options.device = "cpu";
    options.num_threads = 1;
    backend_ = *MakeBackend(options);
    model_.backend = backend_.get();
    auto core = EngineCore::Create(limits, {backend_.get(), &model_, &tokenizer_, nullptr, &clock_, 1, std::move(kv)});
    ASSERT_TRUE(core.ok()) << core.status();
    core_ = *std::move(core);
  }
  static CoreLimits Limits(int64_t slabs, int max_sequences = 8, int max_step_rows = 64) {
    CoreLimits limits;
    limits.kv_device_bytes = slabs * kSlabBytes;
    limits.max_context = 4096;
    limits.max_sequences = max_sequences;
    limits.max_step_rows = max_step_rows;
    limits.max_queue = 64;
    return limits;
  }
  static Request Ask(const std::string& id, int prompt_tokens, int max_tokens, std::optional<KvOptions> kv) {
    Request request;
    request.id = id;
    for (int i = 0; i < prompt_tokens; ++i) {
      request.prompt.push_back(1 + (i * 7 + i * i % 13 + static_cast<int>(id.size())) % (kFakeVocab - 1));
    }
    request.sampling.temperature = 0;
    request.sampling.max_tokens = max_tokens;
    request.sampling.ignore_eos = true;
    request.kv = std::move(kv);
    return request;
  }
  // All policies, baselines included, and a strategy for polykv.
  static KvDefaults Everything() { return {std::nullopt, true, {{testing::RandomStrategy(4, 4)}, {}}}; }
  static KvOptions Kv(std::string_view policy, KvBudget::Kind kind, double value) {
    KvOptions options;
    options.policy = std::string(policy);
    options.budget = {kind, value};
    return options;
  }

  // Submits all and steps to the end; `each_step` is called after every step.
  template <class EachStep>
  std::map<std::string, Heard> Run(const std::vector<Request>& requests, const EachStep& each_step) {
    std::map<std::string, std::shared_ptr<ResponseStream>> streams;
    for (const Request& request : requests) {
      auto stream = core_->Submit(request);
      EXPECT_TRUE(stream.ok()) << stream.status();
      if (stream.ok()) streams[request.id] = *std::move(stream);
    }
    for (int i = 0; i < 5000; ++i) {
      clock_.Advance(0.01);
      const bool idle = core_->Step() == EngineCore::Outcome::kIdle;
      each_step();
      if (idle) break;
    }
    std::map<std::string, Heard> heard;
    for (auto& [id, stream] : streams) {
      while (auto event = stream->TryNext()) {
        if (auto* delta = std::get_if<Delta>(&*event)) {
          heard[id].tokens.insert(heard[id].tokens.end(), delta->token_ids.begin(), delta->token_ids.end());
        } else if (auto* finished = std::get_if<Finished>(&*event)) {
          heard[id].finished = *finished;
        }
      }
      EXPECT_TRUE(heard[id].finished && heard[id].finished->error.ok()) << id;
    }
    core_->cache().Audit();
    EXPECT_EQ(core_->cache().Stats().resident_bytes, 0);
    return heard;
  }
  std::map<std::string, Heard> Run(const std::vector<Request>& requests) {
    return Run(requests, [] {});
  }

  // One request a policy that drops entries, with its budget in turn.
  static std::vector<Request> OneEach(int prompt_tokens, int max_tokens) {
    std::vector<Request> requests;
    int number = 0;
    for (const PolicyRow& row : AllPolicies()) {
      KvOptions options = row.name == "full"  ? Kv(row.name, KvBudget::Kind::kNone, 0)
                          : number % 2 == 0 ? Kv(row.name, KvBudget::Kind::kRatio, 0.3)
                                            : Kv(row.name, KvBudget::Kind::kTokens, 40 + number);
      if (row.name == "adakv" || row.name == "keydiff" || row.name == "polykv") {
        options.params["decode"] = std::string("evict");
        options.params["interval"] = 16.0;
      }
      requests.push_back(Ask(absl::StrCat(row.name, std::string(static_cast<size_t>(number), '.')), prompt_tokens + 3 * number, max_tokens,
                             std::move(options)));
      ++number;
    }
    return requests;
  }

  // The same, stored in 4 and 2 bits.
  static std::vector<Request> OneEachCoded(int prompt_tokens, int max_tokens) {
    std::vector<Request> requests = OneEach(prompt_tokens, max_tokens);
    for (Request& request : requests) {
      request.id += "coded";
      request.kv->bits = {4, 2};
    }
    return requests;
  }

  std::unique_ptr<Backend> backend_;
  FakeModel model_{4096};
  FakeTokenizer tokenizer_;
  FakeClock clock_;
  int64_t generated_ = 0;  // before the request under test
  std::unique_ptr<EngineCore> core_;
};

TEST_F(KvPolicySim, AMixedBatchEqualsEachRequestAlone) {
  const std::vector<Request> requests = OneEach(150, 60);
  std::map<std::string, Heard> alone;
  for (const int rows : {64, 512}) {
    Make(Limits(64, 12, rows), Everything());
    for (const Request& request : requests) {
      Heard heard = Run({request}).at(request.id);
      if (alone.count(request.id)) {
        EXPECT_EQ(heard.tokens, alone[request.id].tokens) << request.id << " in steps of " << rows << " rows";
      }
      alone[request.id] = std::move(heard);
    }
  }
  Make(Limits(64, 12, 100), Everything());
  int most_running = 0;
  const auto together = Run(requests, [&] { most_running = std::max(most_running, core_->num_running()); });
  EXPECT_GE(most_running, 11);
  for (const Request& request : requests) {
    EXPECT_EQ(together.at(request.id).tokens, alone.at(request.id).tokens) << request.id;
    const KvReport& a = together.at(request.id).finished->usage.kv;
    const KvReport& b = alone.at(request.id).finished->usage.kv;
    EXPECT_EQ(a.policy, request.kv->policy);
    EXPECT_EQ(a.reason, "requested");
    EXPECT_EQ(a.device_bytes, b.device_bytes) << request.id;
    EXPECT_EQ(a.entries_dropped, b.entries_dropped) << request.id;
    EXPECT_EQ(a.entries_kept + a.entries_dropped, 16 * (static_cast<int64_t>(request.prompt.size()) + 59)) << request.id;
  }
}

TEST_F(KvPolicySim, PreemptionChangesNoToken) {
  const std::vector<Request> requests = OneEach(150, 140);
  Make(Limits(64, 12, 64), Everything());
  const auto roomy = Run(requests);
  EXPECT_EQ(core_->queue().Stats().preemptions, 0);
  // Three slabs hold 768 full tokens; eleven requests that grow beyond what admission sets aside want more.
  Make(Limits(3, 12, 64), Everything());
  const auto tight = Run(requests);
  EXPECT_GT(core_->queue().Stats().preemptions, 0);
  for (const Request& request : requests) EXPECT_EQ(tight.at(request.id).tokens, roomy.at(request.id).tokens) << request.id;
}

TEST_F(KvPolicySim, CodedRequestsMixToo) {
  std::vector<Request> requests = OneEachCoded(300, 100);
  std::map<std::string, Heard> alone;
  Make(Limits(64, 24, 64), Everything());
  for (const Request& request : requests) alone[request.id] = Run({request}).at(request.id);
  for (const Request& request : OneEach(300, 100)) requests.push_back(request);
  Make(Limits(64, 24, 100), Everything());
  const auto together = Run(requests);
  for (const Request& request : requests) {
    if (!alone.count(request.id)) continue;
    EXPECT_EQ(together.at(request.id).tokens, alone.at(request.id).tokens) << request.id;
    const KvReport& a = together.at(request.id).finished->usage.kv;
    EXPECT_EQ(a.device_bytes, alone.at(request.id).finished->usage.kv.device_bytes) << request.id;
    EXPECT_EQ(a.entries_kept + a.entries_dropped, 16 * (static_cast<int64_t>(request.prompt.size()) + 99)) << request.id;
    std::map<std::string, int64_t> formats(a.entries_by_format.begin(), a.entries_by_format.end());
    EXPECT_EQ(formats["s4v2"] + formats["dense"], a.entries_kept) << request.id;
    EXPECT_TRUE(a.key_bits > 4 && a.key_bits < 16 && a.value_bits < a.key_bits) << a.key_bits << " and " << a.value_bits;
    if (request.kv->budget.kind == KvBudget::Kind::kRatio) EXPECT_LE(a.bytes_ratio, 0.3) << request.id;
  }
}

TEST_F(KvPolicySim, PreemptionChangesNoTokenOfCodedRequests) {
  std::vector<Request> requests;
  for (const char* policy : {"full", "snapkv", "h2o", "adakv"}) {
    KvOptions kv = policy == std::string("full") ? Kv(policy, KvBudget::Kind::kNone, 0) : Kv(policy, KvBudget::Kind::kRatio, 0.2);
    kv.bits = {4, 2};
    requests.push_back(Ask(policy, 400, 150, kv));
  }
  Make(Limits(16, 8, 64), {});
  std::map<std::string, Heard> alone;
  for (const Request& request : requests) alone[request.id] = Run({request}).at(request.id);
  // A full request of higher rank wants all of the cache in the middle of their answers.
  std::map<std::string, std::shared_ptr<ResponseStream>> streams;
  for (const Request& request : requests) streams[request.id] = core_->Submit(request).value();
  for (int i = 0; i < 80; ++i) core_->Step();
  ASSERT_EQ(core_->num_running(), 4);
  Request large = Ask("large", 3500, 100, Kv("full", KvBudget::Kind::kNone, 0));
  large.priority = 1;
  streams["large"] = core_->Submit(large).value();
  for (int i = 0; i < 5000 && core_->Step() != EngineCore::Outcome::kIdle; ++i) clock_.Advance(0.01);
  EXPECT_GE(core_->queue().Stats().preemptions, 3);
  EXPECT_GT(core_->queue().Stats().recomputed_tokens, 1000);
  for (const Request& request : requests) {
    std::vector<int32_t> tokens;
    while (auto event = streams[request.id]->TryNext()) {
      if (auto* delta = std::get_if<Delta>(&*event)) tokens.insert(tokens.end(), delta->token_ids.begin(), delta->token_ids.end());
    }
    EXPECT_EQ(tokens, alone.at(request.id).tokens) << request.id;
  }
}

TEST_F(KvPolicySim, APromptThatIsCodedAsItComesNeedsLess) {
  Make(Limits(16, 8, 256), {});
  KvOptions kv = Kv("full", KvBudget::Kind::kNone, 0);
  kv.bits = {4, 4};
  const KvReport dense = Run({Ask("a", 2000, 20, kv)}).at("a").finished->usage.kv;
  kv.params["prefill"] = std::string("coded");
  const KvReport coded = Run({Ask("a", 2000, 20, kv)}).at("a").finished->usage.kv;
  EXPECT_GT(dense.peak_bytes_ratio, 1);
  EXPECT_LT(coded.peak_bytes_ratio, 0.55);
  EXPECT_LT(dense.bytes_ratio, 0.31);
  EXPECT_LT(coded.bytes_ratio, 0.29);
  // Eleven slabs hold 2,800 full tokens: four such prompts run at once.
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(Ask(absl::StrCat("request", std::string(static_cast<size_t>(i), '.')), 2000, 20, kv));
  Make(Limits(11, 8, 256), {});
  int most_running = 0;
  Run(requests, [&] { most_running = std::max(most_running, core_->num_running()); });
  EXPECT_GE(most_running, 3);
}

TEST_F(KvPolicySim, AFaultEndsItsRequestAlone) {
  Make(Limits(32, 8, 64), {});
  KvOptions kv = Kv("full", KvBudget::Kind::kNone, 0);
  kv.bits = {4, 4};
  Request bad = Ask("bad", 200, 60, kv), good = Ask("good", 200, 12, kv);
  for (int32_t& token : good.prompt) token = 1 + token % 20;
  const Heard before = Run({good}).at("good");
  int32_t id = 1;  // that the good request never meets
  const auto meets = [&](const std::vector<int32_t>& ids) { return std::find(ids.begin(), ids.end(), id) != ids.end(); };
  while (meets(good.prompt) || meets(before.tokens)) ++id;
  ASSERT_LT(id, kFakeVocab);
  bad.prompt[150] = model_.infinite_key = id;
  auto first = core_->Submit(bad), second = core_->Submit(good);
  ASSERT_TRUE(first.ok() && second.ok());
  for (int i = 0; i < 1000 && core_->Step() != EngineCore::Outcome::kIdle; ++i) clock_.Advance(0.01);
  Heard heard[2];
  for (int i = 0; i < 2; ++i) {
    while (auto event = (i == 0 ? *first : *second)->TryNext()) {
      if (auto* delta = std::get_if<Delta>(&*event)) {
        heard[i].tokens.insert(heard[i].tokens.end(), delta->token_ids.begin(), delta->token_ids.end());
      } else if (auto* finished = std::get_if<Finished>(&*event)) {
        heard[i].finished = *finished;
      }
    }
    ASSERT_TRUE(heard[i].finished);
  }
  EXPECT_EQ(heard[0].finished->reason, FinishReason::kError);
  EXPECT_TRUE(absl::IsInternal(heard[0].finished->error)) << heard[0].finished->error;
  EXPECT_NE(heard[0].finished->error.message().find("not a finite number"), absl::string_view::npos);
  EXPECT_TRUE(heard[0].tokens.empty());
  EXPECT_EQ(heard[1].tokens, before.tokens);
  EXPECT_TRUE(heard[1].finished->error.ok());
  EXPECT_GT(core_->cache().Stats().encode_faults, 0);
  core_->cache().Audit();
  EXPECT_EQ(core_->cache().Stats().resident_bytes, 0);
}

TEST_F(KvPolicySim, ARatioOfOneEqualsFull) {
  Make(Limits(32, 12, 64), Everything());
  Request full = Ask("f", 200, 40, Kv("full", KvBudget::Kind::kNone, 0));
  const Heard expected = Run({full}).at("f");
  for (const PolicyRow& row : AllPolicies()) {
    full.kv = Kv(row.name, KvBudget::Kind::kRatio, 1);
    const Heard heard = Run({full}).at("f");
    EXPECT_EQ(heard.tokens, expected.tokens) << row.name;
    EXPECT_EQ(heard.finished->usage.kv.device_bytes, expected.finished->usage.kv.device_bytes) << row.name;
    EXPECT_EQ(heard.finished->usage.kv.policy, row.name);
  }
}

// A pool of four dense prompts of 4,032 tokens decodes twelve of 4,000 tokens at a quarter of the cache in one step.
TEST_F(KvPolicySim, FreedMeansFreed) {
  Make(Limits(4 * 4032 / 256, 16, 4096), {});
  std::vector<Request> requests;
  for (int i = 0; i < 12; ++i) {
    requests.push_back(Ask(absl::StrCat("request", std::string(static_cast<size_t>(i), '.')), 4000, 32,
                           Kv("snapkv", KvBudget::Kind::kRatio, 0.25)));
  }
  int most_running = 0;
  const auto heard = Run(requests, [&] { most_running = std::max(most_running, core_->num_running()); });
  EXPECT_GE(most_running, 12);
  EXPECT_EQ(core_->queue().Stats().preemptions, 0);
  for (const Request& request : requests) {
    const KvReport& kv = heard.at(request.id).finished->usage.kv;
    EXPECT_LE(kv.bytes_ratio, 0.25);
    EXPECT_GT(kv.bytes_ratio, 0.23);
    EXPECT_GE(kv.peak_bytes_ratio, 1.0) << "the prompt is dense until its end";
  }
}

TEST_F(KvPolicySim, EvictingRequestsNeverExceedTheirBytes) {
  Make(Limits(32, 8, 64), Everything());
  const double budget = 16.0 * 2 * 64 * 1024;  // two pages a list
  for (const char* policy : {"streaming", "h2o", "tova", "snapkv", "adakv", "chunkkv", "keydiff", "polykv", "knorm"}) {
    KvOptions kv = Kv(policy, KvBudget::Kind::kBytes, budget);
    kv.params["decode"] = std::string("evict");
    int64_t most_after_prompt = 0;
    bool prompt_done = false;
    const auto heard = Run({Ask("a", 300, 150, kv)}, [&] {
      const KvStats stats = core_->cache().Stats();
      prompt_done |= core_->queue().Stats().generated_tokens > generated_;
      if (prompt_done) most_after_prompt = std::max(most_after_prompt, stats.resident_bytes);
    });
    generated_ = core_->queue().Stats().generated_tokens;
    EXPECT_LE(static_cast<double>(most_after_prompt), budget) << policy;
    EXPECT_GT(static_cast<double>(most_after_prompt), 0.7 * budget) << policy;
    EXPECT_EQ(heard.at("a").tokens.size(), 150u);
  }
}

TEST_F(KvPolicySim, TheServersDefaultAndAuto) {
  KvOptions fallback = Kv("snapkv", KvBudget::Kind::kRatio, 0.5);
  Make(Limits(8, 8, 64), {fallback, false});  // 2,048 full tokens
  const auto report = [&](int prompt, std::optional<KvOptions> kv) { return Run({Ask("a", prompt, 4, std::move(kv))}).at("a").finished->usage.kv; };
  KvReport kv = report(400, std::nullopt);
  EXPECT_EQ(kv.policy, "snapkv");
  EXPECT_EQ(kv.reason, "the server's default (--kv)");
  kv = report(400, KvOptions{});
  EXPECT_EQ(kv.policy, "full");
  EXPECT_NE(kv.reason.find("at most half"), std::string::npos) << kv.reason;
  kv = report(1500, KvOptions{});
  EXPECT_EQ(kv.policy, "snapkv");
  EXPECT_NE(kv.reason.find("more than half"), std::string::npos) << kv.reason;
  kv = report(200, KvOptions{});
  EXPECT_EQ(kv.policy, "full");
  EXPECT_NE(kv.reason.find("200 tokens"), std::string::npos) << kv.reason;
  kv = report(400, Kv("auto", KvBudget::Kind::kRatio, 0.25));
  EXPECT_EQ(kv.policy, "snapkv");
  EXPECT_LE(kv.bytes_ratio, 0.25);
  kv = report(400, Kv("full", KvBudget::Kind::kNone, 0));
  EXPECT_EQ(kv.policy, "full");
  EXPECT_EQ(kv.reason, "requested");
  Make(Limits(8, 8, 64), {});
  kv = report(400, Kv("auto", KvBudget::Kind::kRatio, 0.25));
  EXPECT_EQ(kv.policy, "h2o");
  EXPECT_NE(kv.reason.find("budget"), std::string::npos) << kv.reason;
  // What the operator wants but cannot be is said at the start, or passed over where only the prompt is at fault.
  auto bad = EngineCore::Create(Limits(8), {backend_.get(), &model_, &tokenizer_, nullptr, &clock_, 1,
                                            {Kv("snapkv", KvBudget::Kind::kRatio, -1), false}});
  EXPECT_TRUE(absl::IsInvalidArgument(bad.status())) << bad.status();
  fallback = Kv("snapkv", KvBudget::Kind::kTokens, 100);
  fallback.protect.ranges = {{0, 60}};
  Make(Limits(8, 8, 64), {fallback, false});
  kv = report(50, std::nullopt);
  EXPECT_EQ(kv.policy, "full");
  EXPECT_NE(kv.reason.find("kv.protect.ranges"), std::string::npos) << kv.reason;
  // Neither is a short prompt refused for a default whose share of it is less than a page.
  for (const char* policy : {"auto", "snapkv"}) {
    Make(Limits(8, 8, 64), {Kv(policy, KvBudget::Kind::kRatio, 0.25), false});
    kv = report(20, std::nullopt);
    EXPECT_EQ(kv.policy, "full");
    EXPECT_NE(kv.reason.find(policy == std::string("auto") ? "20 tokens" : "does not fit this prompt"), std::string::npos) << kv.reason;
    EXPECT_LE(report(400, std::nullopt).bytes_ratio, 0.25);
  }
}

}  // namespace
}  // namespace loupe
