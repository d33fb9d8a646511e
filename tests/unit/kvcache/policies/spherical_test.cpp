// Policy spherical on a real cache: budgets hold, what is protected stays as it is, formats are those of the plan, generated
// tokens are coded page by page, and refusals have numbers.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "kvcache/page_format.h"
#include "tests/unit/kvcache/policies/policy_run.h"

namespace loupe {
namespace {

constexpr int kPrompt = 1000;
constexpr PolicyShape kShape{3, 4, 2, 64};

KvOptions Options(double ratio) {
  KvOptions options;
  options.policy = "spherical";
  if (ratio > 0) options.budget = {KvBudget::Kind::kRatio, ratio};
  return options;
}

class SphericalPolicy : public ::testing::Test {
 protected:
  SphericalPolicy() : run_(kShape), rows_(RandomRows(kShape, kPrompt + 300, 1)) {}
  int64_t full() { return run_.cache().policy_context(kPrompt).entry_bytes * kShape.layers * kShape.groups * kPrompt; }
  std::unique_ptr<Policy> Make(const KvOptions& options) {
    auto policy = run_.Make(options, kPrompt);
    EXPECT_TRUE(policy.ok()) << policy.status();
    return policy.ok() ? *std::move(policy) : nullptr;
  }
  // Entries of a list by the name of their format.
  std::map<std::string, int> Formats(SeqId seq, int layer, int group) {
    std::map<std::string, int> counts;
    for (const PageRef& page : run_.cache().ListPages(seq, layer, group)) {
      counts[page.key_codec == static_cast<int>(Codec::kF32) ? "dense" : FormatName(page.page_class().format)] += page.count;
    }
    return counts;
  }
  void ExpectRefused(const KvOptions& options, std::initializer_list<std::string> words) {
    const auto policy = run_.Make(options, kPrompt);
    ASSERT_TRUE(absl::IsInvalidArgument(policy.status())) << policy.status();
    for (const std::string& word : words) EXPECT_NE(policy.status().message().find(word), absl::string_view::npos) << word << " in " << policy.status();
  }

