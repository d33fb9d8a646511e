// The default model against the independent f32 pass of tests/reference, whose logits are kept in tests/golden/logits.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>

#include "engine/load/load_model.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/model_runner.h"

namespace loupe {
namespace {

using testing::ModelRunner;

std::string DefaultModelPath() {
  const char* path = std::getenv("LOUPE_TEST_MODEL");
  return path ? path : "models/SmolLM2-135M-Instruct.Q4_1.gguf";
}

class DefaultModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ifstream file("tests/golden/logits/smollm2-135m-q4_1.json");
    ASSERT_TRUE(file.is_open()) << "run from the root of the project";
    golden_ = nlohmann::json::parse(file);
  }

  LoadedModel Load(bool exact) {
    EngineConfig config;
    config.backend.device = "cpu";
    config.backend.exact = exact;
    auto model = LoadModel(DefaultModelPath(), config);
    EXPECT_TRUE(model.ok())
        << model.status()
        << "\nThe default model is missing or broken: ./deploy/quickstart.sh --build-only fetches it, "
           "or set LOUPE_TEST_MODEL to the path of SmolLM2-135M-Instruct.Q4_1.gguf";
    return model.ok() ? *std::move(model) : LoadedModel{};
  }

  nlohmann::json golden_;
};

// Natural log of the probability of every sampled or top token that the golden lists.
double LogSumExp(const std::vector<float>& logits) {
  const double peak = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (float l : logits) sum += std::exp(static_cast<double>(l) - peak);
  return peak + std::log(sum);
}

struct Distance {
  std::vector<double> rows;  // per row: largest difference of a logit, over the row's largest logit
  double kl = 0;             // mean over rows of KL(golden || ours), over the golden's top tokens and the rest as one

