// The whole calibration on a model of random weights: what it measures, that it goes on where it stopped, and that what
// it writes is a strategy that polykv takes.
#include "engine/calibrate/polykv.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

#include "engine/eval/kl.h"
#include "engine/load/strategy_file.h"
#include "tests/support/tiny_model.h"

namespace loupe {
namespace {

namespace fs = std::filesystem;

std::string Sentences(int count, uint64_t seed) {
  const std::vector<std::string> words{"river", "stone", "glass", "lamp",   "seven", "walks",
                                       "under", "the",   "a",     "bridge", "slowly"};
  std::mt19937_64 random(seed);
  std::string text;
  for (int i = 0; i < count; ++i) text += words[random() % words.size()] + (i % 9 == 8 ? ". " : " ");
  return text;
}

class CalibrateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(folder_);
    std::ofstream(folder_ + "/a.txt") << Sentences(1200, 1);
    testing::TinyOptions options;
    options.context = 1024;
    testing::MakeTinyModel(options).Write(folder_ + "/model.gguf");
    EngineConfig config;
    config.backend.num_threads = 2;
    config.max_step_tokens = 256;
    auto model = LoadModel(folder_ + "/model.gguf", config);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    options_.text = folder_, options_.prompts = 3, options_.context = 256, options_.continuation = 24,
    options_.chunk = 100;
    options_.means = {32, 64, 128};
    options_.weights_hash = *HashWeights(folder_ + "/model.gguf");
    options_.model_id = "tiny";
    for (int i = 0; i < 2; ++i) {
      EvalItem item;
      item.id = "item-" + std::to_string(i), item.context = Sentences(40, static_cast<uint64_t>(7 + i));
      item.question = "What walks? ", item.answer_prefix = "Answer:", item.answers = {"lamp"};
      options_.items.push_back(item);
    }
  }
  void TearDown() override { fs::remove_all(folder_); }

  const std::string folder_ = ::testing::TempDir() + "loupe_calibrate_test";
  LoadedModel model_;
  PolyKvOptions options_;
};

TEST_F(CalibrateTest, MakesAStrategyThatServes) {
  auto results = ResultFile::Open("");
  double last = 0;
  const auto made = CalibratePolyKv(model_, options_, *results, [&](double share, const std::string&) {
    EXPECT_GE(share, last);
    last = share;
  });
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(last, 1);
  const auto read = ParseStrategy(StrategyToText(made->strategy, made->calibration), "made");
  ASSERT_TRUE(read.ok()) << read.status();
  for (const StrategyBudget& budget : read->budgets) {
    EXPECT_EQ(std::accumulate(budget.prefill.entries.begin(), budget.prefill.entries.end(), 0), 4 * budget.mean);
    const auto& e = made->calibration["expected"][std::to_string(budget.mean)];
    EXPECT_LE(e["kl"].get<double>(), e["uniform_kl"].get<double>() * 1.02);
  }
  std::ofstream(folder_ + "/made.json") << StrategyToText(made->strategy, made->calibration);
  EngineConfig config;
  config.backend.num_threads = 2;
  config.strategy_files = {folder_ + "/made.json"};
  auto model = LoadModel(folder_ + "/model.gguf", config);
  ASSERT_TRUE(model.ok()) << model.status();
  EvalPolicy policy;
  policy.options.policy = policy.label = "polykv";
  policy.options.budget = {KvBudget::Kind::kTokens, 50};
  KlOptions kl;
  kl.text = folder_, kl.context = 200, kl.windows = 2, kl.continuation = 8;
  const auto r = EvalKl(*model, {policy}, kl, *results, {});
  ASSERT_TRUE(r.ok()) << r.status();
  EXPECT_GT((*r)[0].kl_mean, 0);
}

