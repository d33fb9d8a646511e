#include "engine/eval/result_file.h"

#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"

namespace loupe {
namespace {

class ResultFileTest : public ::testing::Test {
 protected:
  ResultFileTest() { std::filesystem::remove(path_); }
  ~ResultFileTest() override { std::filesystem::remove(path_); }
  void Append(const std::string& text) { std::ofstream(path_, std::ios::app) << text; }

  const std::string path_ = ::testing::TempDir() + "loupe_result_file_test.jsonl";
};

TEST_F(ResultFileTest, KeepsCellsAcrossRuns) {
  {
    auto file = ResultFile::Open(path_);
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    EXPECT_EQ(file->Find("a"), nullptr);
    ASSERT_TRUE(file->Add("a", {{"x", 1}}).ok());
    ASSERT_TRUE(file->Add("b|{\"q\":2}", {{"x", 2}}).ok());
  }
  auto file = ResultFile::Open(path_);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->size(), 2u);
  EXPECT_EQ((*file->Find("b|{\"q\":2}"))["x"], 2);
}

TEST_F(ResultFileTest, ALineThatWasCutOffIsDroppedAndWrittenAnew) {
  ASSERT_TRUE(ResultFile::Open(path_)->Add("a", 1).ok());
  Append(R"({"cell": "b", "res)");
  {
    auto file = ResultFile::Open(path_);
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    EXPECT_EQ(file->Find("b"), nullptr);
    ASSERT_TRUE(file->Add("b", 2).ok());
  }
  auto file = ResultFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_EQ(*file->Find("a"), 1);
  EXPECT_EQ(*file->Find("b"), 2);
}

TEST_F(ResultFileTest, AnotherFileIsRefusedWithTheLine) {
  ASSERT_TRUE(ResultFile::Open(path_)->Add("a", 1).ok());
  Append("{\"text\": 1}\n");
  const auto file = ResultFile::Open(path_);
  ASSERT_FALSE(file.ok());
  EXPECT_NE(std::string(file.status().message()).find("line 2"), std::string::npos) << file.status().ToString();
}

TEST_F(ResultFileTest, WithoutAPathNothingIsWritten) {
  auto file = ResultFile::Open("");
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(file->Add("a", 1).ok());
  EXPECT_EQ(*file->Find("a"), 1);
}

TEST_F(ResultFileTest, AFolderIsRefused) { EXPECT_FALSE(ResultFile::Open(::testing::TempDir()).ok()); }

}  // namespace
}  // namespace loupe
