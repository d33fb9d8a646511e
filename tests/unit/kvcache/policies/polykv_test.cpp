// A strategy decides, the primitives rank: what polykv keeps beside what they keep, budgets of every kind, and
// refusals.
#include <gtest/gtest.h>

#include <numeric>

#include "absl/strings/str_cat.h"
#include "tests/unit/kvcache/policies/policy_run.h"

namespace loupe {
namespace {

using testing::RandomStrategy;
using testing::UniformStrategy;
using Kind = KvBudget::Kind;

constexpr int kPrompt = 211;

KvOptions Options(const std::string& policy, Kind kind, double value) {
  KvOptions options;
  options.policy = policy;
  options.budget = {kind, value};
  return options;
}

class PolyKvTest : public ::testing::Test {
 protected:
  // What a policy holds at the end of the prompt, and after `generated` more tokens.
  std::vector<std::vector<std::vector<int32_t>>> Run(const KvOptions& options, int generated = 0) {
    const auto policy = run_.Make(options, kPrompt);
    EXPECT_TRUE(policy.ok()) << policy.status();
    const SeqId seq = run_.Prefill(**policy, rows_, kPrompt, 64);
    EXPECT_LE(run_.cache().Report(seq).device_bytes,
              (*policy)->keeps_everything() ? INT64_MAX : (*policy)->MaxBytes(0));
    for (int i = 0; i < generated; ++i) run_.Step({seq, 0, 1, false}, rows_, kPrompt + i);
    auto kept = run_.Kept(seq);
    run_.cache().Close(seq);
    return kept;
  }

