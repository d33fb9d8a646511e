// Both suites on a model of random weights: a copy of a shared prompt is worth as much as a prompt of its own.
#include "engine/eval/kl.h"

#include <filesystem>
#include <fstream>
#include <random>

#include "engine/eval/items.h"
#include "engine/eval/text_windows.h"
#include "gtest/gtest.h"
#include "kvcache/policies/registry.h"
#include "tests/support/tiny_model.h"

namespace loupe {
namespace {

namespace fs = std::filesystem;

std::string Sentences(int count, uint64_t seed) {
  const std::vector<std::string> words{"river", "stone", "glass", "lamp", "seven", "walks", "under", "the", "a", "bridge", "slowly"};
  std::mt19937_64 random(seed);
  std::string text;
  for (int i = 0; i < count; ++i) text += words[random() % words.size()] + (i % 9 == 8 ? ". " : " ");
  return text;
}

class EvalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(folder_);
    std::ofstream(folder_ + "/a.txt") << Sentences(900, 1);
    std::ofstream(folder_ + "/b.txt") << Sentences(600, 2);
    std::ofstream(folder_ + "/notes.md") << "not read";
    const std::string path = folder_ + "/model.gguf";
    testing::TinyOptions options;
    options.context = 1024;
    testing::MakeTinyModel(options).Write(path);
    EngineConfig config;
    config.backend.num_threads = 2;
    config.max_step_tokens = 128;
    auto model = LoadModel(path, config);
    ASSERT_TRUE(model.ok()) << model.status().ToString();
    model_ = *std::move(model);
    options_.text = folder_, options_.context = 200, options_.windows = 4, options_.continuation = 20, options_.chunk = 64;
  }
  void TearDown() override { fs::remove_all(folder_); }

  static EvalPolicy Make(const std::string& name, double ratio) {
    EvalPolicy policy;
    policy.options.policy = name;
    if (ratio < 1) policy.options.budget = {KvBudget::Kind::kRatio, ratio};
    policy.options.protect.recent = 8;
    policy.label = "{\"policy\":\"" + name + "\",\"ratio\":" + std::to_string(ratio) + "}";
    return policy;
  }
  std::vector<KlResult> Kl(const std::vector<EvalPolicy>& policies, ResultFile& results) {
    auto r = EvalKl(model_, policies, options_, results, {});
    EXPECT_TRUE(r.ok()) << r.status().ToString();
    return r.ok() ? *r : std::vector<KlResult>(policies.size());
  }
  std::vector<KlResult> Kl(const std::vector<EvalPolicy>& policies) {
    auto results = ResultFile::Open("");
    return Kl(policies, *results);
  }

  const std::string folder_ = ::testing::TempDir() + "loupe_eval_test";
  LoadedModel model_;
  KlOptions options_;
};

TEST_F(EvalTest, WindowsDoNotOverlapAndComeFromAllTexts) {
  const auto windows = CutWindows(folder_, *model_.tokenizer, 100, 8, 3);
  ASSERT_TRUE(windows.ok()) << windows.status().ToString();
  int from_b = 0;
  for (size_t i = 0; i < windows->size(); ++i) {
    from_b += (*windows)[i].file == "b.txt";
    EXPECT_EQ((*windows)[i].ids.size(), 100u);
    for (size_t k = 0; k < i; ++k) {
      EXPECT_FALSE((*windows)[i].file == (*windows)[k].file && (*windows)[i].first == (*windows)[k].first);
    }
  }
  EXPECT_EQ(from_b, 4);
  const auto none = CutWindows(folder_, *model_.tokenizer, 100000, 8, 3);
  EXPECT_NE(std::string(none.status().message()).find("holds 0 windows of 100000 tokens, 8 are asked for"), std::string::npos);
  EXPECT_FALSE(CutWindows(folder_ + "/nothing", *model_.tokenizer, 10, 1, 1).ok());
}

TEST_F(EvalTest, TheFullCacheDoesNotDivergeFromItself) {
  const std::vector<KlResult> r = Kl({Make("full", 1), Make("snapkv", 1)});
  for (const KlResult& one : r) {
    EXPECT_EQ(one.kl_mean, 0) << one.label;
    EXPECT_EQ(one.kl_p95, 0);
    EXPECT_EQ(one.top1, 1);
    EXPECT_EQ(one.nll_gap, 0);
    EXPECT_NEAR(one.bytes_ratio, 1.04, 0.001);  // 200 entries: 3 pages of 64 and a small one of 16
  }
}

