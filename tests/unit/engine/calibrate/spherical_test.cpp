// The calibration of policy spherical on a model of random weights: what it measures depends on nothing but the list, it goes
// on where it stopped, parts make a whole, and what it writes is a profile that the policy takes.
#include "engine/calibrate/spherical.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "engine/eval/kl.h"
#include "engine/load/profile_file.h"
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

class CalibrateSphericalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(folder_);
    std::ofstream(folder_ + "/a.txt") << Sentences(900, 1);
    testing::TinyOptions options;
    options.context = 1024, options.head_dim = 64;
    testing::MakeTinyModel(options).Write(folder_ + "/model.gguf");
    model_ = Load({});
    options_.text = folder_, options_.prompts = 2, options_.context = 256, options_.continuation = 16, options_.chunk = 100;
    options_.weights_hash = *HashWeights(folder_ + "/model.gguf");
    options_.model_id = "tiny";
    EvalItem item;
    item.id = "item", item.context = Sentences(40, 7), item.question = "What walks? ", item.answer_prefix = "Answer:",
    item.answers = {"lamp"};
    options_.items = {item};
  }
  void TearDown() override { fs::remove_all(folder_); }
  LoadedModel Load(std::vector<std::string> artifacts) const {
    EngineConfig config;
    config.backend.num_threads = 2;
    config.max_step_tokens = 256;
    config.strategy_files = std::move(artifacts);
    auto model = LoadModel(folder_ + "/model.gguf", config);
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  }

  const std::string folder_ = ::testing::TempDir() + "loupe_calibrate_spherical_test";
  LoadedModel model_;
  SphericalOptions options_;
};

TEST_F(CalibrateSphericalTest, MakesAProfileThatServes) {
  auto results = ResultFile::Open("");
  double last = 0;
  const auto made = CalibrateSpherical(model_, options_, *results, [&](double share, const std::string&) {
    EXPECT_GE(share, last);
    last = share;
  });
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(last, 1);
  EXPECT_EQ(made->missing_cells, 0);
  ListCosts sum;
  for (const ListCosts& costs : made->profile.lists) {
    for (size_t i = 0; i < kProfileBits.size(); ++i) sum.key[i] += costs.key[i], sum.value[i] += costs.value[i];
    for (size_t i = 0; i < kProfileShares.size(); ++i) sum.share[i] += costs.share[i];
  }
  EXPECT_GT(sum.key[0], sum.key[1]);
  EXPECT_GT(sum.key[1], sum.key[2]);
  EXPECT_GT(sum.value[0], sum.value[2]);
  EXPECT_GT(sum.share.back(), sum.share.front());
  EXPECT_GT(sum.key[2], 0);

  std::ofstream(folder_ + "/made.json") << ProfileToText(made->profile, made->calibration);
  const LoadedModel with = Load({folder_ + "/made.json"});
  ASSERT_EQ(with.artifacts.profiles.size(), 1u);
  EXPECT_EQ(with.artifacts.mean_keys().size(), made->profile.mean_keys.size());
  std::vector<EvalPolicy> policies;
  for (const double ratio : {0.6, 0.3}) {
    EvalPolicy& policy = policies.emplace_back();
    policy.options.policy = "spherical";
    policy.options.budget = {KvBudget::Kind::kRatio, ratio};
    policy.label = std::to_string(ratio);
  }
  KlOptions kl;
  kl.text = folder_, kl.context = 300, kl.windows = 2, kl.continuation = 8, kl.chunk = 100;
  LoadedModel& model = const_cast<LoadedModel&>(with);
  const auto r = EvalKl(model, policies, kl, *results, {});
  ASSERT_TRUE(r.ok()) << r.status();
  EXPECT_LT((*r)[0].kl_mean, (*r)[1].kl_mean);
  EXPECT_LE((*r)[0].bytes_ratio, 0.6);
  EXPECT_LE((*r)[1].bytes_ratio, 0.3);
}

TEST_F(CalibrateSphericalTest, ALayersCostsDoNotDependOnWhatWasMeasuredBefore) {
  auto probe = SphericalProbe::Create(model_, 300, 16, 100);
  ASSERT_TRUE(probe.ok()) << probe.status();
  const auto prompts = TextPrompts(folder_, *model_.tokenizer, 256, 16, 1, 1);
  ASSERT_TRUE(prompts.ok()) << prompts.status();
  const auto means = (*probe)->MeanKeys((*prompts)[0]);
  ASSERT_TRUE(means.ok()) << means.status();
  ASSERT_TRUE((*probe)->Begin((*prompts)[0]).ok());
  const auto first = (*probe)->Measure(1, *means);
  ASSERT_TRUE((*probe)->Measure(0, *means).ok());
  const auto again = (*probe)->Measure(1, *means);
  ASSERT_TRUE(first.ok() && again.ok());
  for (size_t g = 0; g < first->size(); ++g) {
    EXPECT_EQ((*first)[g].key, (*again)[g].key);
    EXPECT_EQ((*first)[g].value, (*again)[g].value);
    EXPECT_EQ((*first)[g].share, (*again)[g].share);
  }
}

TEST_F(CalibrateSphericalTest, PartsMakeAWholeAndFinishedOnesAreKept) {
  const std::string path = folder_ + "/cells.jsonl";
  std::string whole;
  {
    auto results = ResultFile::Open("");
    const auto made = CalibrateSpherical(model_, options_, *results, {});
    ASSERT_TRUE(made.ok()) << made.status();
    whole = ProfileToText(made->profile, made->calibration);
  }
  options_.parts = 2;
  for (const int part : {0, 1}) {
    auto results = ResultFile::Open(path);
    options_.part = part;
    const auto made = CalibrateSpherical(model_, options_, *results, {});
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(made->missing_cells, part == 0 ? 2 : 0);  // of one prompt's two layers
    if (part == 1) EXPECT_EQ(ProfileToText(made->profile, made->calibration), whole);
  }
  options_.parts = 1, options_.part = 0;
  auto results = ResultFile::Open(path);
  const auto again = CalibrateSpherical(model_, options_, *results, {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->seconds, 0);
}

TEST_F(CalibrateSphericalTest, RefusesWhatDoesNotFit) {
  auto results = ResultFile::Open("");
  const auto expect = [&](const std::string& words) {
    const auto refused = CalibrateSpherical(model_, options_, *results, {});
    ASSERT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
    EXPECT_NE(refused.status().message().find(words), absl::string_view::npos) << refused.status();
  };
  options_.part = 1;
  expect("--part is 1");
  options_.part = 0, options_.context = 100;
  expect("at least 256");
  options_.context = 256, options_.items[0].answers.clear();
  expect("no answer");
}

}  // namespace
}  // namespace loupe
