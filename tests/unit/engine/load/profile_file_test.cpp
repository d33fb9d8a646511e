// A profile's file: what is written is read, everything else is refused by name, and only the model it was made for takes it.
#include "engine/load/profile_file.h"

#include <filesystem>
#include <fstream>
#include <random>

#include "engine/load/load_model.h"
#include "engine/load/strategy_file.h"
#include "gtest/gtest.h"
#include "tests/support/profiles.h"
#include "tests/support/strategies.h"
#include "tests/support/tiny_model.h"

namespace loupe {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

TEST(ProfileFile, WhatIsWrittenIsRead) {
  const SphericalProfile written = testing::MakeProfile(3, 2, 64);
  const std::string text = ProfileToText(written, {{"command", "loupe"}});
  const auto read = ParseProfile(text, "name");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->name, "name");
  EXPECT_EQ(read->num_layers, 3);
  EXPECT_EQ(read->fingerprint.size(), 16u);
  EXPECT_EQ(KindOfArtifact(text), kProfileKind);
  for (size_t i = 0; i < written.lists.size(); ++i) {
    for (size_t b = 0; b < kProfileBits.size(); ++b) {
      EXPECT_NEAR(read->lists[i].key[b], written.lists[i].key[b], 1e-3 * written.lists[i].key[b]);
      EXPECT_NEAR(read->lists[i].value[b], written.lists[i].value[b], 1e-3 * written.lists[i].value[b]);
    }
    for (size_t s = 0; s < kProfileShares.size(); ++s) {
      EXPECT_NEAR(read->lists[i].share[s], written.lists[i].share[s], 1e-3 * written.lists[i].share[s]);
    }
  }
  for (size_t i = 0; i < written.mean_keys.size(); ++i) EXPECT_NEAR(read->mean_keys[i], written.mean_keys[i], 1e-3f);
  EXPECT_EQ(ProfileToText(*read, {{"command", "loupe"}}), text);
  EXPECT_NE(ParseProfile(text + " ", "name")->fingerprint, read->fingerprint);
}

struct Broken {
  const char* pointer;  // what is replaced
  const char* value;    // "" removes it
  std::vector<const char*> words;
};

TEST(ProfileFile, WhatIsWrongIsNamed) {
  const Json good = Json::parse(ProfileToText(testing::MakeProfile(2, 2, 64), Json::object()));
  const std::vector<Broken> cases = {
      {"", "[]", {"must be an object"}},
      {"/kind", "\"polykv-strategy\"", {"kind", "polykv-strategy", "spherical-profile"}},
      {"/version", "2", {"version", "2", "1"}},
      {"/model", "", {"model", "missing"}},
      {"/model/layers", "3", {"lists", "6 lists", "has 4"}},
      {"/model/layers", "0", {"lists", "0"}},
      {"/model/head_dim", "32", {"lists[0].mean_key", "32 numbers"}},
      {"/model/head_dim", "1000000", {"head_dim", "1000000"}},
      {"/bits", "[1,3,4]", {"bits", "1", "2"}},
      {"/shares", "[0.5]", {"shares", "6 numbers"}},
      {"/lists", "{}", {"lists", "array"}},
      {"/lists/1/key", "", {"lists[1].key", "missing"}},
      {"/lists/1/key", "[1,2]", {"lists[1].key", "3 numbers"}},
      {"/lists/1/value/0", "-0.5", {"lists[1].value", "-0.5"}},
      {"/lists/2/share/3", "1e9", {"lists[2].share", "1000"}},
      {"/lists/2/share/3", "null", {"lists[2].share", "null"}},
      {"/lists/3/mean_key/7", "1e30", {"lists[3].mean_key", "60000"}},
      {"/lists/3/mean_key/7", "\"x\"", {"lists[3].mean_key", "x"}},
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
    const auto read = ParseProfile(json.dump(), "x");
    ASSERT_TRUE(absl::IsInvalidArgument(read.status())) << path << " = " << c.value;
    for (const char* word : c.words) EXPECT_NE(read.status().message().find(word), absl::string_view::npos) << word << " in " << read.status();
  }
}

// Bytes of a good file are changed, dropped and doubled: every text is read or refused, and what is read holds.
TEST(ProfileFile, NoTextDoesHarm) {
  const std::string good = ProfileToText(testing::MakeProfile(1, 2, 64), Json::object());
  std::mt19937 random(1);
  int refused = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string text = good;
    for (unsigned edits = 1 + random() % 4; edits > 0; --edits) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0: text[at] = static_cast<char>(random()); break;
        case 1: text.erase(at, 1 + random() % 20); break;
        case 2: text.insert(at, text.substr(random() % text.size(), random() % 30)); break;
        default: text[at] = "0123456789-.eE[]{},:\""[random() % 21];
      }
      if (text.empty()) text = "{";
    }
    const auto read = ParseProfile(text, "x");
    refused += !read.ok();
    if (read.ok()) {
      EXPECT_TRUE(CheckProfile(*read).ok());
    } else {
      EXPECT_TRUE(absl::IsInvalidArgument(read.status())) << read.status();
    }
  }
  EXPECT_GT(refused, 500);
}

TEST(ProfileFile, OnlyItsOwnModelTakesItAndAFileReplacesItsKindAlone) {
  const std::string folder = ::testing::TempDir() + "loupe_profile_test";
  fs::create_directories(folder + "/artifacts");
  testing::TinyOptions options;
  options.head_dim = 64;
  testing::MakeTinyModel(options).Write(folder + "/model.gguf");
  SphericalProfile profile = testing::MakeProfile(2, 2, 64);
  profile.weights_hash = *HashWeights(folder + "/model.gguf");
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder + "/" + name) << text;
    return folder + "/" + name;
  };
  const auto load = [&](std::vector<std::string> files) {
    EngineConfig config;
    config.strategy_files = std::move(files);
    config.artifact_folder = folder + "/artifacts";
    return LoadModel(folder + "/model.gguf", config);
  };
  Strategy strategy = *testing::RandomStrategy(2, 2);
  strategy.head_dim = 64, strategy.weights_hash = profile.weights_hash;
  write("artifacts/m.polykv.json", StrategyToText(strategy, Json::object()));
  write("artifacts/m.spherical.json", ProfileToText(profile, Json::object()));
  const auto shipped = load({});
  ASSERT_TRUE(shipped.ok()) << shipped.status();
  EXPECT_EQ(shipped->artifacts.strategies.size(), 1u);
  ASSERT_EQ(shipped->artifacts.profiles.size(), 1u);
  EXPECT_EQ(shipped->artifacts.profiles[0]->name, "m.spherical");
  const auto given = load({write("mine.json", ProfileToText(profile, Json::object()))});
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_EQ(given->artifacts.strategies.size(), 1u);
  ASSERT_EQ(given->artifacts.profiles.size(), 1u);
  EXPECT_EQ(given->artifacts.profiles[0]->name, "mine");
  profile.weights_hash = "0123456789abcdef";
  const auto refused = load({write("other.json", ProfileToText(profile, Json::object()))});
  ASSERT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
  for (const char* word : {"other.json", "model.weights_hash", "0123456789abcdef"}) {
    EXPECT_NE(refused.status().message().find(word), absl::string_view::npos) << refused.status();
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace loupe
