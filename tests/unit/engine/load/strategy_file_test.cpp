// A strategy's file: what is written is read, everything else is refused by name, and only the model it was made for
// takes it.
#include "engine/load/strategy_file.h"

#include <filesystem>
#include <fstream>
#include <random>

#include "engine/load/load_model.h"
#include "gtest/gtest.h"
#include "tests/support/strategies.h"
#include "tests/support/tiny_model.h"

namespace loupe {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

TEST(StrategyFile, WhatIsWrittenIsRead) {
  Strategy written = *testing::RandomStrategy(4, 3);
  written.patterns[3].params = {{"kernel", 7.0}, {"pool", std::string("max")}};
  const std::string text = StrategyToText(written, {{"command", "loupe \"calibrations\""}});
  const auto read = ParseStrategy(text, "name");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->name, "name");
  EXPECT_EQ(read->model, written.model);
  EXPECT_EQ(read->num_layers, 4);
  EXPECT_EQ(read->num_kv_heads, 3);
  EXPECT_EQ(read->head_dim, 16);
  EXPECT_EQ(read->fingerprint.size(), 16u);
  ASSERT_EQ(read->budgets.size(), written.budgets.size());
  for (size_t i = 0; i < read->budgets.size(); ++i) {
    EXPECT_EQ(read->budgets[i].mean, written.budgets[i].mean);
    EXPECT_EQ(read->budgets[i].prefill.patterns, written.budgets[i].prefill.patterns);
    EXPECT_EQ(read->budgets[i].prefill.entries, written.budgets[i].prefill.entries);
    EXPECT_EQ(read->budgets[i].decode.entries, written.budgets[i].decode.entries);
  }
  EXPECT_EQ(read->patterns[3].params, written.patterns[3].params);
  EXPECT_NE(ParseStrategy(text + " ", "name")->fingerprint, read->fingerprint);
}

struct Broken {
  const char* pointer;  // what is replaced
  const char* value;    // "" removes it
  std::vector<const char*> words;
};