  PolicyRun run_{{3, 4, 2, 16}};
  const Rows rows_ = RandomRows({3, 4, 2, 16}, kPrompt + 150, 7);
};

TEST_F(PolyKvTest, AUniformStrategyIsThePrimitive) {
  for (const PolicyRow& row : AllPolicies()) {
    if (row.make_scorer == nullptr || row.baseline) continue;
    run_.Use(UniformStrategy(3, 2, row.name));
    for (const auto& [kind, value] : {std::pair{Kind::kTokens, 40.0},
                                      {Kind::kTokens, 128.0},
                                      {Kind::kRatio, 0.5},
                                      {Kind::kRatio, 0.31},
                                      {Kind::kBytes, 6 * 4096.0},
                                      {Kind::kTokens, 211.0}}) {
      for (const char* decode : {"append", "evict"}) {
        SCOPED_TRACE(absl::StrCat(row.name, " ", value, " ", decode));
        KvOptions plain = Options(row.name, kind, value), poly = Options("polykv", kind, value);
        plain.params["decode"] = poly.params["decode"] = std::string(decode);
        EXPECT_EQ(Run(plain, 90), Run(poly, 90));
      }
    }
  }
}

TEST_F(PolyKvTest, EveryListKeepsItsOwnAndTheSumIsExact) {
  const auto strategy = RandomStrategy(3, 2, 5);
  run_.Use(strategy);
  for (const int mean : {20, 24, 63, 64, 100, 150, 210}) {
    KvOptions options = Options("polykv", Kind::kTokens, mean);
    options.protect.recent = 5;
    const auto kept = Run(options);
    size_t total = 0;
    for (size_t layer = 0; layer < 3; ++layer) {
      for (size_t g = 0; g < 2; ++g) {
        const auto& list = kept[layer][g];
        total += list.size();
        EXPECT_GE(list.size(), 9u);
        EXPECT_LE(list.size(), static_cast<size_t>(kPrompt));
        // The primitive that the strategy names, with as many entries.
        const StrategyShares shares = SharesAt(strategy->budgets, false, mean);
        KvOptions plain = Options(strategy->patterns[static_cast<size_t>(shares.patterns[layer * 2 + g])].policy,
                                  Kind::kTokens, static_cast<double>(list.size()));
        plain.protect.recent = 5;
        EXPECT_EQ(Run(plain)[layer][g], list) << plain.policy << " " << layer << " " << g;
      }
    }
    EXPECT_EQ(total, static_cast<size_t>(6 * mean));
  }
}

TEST_F(PolyKvTest, PermutedLayersPermuteTheSets) {
  const auto strategy = RandomStrategy(3, 2, 9);
  run_.Use(strategy);
  const auto kept = Run(Options("polykv", Kind::kTokens, 60));
  // Layer l of the permuted run has the data and the choices of layer (l + 1) % 3.
  Strategy permuted = *strategy;
  for (size_t i = 0; i < permuted.budgets.size(); ++i) {
    const StrategyPhase from = permuted.budgets[i].prefill;
    StrategyPhase& to = permuted.budgets[i].prefill;
    for (size_t list = 0; list < 6; ++list) {
      to.patterns[list] = from.patterns[(list + 2) % 6];
      to.entries[list] = from.entries[(list + 2) % 6];
    }
  }
  PolicyRun other({3, 4, 2, 16});
  other.Use(std::make_shared<const Strategy>(permuted));
  Rows rows = rows_;
  for (auto* values : {&rows.q, &rows.k}) std::rotate(values->begin(), values->begin() + 1, values->end());
  const auto policy = other.Make(Options("polykv", Kind::kTokens, 60), kPrompt);
  const SeqId seq = other.Prefill(**policy, rows, kPrompt, 64);
  const auto moved = other.Kept(seq);
  for (size_t layer = 0; layer < 3; ++layer) EXPECT_EQ(moved[layer], kept[(layer + 1) % 3]) << layer;
  other.cache().Close(seq);
}

TEST_F(PolyKvTest, ABudgetOfTheWholePromptNeverActs) {
  for (const auto& [kind, value] :
       {std::pair{Kind::kTokens, 211.0}, {Kind::kTokens, 500.0}, {Kind::kRatio, 1.0}, {Kind::kNone, 0.0}}) {
    EXPECT_TRUE((*run_.Make(Options("polykv", kind, value), kPrompt))->keeps_everything()) << value;
  }
  KvOptions evict = Options("polykv", Kind::kTokens, 300);
  evict.params["decode"] = std::string("evict");
  for (const auto& layer : Run(evict)) {
    for (const auto& list : layer) EXPECT_EQ(list.size(), static_cast<size_t>(kPrompt));
  }
}

TEST_F(PolyKvTest, WhatCannotBeIsRefused) {
  const auto expect = [&](const absl::Status& status, std::initializer_list<const char*> parts) {
    ASSERT_TRUE(absl::IsInvalidArgument(status)) << status;
    for (const char* part : parts)
      EXPECT_NE(status.message().find(part), absl::string_view::npos) << part << " in " << status;
  };
  KvOptions options = Options("polykv", Kind::kTokens, 60);
  expect(MakePolicy(options, run_.cache().policy_context(kPrompt)).status(),
         {"kv.policy", "loupe calibrate polykv", "--strategy FILE"});
  options.strategy = "other";
  expect(run_.Make(options, kPrompt).status(), {"kv.strategy", "other", "test"});
  options.strategy = "test";
  EXPECT_TRUE(run_.Make(options, kPrompt).ok());
  options.protect.ranges = {{0, 70}};
  expect(run_.Make(options, kPrompt).status(), {"kv.budget.tokens", "60", "protected"});
}

TEST(Strategies, SharesAreInterpolatedAndPatternsAreNot) {
  const StrategyPhase low{{0, 1}, {50, 150}}, high{{1, 0}, {400, 400}};
  const std::vector<StrategyBudget> budgets{{100, low, high}, {400, high, low}};
  EXPECT_EQ(SharesAt(budgets, false, 100).entries, (std::vector<double>{50, 150}));
  EXPECT_EQ(SharesAt(budgets, false, 200).patterns, high.patterns);
  EXPECT_EQ(SharesAt(budgets, false, 199).patterns, low.patterns);
  EXPECT_EQ(SharesAt(budgets, true, 199).patterns, high.patterns);
  const StrategyShares between = SharesAt(budgets, false, 250);
  EXPECT_DOUBLE_EQ(between.entries[0], 225);
  EXPECT_DOUBLE_EQ(between.entries[1], 275);
  EXPECT_EQ(SharesAt(budgets, false, 50).entries, (std::vector<double>{25, 75}));
  EXPECT_EQ(SharesAt(budgets, false, 800).entries, (std::vector<double>{800, 800}));
}

TEST(Strategies, WholeSharesSumExactlyWithinTheirLimits) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 2000; ++trial) {
    const int lists = 1 + static_cast<int>(random() % 97);
    const int least = 1 + static_cast<int>(random() % 20), most = least + static_cast<int>(random() % 500);
    std::vector<double> wanted;
    for (int i = 0; i < lists; ++i) wanted.push_back(0.5 + static_cast<double>(random() % 10000) / 17);
    const int64_t total =
        int64_t{lists} * least + static_cast<int64_t>(random() % static_cast<unsigned>(lists * (most - least) + 1));
    const std::vector<int> shares = ShareEntries(wanted, total, least, most);
    EXPECT_EQ(std::accumulate(shares.begin(), shares.end(), int64_t{0}), total);
    for (const int share : shares) EXPECT_TRUE(share >= least && share <= most) << share;
    for (size_t i = 0; i < shares.size(); ++i) {
      for (size_t k = 0; k < shares.size(); ++k) EXPECT_FALSE(wanted[i] < wanted[k] && shares[i] > shares[k] + 1);
    }
  }
  // Whoever wants more than there is gets what there is.
  EXPECT_EQ(ShareEntries(std::vector<double>{10, 1000}, 120, 1, 100), (std::vector<int>{20, 100}));
  EXPECT_EQ(ShareEntries(std::vector<double>{1, 1, 1}, 10, 1, 10), (std::vector<int>{4, 3, 3}));
}

TEST(Strategies, SharesInBytesFillPages) {
  PolicyContext context;
  context.num_layers = 10, context.num_kv_heads = 3, context.entry_bytes = 256;
  context.page_bytes = 64 * 256, context.small_page_bytes = 16 * 256;
  std::mt19937 random(4);
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<double> wanted;
    for (int i = 0; i < 30; ++i) wanted.push_back(1 + static_cast<double>(random() % 400));
    const int least = 1 + static_cast<int>(random() % 40);
    const int64_t bytes = 30 * context.ListBytes(least) + static_cast<int64_t>(random() % 3000000);
    const std::vector<int> lengths = ShareBytes(wanted, bytes, least, 2000, context);
    int64_t used = 0;
    for (const int length : lengths) {
      EXPECT_GE(length, least);
      used += context.ListBytes(length);
    }
    EXPECT_LE(used, bytes);
    EXPECT_GT(used, bytes - 4 * context.page_bytes) << "room is left";
  }
}

}  // namespace
}  // namespace loupe