TEST_F(EvalTest, APolicyOnACopyEqualsThePolicyAlone) {
  const EvalPolicy streaming = Make("streaming", 0.25), snap = Make("snapkv", 0.25), heavy = Make("h2o", 0.25);
  const std::vector<KlResult> together = Kl({streaming, snap, heavy});
  for (size_t i = 0; i < together.size(); ++i) {
    const std::vector<KlResult> alone = Kl({std::vector<EvalPolicy>{streaming, snap, heavy}[i]});
    EXPECT_EQ(alone[0].kl_mean, together[i].kl_mean) << together[i].label;
    EXPECT_GT(alone[0].kl_mean, 0) << together[i].label;
    EXPECT_LE(alone[0].bytes_ratio, 0.25);
  }
  // The same by hand: a sequence of its own, opened with the policy.
  const auto windows = CutWindows(folder_, *model_.tokenizer, 221, 4, options_.seed);
  ASSERT_TRUE(windows.ok());
  auto runner = EvalRunner::Create(model_, 3, 221, options_.chunk);
  ASSERT_TRUE(runner.ok());
  double sum = 0;
  for (const TextWindow& window : *windows) {
    KvCache& cache = (*runner)->cache();
    const auto policy = MakePolicy(snap.options, cache.policy_context(200));
    ASSERT_TRUE(policy.ok());
    const std::vector<SeqId> seqs{cache.Open().value(), cache.Open(**policy).value()};
    for (const SeqId seq : seqs) ASSERT_TRUE((*runner)->Prefill(seq, std::span(window.ids).first(200), options_.chunk).ok());
    for (size_t t = 200; t < 220; ++t) {
      const std::vector<int32_t> ids(2, window.ids[t]);
      const auto logits = (*runner)->Decode(seqs, ids);
      ASSERT_TRUE(logits.ok());
      const size_t vocab = logits->size() / 2;
      sum += CompareRows(logits->first(vocab), logits->last(vocab), window.ids[t + 1]).kl;
    }
    for (const SeqId seq : seqs) cache.Close(seq);
  }
  EXPECT_NEAR(sum / 80, together[1].kl_mean, 1e-12);
}

TEST_F(EvalTest, AnInterruptedGridGoesOn) {
  const std::string path = folder_ + "/results.jsonl";
  const std::vector<EvalPolicy> policies{Make("streaming", 0.25), Make("random", 0.5)};
  const std::vector<KlResult> fresh = Kl(policies);
  options_.windows = 2;
  {
    auto results = ResultFile::Open(path);
    Kl({policies[1]}, *results);
    EXPECT_EQ(results->size(), 2u);
  }
  options_.windows = 4;
  auto results = ResultFile::Open(path);
  const std::vector<KlResult> again = Kl(policies, *results);
  EXPECT_EQ(results->size(), 8u);
  for (size_t i = 0; i < policies.size(); ++i) {
    EXPECT_EQ(again[i].kl_mean, fresh[i].kl_mean);
    EXPECT_EQ(again[i].kl_ci95.low, fresh[i].kl_ci95.low);
    EXPECT_EQ(again[i].kl_minus_first, fresh[i].kl_minus_first);
  }
}

TEST_F(EvalTest, ItemsCompareWithTheFullCache) {
  ItemsOptions options;
  options.chunk = 64;
  for (int i = 0; i < 4; ++i) {
    EvalItem item;
    item.id = "item-" + std::to_string(i), item.task = i < 2 ? "one" : "two", item.group = std::to_string(i / 2);
    item.context = Sentences(40, static_cast<uint64_t>(i / 2));
    item.question = "What walks? ", item.answer_prefix = "Answer:", item.answers = {"lamp"}, item.scoring = "contains_all";
    item.max_new_tokens = 6;
    options.items.push_back(item);
  }
  auto results = ResultFile::Open("");
  const auto r = EvalItems(model_, {Make("full", 1), Make("streaming", 0.3)}, options, *results, {});
  ASSERT_TRUE(r.ok()) << r.status().ToString();
  EXPECT_EQ((*r)[0].items, 4);
  EXPECT_EQ((*r)[0].gold_nll, (*r)[0].gold_nll_full);
  EXPECT_EQ((*r)[0].recall, (*r)[0].recall_full);
  EXPECT_NE((*r)[1].gold_nll, (*r)[1].gold_nll_full);
  EXPECT_EQ((*r)[1].gold_nll_full, (*r)[0].gold_nll_full);
  EXPECT_EQ((*r)[1].by_task.at("two").items, 2);
  EXPECT_LE((*r)[1].bytes_ratio, 0.3);
  options.question_inside = true;
  const auto inside = EvalItems(model_, {Make("streaming", 0.3)}, options, *results, {});
  ASSERT_TRUE(inside.ok()) << inside.status().ToString();
  EXPECT_NE((*inside)[0].gold_nll, (*r)[1].gold_nll);
}

TEST_F(EvalTest, WindowsBeyondTheModelAreRefused) {
  options_.context = 1000, options_.continuation = 100, options_.windows = 1;
  auto results = ResultFile::Open("");
  const auto r = EvalKl(model_, {Make("full", 1)}, options_, *results, {});
  ASSERT_FALSE(r.ok());
  EXPECT_NE(std::string(r.status().message()).find("1024"), std::string::npos) << r.status().ToString();
}

}  // namespace
}  // namespace loupe