TEST_F(CalibrateTest, GoesOnWhereItStopped) {
  auto none = ResultFile::Open("");
  const auto fresh = CalibratePolyKv(model_, options_, *none, {});
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  const std::string path = folder_ + "/cells.jsonl";
  {
    auto results = ResultFile::Open(path);
    ASSERT_TRUE(CalibratePolyKv(model_, options_, *results, {}).ok());
    EXPECT_EQ(results->size(), 10u);  // two a prompt and item
  }
  // The last cells are lost, one of them in the middle.
  std::ifstream in(path);
  std::string text((std::istreambuf_iterator<char>(in)), {}), kept;
  for (size_t at = 0, line = 0; line < 7; ++line, at = text.find('\n', at) + 1)
    kept = text.substr(0, text.find('\n', at) + 1 + 50);
  std::ofstream(path, std::ios::trunc) << kept;
  auto results = ResultFile::Open(path);
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_EQ(results->size(), 7u);
  const auto again = CalibratePolyKv(model_, options_, *results, {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(StrategyToText(again->strategy, again->calibration), StrategyToText(fresh->strategy, fresh->calibration));
  // A further fit of the same measurements measures nothing.
  options_.fit.per_head = false;
  const auto layers = CalibratePolyKv(model_, options_, *results, {});
  ASSERT_TRUE(layers.ok());
  EXPECT_EQ(layers->seconds, 0);
  EXPECT_EQ(layers->strategy.budgets[1].prefill.entries[0], layers->strategy.budgets[1].prefill.entries[1]);
  // The paper's rule by change of NLL asks for each layer alone, once a text.
  options_.fit.mode = FitMode::kPaper;
  options_.fit.prefer_by_nll = options_.fit.sensitivity_by_nll = true;
  ASSERT_TRUE(CalibratePolyKv(model_, options_, *results, {}).ok());
  EXPECT_EQ(results->size(), 13u);
}

TEST_F(CalibrateTest, SignalsAreWhatTheySayTheyAre) {
  std::vector<StrategyPattern> patterns{{"streaming", {}}, {"h2o", {}}, {"tova", {}}, {"snapkv", {}}};
  auto probe = SignalProbe::Create(model_, patterns, {{16, 32}, {32, 64}, {64, 128}}, 300, 24, 100);
  ASSERT_TRUE(probe.ok()) << probe.status();
  CalibrationPrompt prompt;
  prompt.ids = model_.tokenizer->Encode(Sentences(400, 5), false, false);
  prompt.ids.resize(225);
  prompt.context = 200;
  prompt.counted.assign(24, true);
  const auto local = (*probe)->Local(prompt);
  ASSERT_TRUE(local.ok()) << local.status();
  for (int r = 0; r < 4; ++r) {
    for (int list = 0; list < 4; ++list) {
      EXPECT_GT(local->squared.at(r, 0, list), local->squared.at(r, 2, list));
      EXPECT_LT(local->cosine.at(r, 0, list), local->cosine.at(r, 2, list));
      EXPECT_LE(local->cosine.at(r, 2, list), 1 + 1e-9);
    }
  }
  // One list compressed, from its layer upward, against the same as a policy of a sequence of its own.
  const std::vector<SignalProbe::Compressed> cases{{1, 1, 0}, {1, 0, 1}, {0, 1, -1}, {3, 0, -1}};
  const auto changes = (*probe)->Propagated(prompt, {32, 64}, cases);
  ASSERT_TRUE(changes.ok()) << changes.status();
  for (const Change& change : *changes) EXPECT_GT(change.kl, 0);
  const auto none = (*probe)->Propagated(prompt, {64, 200}, cases);
  for (const Change& change : *none) {
    EXPECT_NEAR(change.kl, 0, 1e-6);
    EXPECT_NEAR(change.nll, 0, 1e-6);
  }

  auto runner = EvalRunner::Create(model_, 2, 300, 256);
  ASSERT_TRUE(runner.ok());
  const std::span<const int32_t> ids(prompt.ids);
  const SeqId full = (*runner)->cache().Open().value();
  ASSERT_TRUE((*runner)->Prefill(full, ids.first(200), 100).ok());
  std::vector<std::vector<char>> residuals;
  const auto whole = (*runner)->Continue(full, ids.subspan(200, 24), EvalRunner::Rows::kPrompt, 0, &residuals, {});
  ASSERT_TRUE(whole.ok());
  const std::vector<float> logits(whole->begin(), whole->end());
  const auto part = (*runner)->Continue(full, ids.subspan(200, 24), EvalRunner::Rows::kPrompt, 1, &residuals, {});
  ASSERT_TRUE(part.ok());
  EXPECT_TRUE(std::equal(logits.begin(), logits.end(), part->begin(), part->end()))
      << "a pass from layer 1 is another one";
  EXPECT_EQ((*runner)->cache().num_tokens(full), 200);
  (*runner)->cache().Audit();
  (*runner)->cache().Close(full);
}

TEST_F(CalibrateTest, WhatCannotBeIsRefused) {
  auto results = ResultFile::Open("");
  const auto expect = [&](const PolyKvOptions& options, std::initializer_list<const char*> words) {
    const auto refused = CalibratePolyKv(model_, options, *results, {});
    ASSERT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
    for (const char* word : words)
      EXPECT_NE(refused.status().message().find(word), absl::string_view::npos) << word << " in " << refused.status();
  };
  PolyKvOptions options = options_;
  options.means = {256};
  expect(options, {"--budget", "256", "255"});
  options = options_;
  options.context = 100000;
  expect(options, {"windows", "100025"});
  options = options_;
  options.items[0].context = "short";
  expect(options, {"item-0", "128"});
  options = options_;
  options.text = folder_ + "/nothing";
  expect(options, {"--text"});
}

}  // namespace
}  // namespace loupe
