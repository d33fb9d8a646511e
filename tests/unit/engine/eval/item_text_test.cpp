#include <filesystem>
#include <fstream>

#include "engine/eval/items.h"
#include "gtest/gtest.h"

namespace loupe {
namespace {

EvalItem Item(std::vector<std::string> answers, const std::string& scoring) {
  EvalItem item;
  item.context = "c", item.question = "q", item.answer_prefix = "Answer: it is", item.answers = std::move(answers), item.scoring = scoring;
  return item;
}

TEST(ScoreAnswer, NamesCountOnlyAsAWhole) {
  const EvalItem item = Item({"1234567"}, "contains_all");
  EXPECT_EQ(ScoreAnswer(item, " 1234567."), 1);
  EXPECT_EQ(ScoreAnswer(item, " 12345678"), 0);
  EXPECT_EQ(ScoreAnswer(item, "x1234567"), 0);
  EXPECT_EQ(ScoreAnswer(item, "91234567 or 1234567"), 1);
  EXPECT_EQ(ScoreAnswer(item, ""), 0);
}

TEST(ScoreAnswer, SeveralAnswers) {
  EXPECT_EQ(ScoreAnswer(Item({"12", "34", "56", "78"}, "contains_all"), "34 and 12"), 0.5);
  EXPECT_EQ(ScoreAnswer(Item({"Red Fox", "Otter"}, "contains_any"), "a red fox"), 1);
  EXPECT_EQ(ScoreAnswer(Item({"Red Fox", "Otter"}, "contains_any"), "a red foxglove"), 0);
}

TEST(ScoreAnswer, FirstWordAndCopiedWords) {
  EXPECT_EQ(ScoreAnswer(Item({"Elizabeth"}, "first_word"), " Elizabeth's sister"), 1);
  EXPECT_EQ(ScoreAnswer(Item({"Elizabeth"}, "first_word"), " Miss Elizabeth"), 0);
  EXPECT_EQ(ScoreAnswer(Item({"of a multitude of new"}, "lcp_words"), "of a multitude, of new"), 0.4);
}

TEST(GoldText, JoinsToWhatStandsBeforeIt) {
  EXPECT_EQ(GoldText(Item({"12", "34"}, "contains_all")), " 12, 34");
  EvalItem quoted = Item({"ab"}, "contains_all");
  quoted.answer_prefix = "the key: \"";
  EXPECT_EQ(GoldText(quoted), "ab");
}

class ReadItemsTest : public ::testing::Test {
 protected:
  ~ReadItemsTest() override { std::filesystem::remove(path_); }
  absl::StatusOr<std::vector<EvalItem>> Read(const std::string& text, int limit = 0) {
    std::ofstream(path_) << text;
    return ReadItems(path_, limit);
  }
  const std::string path_ = ::testing::TempDir() + "loupe_items_test.jsonl";
};

TEST_F(ReadItemsTest, LinesBecomeItems) {
  const std::string line = R"({"id":"a","task":"t","context":"c","question":"q","answer_prefix":"p","answers":["x"],"max_new_tokens":3})";
  const auto items = Read(line + "\n\n" + line + "\n");
  ASSERT_TRUE(items.ok()) << items.status().ToString();
  ASSERT_EQ(items->size(), 2u);
  EXPECT_EQ((*items)[0].scoring, "contains_all");
  EXPECT_EQ((*items)[0].group, "a");
  EXPECT_EQ((*items)[0].max_new_tokens, 3);
  EXPECT_EQ(Read(line + "\n" + line, 1)->size(), 1u);
}

TEST_F(ReadItemsTest, BadLinesAreRefusedByNumber) {
  const std::string good = R"({"id":"a","task":"t","context":"c","question":"q","answers":["x"]})";
  for (const std::string bad : {"{", R"({"id":"a"})", R"({"id":"a","task":"t","context":"","question":"q","answers":["x"]})",
                                R"({"id":"a","task":"t","context":"c","question":"q","answers":[]})",
                                R"({"id":"a","task":"t","context":"c","question":7,"answers":["x"]})",
                                R"({"id":"a","task":"t","context":"c","question":"q","answers":["x"],"max_new_tokens":-1})"}) {
    const auto items = Read(good + "\n" + bad + "\n");
    ASSERT_FALSE(items.ok()) << bad;
    EXPECT_NE(std::string(items.status().message()).find("line 2"), std::string::npos) << items.status().ToString();
  }
  EXPECT_FALSE(ReadItems("/does/not/exist", 0).ok());
  EXPECT_FALSE(Read("").ok());
}

}  // namespace
}  // namespace loupe