  PolicyRun run_;
  Rows rows_;
};

TEST_F(SphericalPolicy, BudgetsHoldWithPagesAndAreUsed) {
  for (const bool profile : {false, true}) {
    if (profile) run_.Use(testing::RandomProfile(kShape.layers, kShape.groups, kShape.dim));
    for (const char* retention : {"joint", "drop", "bits"}) {
      int64_t previous = std::numeric_limits<int64_t>::max();
      for (const double ratio : {0.9, 0.54, 0.27, 0.18, 0.125, 0.0625, 0.031}) {
        SCOPED_TRACE(absl::StrCat(retention, " ", ratio, profile ? " by a profile" : ""));
        KvOptions options = Options(ratio);
        options.params["retention"] = std::string(retention);
        const auto policy = run_.Make(options, kPrompt);
        if (std::string(retention) == "bits" && ratio < 0.1) {
          EXPECT_TRUE(absl::IsInvalidArgument(policy.status())) << policy.status();
          continue;
        }
        ASSERT_TRUE(policy.ok()) << policy.status();
        const SeqId seq = run_.Prefill(**policy, rows_, kPrompt, 256);
        const int64_t bytes = run_.cache().Report(seq).prompt_device_bytes;
        EXPECT_LE(static_cast<double>(bytes), ratio * static_cast<double>(full()));
        EXPECT_LE(bytes, previous);
        EXPECT_LE(run_.cache().Report(seq).device_bytes, (*policy)->MaxBytes(0));
        // Above 8 bits a list of six gets dense or not at all; bits alone cannot be had in small steps.
        if (profile && std::string(retention) == "joint" && ratio < 0.3) EXPECT_GT(static_cast<double>(bytes), 0.9 * ratio * static_cast<double>(full()));
        previous = bytes;
        run_.cache().Close(seq);
      }
    }
  }
}

TEST_F(SphericalPolicy, ProtectedEntriesStayInTheirFormat) {
  run_.Use(testing::RandomProfile(kShape.layers, kShape.groups, kShape.dim));
  for (const double ratio : {0.3, 0.08}) {
    for (const char* bits : {"auto", "16", "8"}) {
      SCOPED_TRACE(absl::StrCat(ratio, " ", bits));
      KvOptions options = Options(ratio);
      options.protect.sinks = 2, options.protect.recent = 20, options.protect.ranges = {{100, 130}};
      options.params["protected_bits"] = std::string(bits);
      const auto policy = Make(options);
      const SeqId seq = run_.Prefill(*policy, rows_, kPrompt, 300);
      const PageFormat landing = *policy->landing_format(false);
      if (std::string(bits) == "16") EXPECT_EQ(landing, run_.cache().dense_format());
      if (std::string(bits) == "8" || ratio < 0.1) EXPECT_TRUE(std::string(bits) == "16" || landing == (PageFormat{Codec::kS8, Codec::kS8}));
      for (int layer = 0; layer < kShape.layers; ++layer) {
        for (int g = 0; g < kShape.groups; ++g) {
          const std::vector<int32_t> positions = run_.cache().ListPositions(seq, layer, g);
          size_t at = 0;
          std::set<int32_t> seen;
          for (const PageRef& page : run_.cache().ListPages(seq, layer, g)) {
            for (int slot = 0; slot < page.count; ++slot, ++at) {
              const int p = positions[at];
              if (p >= 2 && p < kPrompt - 20 && (p < 100 || p >= 130)) continue;
              EXPECT_EQ(page.page_class().format, landing) << p;
              seen.insert(p);
            }
          }
          EXPECT_EQ(seen.size(), 52u);
        }
      }
      run_.cache().Close(seq);
    }
  }
}

TEST_F(SphericalPolicy, WithoutABudgetEverythingIsKeptAtTheBitsAskedFor) {
  for (const auto& [key, value, name] : {std::tuple{0, 0, "s4"}, {8, 8, "s8"}, {4, 2, "s4v2"}, {2, 2, "s2"}}) {
    KvOptions options = Options(0);
    options.bits = {key, value};
    const auto policy = Make(options);
    const SeqId seq = run_.Prefill(*policy, rows_, kPrompt, 512);
    EXPECT_EQ(Formats(seq, 1, 1), (std::map<std::string, int>{{name, kPrompt - 68}, {"dense", 68}}));
    EXPECT_EQ(run_.cache().Report(seq).entries_dropped, 0);
    run_.cache().Close(seq);
  }
}

TEST_F(SphericalPolicy, ARatioOfOneIsTheFullCache) {
  for (const double ratio : {1.0, 2.0}) EXPECT_TRUE(Make(Options(ratio))->keeps_everything());
  KvOptions options = Options(1);
  options.bits = {16, 16};
  EXPECT_TRUE(Make(options)->keeps_everything());
  EXPECT_EQ(Make(options)->decode_interval(), 0);
}

TEST_F(SphericalPolicy, GeneratedTokensAreCodedOnceTheyAreOld) {
  run_.Use(testing::RandomProfile(kShape.layers, kShape.groups, kShape.dim));
  for (const double ratio : {0.3, 0.06}) {
    const auto policy = Make(Options(ratio));
    const SeqId seq = run_.Prefill(*policy, rows_, kPrompt, 512);
    const std::map<std::string, int> before = Formats(seq, 0, 0);
    const std::string landing_name = *policy->landing_format(false) == run_.cache().dense_format() ? "dense" : "s8";
    for (int t = 0; t < 300; ++t) {
      run_.Step({seq, 0, 1, false}, rows_, kPrompt + t);
      EXPECT_LE(run_.cache().Report(seq).device_bytes, policy->MaxBytes(t + 1)) << t;
    }
    int landing = 0, total = 0;
    for (const auto& [name, count] : Formats(seq, 0, 0)) {
      total += count;
      if (name == landing_name) landing += count;
    }
    int kept = 0;
    for (const auto& [name, count] : before) kept += count;
    EXPECT_EQ(total, kept + 300);  // they come on top
    if (before.size() > 1) EXPECT_LT(landing, 68 + 64 + 16 + 1);  // else the list's own format is that of new entries
    run_.cache().Close(seq);
  }
}

TEST_F(SphericalPolicy, EvictHoldsTheBudgetForGeneratedTokens) {
  for (const bool profile : {false, true}) {
    if (profile) run_.Use(testing::RandomProfile(kShape.layers, kShape.groups, kShape.dim));
    for (const double ratio : {0.5, 0.2, 0.1}) {
      SCOPED_TRACE(absl::StrCat(ratio, profile ? " by a profile" : ""));
      KvOptions options = Options(ratio);
      options.params["decode"] = std::string("evict");
      options.protect.recent = 32;
      const auto policy = Make(options);
      const SeqId seq = run_.Prefill(*policy, rows_, kPrompt, 512);
      const int64_t lists = kShape.layers * kShape.groups, page = run_.cache().policy_context(kPrompt).page_bytes;
      int refreshes = 0;
      KvSequenceReport before = run_.cache().Report(seq);
      for (int t = 0; t < 300; ++t) {
        run_.Step({seq, 0, 1, false}, rows_, kPrompt + t);
        const KvSequenceReport report = run_.cache().Report(seq);
        EXPECT_LE(report.device_bytes, policy->MaxBytes(t + 1)) << t;
        // A tail may be a large page until the next refresh.
        ASSERT_LE(static_cast<double>(report.device_bytes), ratio * static_cast<double>(full()) + static_cast<double>(lists * page)) << t;
        refreshes += report.entries_dropped != before.entries_dropped;
        before = report;
        const std::vector<int32_t> positions = run_.cache().ListPositions(seq, 1, 0);
        const std::set<int32_t> there(positions.begin(), positions.end());
        for (int p = 0; p < 4; ++p) ASSERT_TRUE(there.count(p)) << "sink " << p;
        for (int p = kPrompt + t - 31; p <= kPrompt + t; ++p) ASSERT_TRUE(there.count(p)) << p << " of the last 32";
      }
      EXPECT_LT(refreshes, 300 / 16 * 2 / 3) << "pages have no rest";
      EXPECT_LE(static_cast<double>(run_.cache().Report(seq).device_bytes), ratio * static_cast<double>(full()) + static_cast<double>(lists * page));
      run_.cache().Close(seq);
    }
  }
}

// Short prompts leave no room for what comes between two refreshes: refused, not served without a limit.
TEST_F(SphericalPolicy, EvictRefusesWhatItCannotHold) {
  run_.Use(testing::RandomProfile(kShape.layers, kShape.groups, kShape.dim));
  for (const int prompt : {15, 16, 17, 40, 63, 64, 65, 130, 400}) {
    for (const double ratio : {0.05, 0.1, 0.3, 0.6, 0.9}) {
      KvOptions options = Options(ratio);
      options.params["decode"] = std::string("evict");
      const auto policy = run_.Make(options, prompt);
      const PolicyContext context = run_.cache().policy_context(prompt);
      const double budget = ratio * static_cast<double>(context.entry_bytes * context.num_lists() * prompt);
      if (!policy.ok()) {
        EXPECT_TRUE(absl::IsInvalidArgument(policy.status())) << policy.status();
        continue;
      }
      const SeqId seq = run_.Prefill(**policy, rows_, prompt, 64);
      EXPECT_LE(static_cast<double>(run_.cache().Report(seq).prompt_device_bytes), budget) << prompt << " " << ratio;
      run_.cache().Close(seq);
    }
  }
}

TEST_F(SphericalPolicy, OutliersStayAsProtectedOnesDo) {
  run_.Use(testing::RandomProfile(kShape.layers, kShape.groups, kShape.dim));
  const std::set<int32_t> longest = {100, 333, 640, 901};
  for (auto& layer : rows_.k) {
    for (const int32_t p : longest) {
      for (int i = 0; i < kShape.groups * kShape.dim; ++i) layer[static_cast<size_t>(p * kShape.groups * kShape.dim + i)] *= 9;
    }
  }
  for (const double ratio : {0.3, 0.08}) {
    for (const char* decode : {"append", "evict"}) {
      SCOPED_TRACE(absl::StrCat(ratio, " ", decode));
      KvOptions options = Options(ratio);
      options.params["outliers"] = 0.004;  // of 932: four
      options.params["decode"] = std::string(decode);
      const auto policy = Make(options);
      const PageFormat landing = *policy->landing_format(false);
      const SeqId seq = run_.Prefill(*policy, rows_, kPrompt, 512);
      EXPECT_LE(static_cast<double>(run_.cache().Report(seq).prompt_device_bytes), ratio * static_cast<double>(full()));
      std::set<std::pair<int, int>> all_alike;  // lists whose own format is that of new entries
      for (int i = 0; i < kShape.layers * kShape.groups; ++i) {
        if (Formats(seq, i / kShape.groups, i % kShape.groups).size() == 1) all_alike.insert({i / kShape.groups, i % kShape.groups});
      }
      for (int t = 0; t < 200; ++t) run_.Step({seq, 0, 1, false}, rows_, kPrompt + t);
      for (int layer = 0; layer < kShape.layers; ++layer) {
        for (int g = 0; g < kShape.groups; ++g) {
          const std::vector<int32_t> positions = run_.cache().ListPositions(seq, layer, g);
          std::set<int32_t> found;
          int others = 0;
          size_t at = 0;
          for (const PageRef& page : run_.cache().ListPages(seq, layer, g)) {
            for (int slot = 0; slot < page.count; ++slot, ++at) {
              const int32_t p = positions[at];
              if (page.page_class().format != landing || p < 4 || p >= kPrompt - 64) continue;
              longest.count(p) ? static_cast<void>(found.insert(p)) : static_cast<void>(++others);
            }
          }
          EXPECT_EQ(found, longest) << layer << " " << g;
          if (!all_alike.count({layer, g})) EXPECT_EQ(others, 0);
        }
      }
      run_.cache().Close(seq);
    }
  }
  KvOptions options = Options(0.3);
  options.params["outliers"] = 0.2;
  ExpectRefused(options, {"outliers", "0.2", "0.1"});
  options = Options(0.3);
  options.params["decode"] = std::string("evict"), options.params["retention"] = std::string("bits");
  ExpectRefused(options, {"decode", "bits"});
}

TEST_F(SphericalPolicy, ChunksAndPrefillInCodesKeepTheSame) {
  run_.Use(testing::RandomProfile(kShape.layers, kShape.groups, kShape.dim));
  const auto policy = Make(Options(0.1));
  const SeqId whole = run_.Prefill(*policy, rows_, kPrompt, 500);
  for (const int chunk : {100, 333}) {
    const SeqId seq = run_.Prefill(*policy, rows_, kPrompt, chunk);
    EXPECT_EQ(run_.Kept(seq), run_.Kept(whole)) << chunk;
    run_.cache().Close(seq);
  }
  KvOptions options = Options(0.1);
  options.params["prefill"] = std::string("coded");
  const auto coded = Make(options);
  const SeqId seq = run_.Prefill(*coded, rows_, kPrompt, 128);
  EXPECT_LE(run_.cache().Report(seq).prompt_device_bytes, full() / 10);
  EXPECT_LT(run_.cache().Report(seq).peak_device_bytes, run_.cache().Report(whole).peak_device_bytes / 2);
}

TEST_F(SphericalPolicy, RefusalsHaveNumbers) {
  ExpectRefused(Options(0.001), {"budget.ratio", "0.001", absl::StrCat(full() / 1000)});
  KvOptions options = Options(0.05);
  options.protect.ranges = {{0, 500}};
  ExpectRefused(options, {"budget.ratio", "0.05", "protected"});
  options = Options(0.1);
  options.params["retention"] = std::string("bits");
  options.floor.bits = 8;
  ExpectRefused(options, {"budget.ratio", "nothing"});
  options = Options(0);
  options.bits = {4, 4}, options.floor.bits = 8;
  ExpectRefused(options, {"floor.bits", "8", "4"});
  options = Options(0.2);
  options.strategy = "nobody";
  ExpectRefused(options, {"strategy", "nobody"});
  options = Options(0.2);
  options.params["retention"] = std::string("some");
  ExpectRefused(options, {"retention", "some", "joint"});
  PolicyRun small({2, 4, 2, 16});
  EXPECT_NE(small.Make(Options(0.2), 100).status().message().find("16"), absl::string_view::npos);
}

TEST_F(SphericalPolicy, TokensAreEntriesOfAllLists) {
  run_.Use(testing::RandomProfile(kShape.layers, kShape.groups, kShape.dim));
  KvOptions options = Options(0);
  options.budget = {KvBudget::Kind::kTokens, 200};
  const SeqId seq = run_.Prefill(*Make(options), rows_, kPrompt, 512);
  const int64_t kept = run_.cache().Report(seq).entries_kept;
  EXPECT_LE(kept, 200 * 6);
  EXPECT_GT(kept, 190 * 6);
  options.budget.value = 50;
  options.protect.recent = 60;
  ExpectRefused(options, {"budget.tokens", "50", "64 protected"});
}

}  // namespace
}  // namespace loupe