TEST(StrategyFile, WhatIsWrongIsNamed) {
  const Json good = Json::parse(StrategyToText(*testing::RandomStrategy(2, 2), Json::object()));
  const std::vector<Broken> cases = {
      {"", "[]", {"must be an object"}},
      {"", "3", {"must be an object"}},
      {"/kind", "", {"kind", "missing"}},
      {"/kind", "\"router\"", {"kind", "router", "polykv-strategy"}},
      {"/kind", "1", {"kind", "1", "string"}},
      {"/version", "2", {"version", "2", "1"}},
      {"/version", "\"1\"", {"version", "whole number"}},
      {"/version", "1.5", {"version", "1.5", "whole number"}},
      {"/model", "", {"model", "missing"}},
      {"/model", "7", {"model", "object"}},
      {"/model/name", "[]", {"model.name", "string"}},
      {"/model/weights_hash", "", {"model.weights_hash", "missing"}},
      {"/model/layers", "-1", {"model.layers", "-1"}},
      {"/model/layers", "3", {"budgets[0].prefill.patterns", "3 layers", "has 2"}},
      {"/model/layers", "0", {"0"}},
      {"/model/kv_heads", "1e99", {"model.kv_heads", "whole number"}},
      {"/model/kv_heads", "5", {"budgets[0].prefill.patterns", "5 kv heads"}},
      {"/model/head_dim", "\"64\"", {"model.head_dim"}},
      {"/patterns", "", {"patterns", "missing"}},
      {"/patterns", "{}", {"patterns", "array"}},
      {"/patterns", "[]", {"patterns", "empty"}},
      {"/patterns/1", "\"h2o\"", {"patterns[1]", "object"}},
      {"/patterns/1/policy", "\"full\"", {"patterns[1].policy", "full", "snapkv"}},
      {"/patterns/1/policy", "\"adakv\"", {"patterns[1].policy", "adakv", "keydiff"}},
      {"/patterns/1/policy", "null", {"patterns[1].policy", "string"}},
      {"/patterns/1/params", "[1]", {"patterns[1].params", "object"}},
      {"/patterns/1/params", "{\"stride\": 1000}", {"patterns[1]", "stride", "1000", "64"}},
      {"/patterns/1/params", "{\"colour\": 1}", {"patterns[1]", "colour"}},
      {"/patterns/1/params", "{\"stride\": []}", {"patterns[1].params.stride"}},
      {"/patterns/3/params", "{\"window\": 32}", {"patterns", "window", "32", "64"}},
      {"/budgets", "3", {"budgets", "array"}},
      {"/budgets", "[]", {"budgets", "empty"}},
      {"/budgets/1", "[]", {"budgets[1]", "object"}},
      {"/budgets/1/mean", "24", {"budgets[1].mean", "24", "above 24"}},
      {"/budgets/1/mean", "65", {"budgets[1].prefill.entries", "256", "260"}},
      {"/budgets/1/mean", "\"64\"", {"budgets[1].mean", "whole number"}},
      {"/budgets/1/decode", "", {"budgets[1].decode", "missing"}},
      {"/budgets/1/decode", "null", {"budgets[1].decode", "object"}},
      {"/budgets/1/decode/patterns", "", {"budgets[1].decode.patterns", "missing"}},
      {"/budgets/1/decode/patterns/0/0", "6", {"budgets[1].decode.patterns", "6", "5"}},
      {"/budgets/1/decode/patterns/0/0", "\"h2o\"", {"budgets[1].decode.patterns", "h2o"}},
      {"/budgets/1/prefill/patterns/1", "[0]", {"budgets[1].prefill.patterns", "2 kv heads"}},
      {"/budgets/1/prefill/patterns/1", "0", {"budgets[1].prefill.patterns", "2 kv heads"}},
      {"/budgets/1/prefill/entries/0/0", "0", {"budgets[1].prefill.entries", "0", "at least 1"}},
      {"/budgets/1/prefill/entries/0/0", "2000000000", {"budgets[1].prefill.entries", "2000000000"}},
      {"/budgets/1/prefill/entries/0", "{}", {"budgets[1].prefill.entries", "2 kv heads"}},
      {"/budgets/1/prefill/entries", "[]", {"budgets[1].prefill.entries", "2 layers", "has 0"}},
  };
  for (const Broken& c : cases) {
    Json json = good;
    const Json::json_pointer pointer(c.pointer);
    const std::string path = c.pointer;
    if (*c.value != '\0') {
      json[pointer] = Json::parse(c.value);
    } else {
      json[pointer.parent_pointer()].erase(path.substr(path.rfind('/') + 1));
    }
    const auto read = ParseStrategy(json.dump(), "x");
    ASSERT_TRUE(absl::IsInvalidArgument(read.status())) << path << " = " << c.value;
    for (const char* word : c.words)
      EXPECT_NE(read.status().message().find(word), absl::string_view::npos) << word << " in " << read.status();
  }
  EXPECT_TRUE(ParseStrategy(good.dump(), "x").ok());
}

// Bytes of a good file are changed, dropped and doubled: every text is read or refused, and what is read holds.
TEST(StrategyFile, NoTextDoesHarm) {
  const std::string good = StrategyToText(*testing::RandomStrategy(2, 2), Json::object());
  std::mt19937 random(1);
  int refused = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    std::string text = good;
    for (unsigned edits = 1 + random() % 4; edits > 0; --edits) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, 1 + random() % 20);
          break;
        case 2:
          text.insert(at, text.substr(random() % text.size(), random() % 30));
          break;
        default:
          text[at] = "0123456789-.eE[]{},:\""[random() % 21];
          break;
      }
      if (text.empty()) text = "{";
    }
    const auto read = ParseStrategy(text, "x");
    refused += !read.ok();
    if (read.ok())
      EXPECT_TRUE(CheckStrategy(*read).ok());
    else
      EXPECT_TRUE(absl::IsInvalidArgument(read.status())) << read.status();
  }
  EXPECT_GT(refused, 2000);
}