  double Worst() const { return *std::max_element(rows.begin(), rows.end()); }
  double Median() const {
    std::vector<double> sorted = rows;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

double LargestDifference(const std::vector<float>& logits, const std::vector<int>& ids, const nlohmann::json& wanted) {
  double worst = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    worst =
        std::max(worst, std::abs(static_cast<double>(logits[static_cast<size_t>(ids[i])]) - wanted[i].get<double>()));
  }
  return worst;
}

void AddRow(const nlohmann::json& row, const std::vector<int>& sample_ids, const std::vector<float>& logits,
            Distance* out) {
  const double peak = row["max_abs"];
  const auto top_ids = row["top_ids"].get<std::vector<int>>();
  const auto top = row["top_logits"].get<std::vector<double>>();
  out->rows.push_back(std::max(LargestDifference(logits, top_ids, row["top_logits"]),
                               LargestDifference(logits, sample_ids, row["sample_logits"])) /
                      peak);
  const double wanted_sum = row["log_sum_exp"], our_sum = LogSumExp(logits);
  double wanted_rest = 1, our_rest = 1;
  for (size_t i = 0; i < top_ids.size(); ++i) {
    const double p = std::exp(top[i] - wanted_sum);
    const double q = std::exp(static_cast<double>(logits[static_cast<size_t>(top_ids[i])]) - our_sum);
    out->kl += p * std::log(p / q);
    wanted_rest -= p;
    our_rest -= q;
  }
  if (wanted_rest > 1e-6 && our_rest > 0) out->kl += wanted_rest * std::log(wanted_rest / our_rest);
}

// Prompt rows in steps of `chunk`, or decode rows one by one if it is 0, which leaves the long prompt out.
Distance Measure(LoadedModel& model, const nlohmann::json& golden, size_t chunk) {
  Distance distance;
  ModelRunner runner(*model.backend, *model.decoder, 512);
  const auto sample_ids = golden["sample_ids"].get<std::vector<int>>();
  for (const auto& item : golden["cases"]) {
    const auto ids = item["ids"].get<std::vector<int32_t>>();
    if (chunk == 0 && ids.size() > 100) continue;
    const SeqId seq = runner.Open();
    std::vector<std::vector<float>> logits;
    if (chunk > 0) {
      logits = runner.Prefill(seq, ids, chunk);
    } else {
      for (int32_t id : ids) logits.push_back(runner.Step({{seq, {id}, true}})[0][0]);
    }
    for (const auto& row : item["rows"]) AddRow(row, sample_ids, logits[row["position"].get<size_t>()], &distance);
    runner.cache().Close(seq);
  }
  distance.kl /= static_cast<double>(distance.rows.size());
  return distance;
}

// Exact mode computes in f32 and keeps keys and values in f32, as the reference does.
TEST_F(DefaultModelTest, ExactModeEqualsTheReference) {
  LoadedModel model = Load(true);
  ASSERT_TRUE(model.decoder);
  const Distance prompt = Measure(model, golden_, 100);
  EXPECT_GE(prompt.rows.size(), 20u);
  EXPECT_LT(prompt.Worst(), 1e-3);
  EXPECT_LT(prompt.kl, 1e-6);
  std::printf("exact: median row %.2e, worst %.2e, mean KL %.2e\n", prompt.Median(), prompt.Worst(), prompt.kl);
}

TEST_F(DefaultModelTest, ExactModeAnswersAsTheReference) {
  LoadedModel model = Load(true);
  ASSERT_TRUE(model.decoder);
  const auto prompt_length = golden_["prompt_length"].get<std::ptrdiff_t>();
  std::vector<int32_t> ids;
  for (const auto& item : golden_["cases"]) {
    if (item["name"] == "greedy continuation") ids = item["ids"].get<std::vector<int32_t>>();
  }
  ASSERT_GT(static_cast<std::ptrdiff_t>(ids.size()), prompt_length);
  const std::vector<int32_t> prompt(ids.begin(), ids.begin() + prompt_length);
  const std::vector<int32_t> wanted(ids.begin() + prompt_length, ids.end());
  EXPECT_EQ(model.tokenizer->Encode("The capital of France is", true, true), prompt);
  ModelRunner runner(*model.backend, *model.decoder, 512);
  const SeqId seq = runner.Open();
  std::vector<float> logits = runner.Step({{seq, prompt}}, true)[0][0];
  std::vector<int32_t> answer;
  while (answer.size() < wanted.size()) {
    answer.push_back(static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    logits = runner.Step({{seq, {answer.back()}, true}})[0][0];
  }
  EXPECT_EQ(answer, wanted) << model.tokenizer->Decode(answer);
}

// What llama.cpp's rounding to int8 costs on this file bounds ours.
TEST_F(DefaultModelTest, FastModeIsNearTheReference) {
  LoadedModel model = Load(false);
  ASSERT_TRUE(model.decoder);
  const Distance prompt = Measure(model, golden_, 100);
  EXPECT_LT(prompt.kl, 0.0025);
  const Distance decode = Measure(model, golden_, 0);
  EXPECT_LT(decode.kl, 0.0025);
  std::printf("fast: mean KL %.2e in prompts, %.2e at decode\n", prompt.kl, decode.kl);
}

TEST_F(DefaultModelTest, LoadsEverythingTheFileHolds) {
  LoadedModel model = Load(false);
  ASSERT_TRUE(model.decoder);
  EXPECT_EQ(model.config.num_layers, 30);
  EXPECT_EQ(model.config.parameters, 134515008);
  EXPECT_EQ(model.config.max_context, 8192);
  EXPECT_TRUE(model.config.tied_embeddings);
  EXPECT_EQ(model.file_bytes, 98362432);
  EXPECT_EQ(model.tokenizer->vocab_size(), 49152);
  EXPECT_TRUE(model.tokenizer->IsEndOfGeneration(2));
  EXPECT_TRUE(model.tokenizer->IsEndOfGeneration(0));
  EXPECT_FALSE(model.tokenizer->IsEndOfGeneration(504));
  ASSERT_TRUE(model.chat_template) << model.chat_template_error;
  // The packed weights are what stays: they may not be much larger than the file.
  EXPECT_LT(static_cast<double>(model.decoder->weight_bytes()), 1.1 * static_cast<double>(model.file_bytes));
}

}  // namespace
}  // namespace loupe