class StrategyOfAModel : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(folder_ + "/artifacts");
    testing::MakeTinyModel({}).Write(folder_ + "/model.gguf");
    const auto hash = HashWeights(folder_ + "/model.gguf");
    ASSERT_TRUE(hash.ok()) << hash.status();
    strategy_ = *testing::RandomStrategy(2, 2);
    strategy_.head_dim = 32;
    strategy_.weights_hash = *hash;
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string Write(const Strategy& strategy, const std::string& name) const {
    std::ofstream(folder_ + "/" + name) << StrategyToText(strategy, Json::object());
    return folder_ + "/" + name;
  }
  absl::StatusOr<LoadedModel> Load(std::vector<std::string> files, const std::string& artifacts = "") const {
    EngineConfig config;
    config.strategy_files = std::move(files);
    config.artifact_folder = artifacts;
    return LoadModel(folder_ + "/model.gguf", config);
  }

  const std::string folder_ = ::testing::TempDir() + "loupe_strategy_test";
  Strategy strategy_;
};

TEST_F(StrategyOfAModel, OnlyItsOwnModelTakesIt) {
  const auto model = Load({Write(strategy_, "mine.json"), Write(strategy_, "also.json")});
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_EQ(model->artifacts.strategies.size(), 2u);
  EXPECT_EQ(model->artifacts.strategies[0]->name, "mine");
  const auto expect = [&](Strategy strategy, std::initializer_list<std::string> words) {
    const auto refused = Load({Write(strategy, "other.json")});
    ASSERT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
    for (const std::string& word : words)
      EXPECT_NE(refused.status().message().find(word), absl::string_view::npos) << word << " in " << refused.status();
  };
  Strategy other = strategy_;
  other.weights_hash = "0123456789abcdef";
  expect(other, {"other.json", "model.weights_hash", "0123456789abcdef", strategy_.weights_hash});
  other = *testing::RandomStrategy(3, 2);
  expect(other, {"model.layers", "3", "2"});
  other = *testing::RandomStrategy(2, 1);
  expect(other, {"model.kv_heads", "1", "2"});
  other = strategy_;
  other.head_dim = 64;
  expect(other, {"model.head_dim", "64", "32"});
  EXPECT_NE(Load({folder_}).status().message().find("is a directory"), absl::string_view::npos);
  EXPECT_NE(Load({folder_ + "/none.json"}).status().message().find("none.json"), absl::string_view::npos);
}

TEST_F(StrategyOfAModel, ShippedOnesLoadIfTheyFit) {
  Write(strategy_, "artifacts/b.json");
  Write(strategy_, "artifacts/a.json");
  Strategy other = strategy_;
  other.weights_hash = "0123456789abcdef";
  Write(other, "artifacts/c.json");
  Write(*testing::RandomStrategy(3, 2), "artifacts/d.json");
  const auto shipped = Load({}, folder_ + "/artifacts");
  ASSERT_TRUE(shipped.ok()) << shipped.status();
  ASSERT_EQ(shipped->artifacts.strategies.size(), 2u);
  EXPECT_EQ(shipped->artifacts.strategies[0]->name, "a");
  const auto given = Load({Write(strategy_, "mine.json")}, folder_ + "/artifacts");
  ASSERT_EQ(given->artifacts.strategies.size(), 1u);
  EXPECT_EQ(given->artifacts.strategies[0]->name, "mine");
  EXPECT_TRUE(Load({}, folder_ + "/nowhere")->artifacts.strategies.empty());
  // Another seed gives other weights.
  testing::TinyOptions options;
  options.seed = 2;
  testing::MakeTinyModel(options).Write(folder_ + "/model.gguf");
  EXPECT_TRUE(Load({}, folder_ + "/artifacts")->artifacts.strategies.empty());
}

}  // namespace
}  // namespace loupe
