// What holds for every policy: exact budgets, protected entries, order, chunks, decode forms, and clear refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/unit/kvcache/policies/policy_run.h"

namespace loupe {
namespace {

constexpr int kPrompt = 150;

KvOptions Options(std::string_view policy, KvBudget::Kind kind, double value) {
  KvOptions options;
  options.policy = std::string(policy);
  options.budget = {kind, value};
  return options;
}

bool Contains(const std::vector<int32_t>& sorted, int position) { return std::binary_search(sorted.begin(), sorted.end(), position); }

// Every policy that drops something, but for those that choose formats, whose tests are their own.
std::vector<const PolicyRow*> Droppers() {
  std::vector<const PolicyRow*> rows;
  for (const PolicyRow& row : AllPolicies()) {
    if (row.name != "full" && !row.chooses_formats) rows.push_back(&row);
  }
  return rows;
}

TEST(Policies, TokenBudgetsAreExactAndProtectedEntriesStay) {
  PolicyRun run({3, 6, 2, 16});
  const Rows rows = RandomRows(run.shape(), kPrompt, 1);
  for (const PolicyRow* row : Droppers()) {
    for (const int budget : {16, 17, 63, 64, 65, 149}) {
      SCOPED_TRACE(absl::StrCat(row->name, " ", budget));
      KvOptions options = Options(row->name, KvBudget::Kind::kTokens, budget);
      options.protect.sinks = 2;
      options.protect.recent = 3;
      options.protect.ranges = {{40, 45}, {100, 101}};
      const auto policy = run.Make(options, kPrompt);
      ASSERT_TRUE(policy.ok()) << policy.status();
      const SeqId seq = run.Prefill(**policy, rows, kPrompt, 64);
      int total = 0;
      for (const auto& layer : run.Kept(seq)) {
        int of_layer = 0;
        for (const std::vector<int32_t>& list : layer) {
          of_layer += static_cast<int>(list.size());
          const bool uneven = row->name == "adakv" || row->name == "pyramidkv" || row->name == "polykv";
          if (!uneven) EXPECT_EQ(list.size(), static_cast<size_t>(budget));
          EXPECT_EQ(std::set<int32_t>(list.begin(), list.end()).size(), list.size());
          for (const int p : {0, 1, 40, 44, 100, 147, 149}) EXPECT_TRUE(Contains(list, p)) << p;
        }
        if (row->name == "adakv") EXPECT_EQ(of_layer, 2 * budget);
        if (row->name == "tova") EXPECT_EQ(layer[0], layer[1]);
        total += of_layer;
      }
      EXPECT_LE(total, 3 * 2 * budget);
      if (row->name == "polykv") EXPECT_EQ(total, 3 * 2 * budget);
      EXPECT_EQ(run.cache().Report(seq).entries_dropped, 3 * 2 * kPrompt - total);
      run.cache().Close(seq);
    }
  }
}

TEST(Policies, BytesHoldPageSlackAndAreUsed) {
  PolicyRun run({4, 4, 4, 64});
  const int prompt = 1000;
  const Rows rows = RandomRows(run.shape(), prompt, 2);
  const PolicyContext context = run.cache().policy_context(prompt);
  const int64_t full = context.entry_bytes * context.num_lists() * prompt;
  for (const PolicyRow* row : Droppers()) {
    for (const double ratio : {0.5, 0.25, 0.1, 0.03}) {
      SCOPED_TRACE(absl::StrCat(row->name, " ", ratio));
      for (const bool absolute : {false, true}) {
        const KvOptions options = absolute ? Options(row->name, KvBudget::Kind::kBytes, std::floor(ratio * static_cast<double>(full)))
                                           : Options(row->name, KvBudget::Kind::kRatio, ratio);
        const auto policy = run.Make(options, prompt);
        ASSERT_TRUE(policy.ok()) << policy.status();
        const SeqId seq = run.Prefill(**policy, rows, prompt, 256);
        const KvSequenceReport report = run.cache().Report(seq);
        EXPECT_LE(static_cast<double>(report.prompt_device_bytes), ratio * static_cast<double>(full));
        // A list loses less than a page, one entry to the next token, and the pyramid what its layers lose each.
        EXPECT_GT(static_cast<double>(report.prompt_device_bytes),
                  ratio * static_cast<double>(full) - static_cast<double>(context.num_lists() * context.page_bytes));
        EXPECT_LE(report.device_bytes, (*policy)->MaxBytes(0));
        run.cache().Close(seq);
      }
    }
  }
}

TEST(Policies, ARatioOfOneNeverActs) {
  PolicyRun run({});
  for (const PolicyRow& row : AllPolicies()) {
    if (row.chooses_formats) continue;
    for (const double ratio : {1.0, 1.5}) {
      const auto policy = run.Make(Options(row.name, KvBudget::Kind::kRatio, ratio), kPrompt);
      ASSERT_TRUE(policy.ok()) << policy.status();
      EXPECT_TRUE((*policy)->keeps_everything()) << row.name;
      EXPECT_EQ((*policy)->decode_interval(), 0) << row.name;
    }
    EXPECT_TRUE((*run.Make(Options(row.name, KvBudget::Kind::kNone, 0), kPrompt))->keeps_everything()) << row.name;
  }
}

TEST(Policies, ChunksKeepTheSameEntries) {
  PolicyRun run({2, 6, 2, 32});
  const Rows rows = RandomRows(run.shape(), 300, 3);
  for (const PolicyRow* row : Droppers()) {
    const auto policy = run.Make(Options(row->name, KvBudget::Kind::kTokens, 70), 300);
    ASSERT_TRUE(policy.ok()) << policy.status();
    const SeqId whole = run.Prefill(**policy, rows, 300, 300);
    for (const int chunk : {1, 7, 16, 64, 128, 299}) {
      const SeqId seq = run.Prefill(**policy, rows, 300, chunk);
      EXPECT_EQ(run.Kept(seq), run.Kept(whole)) << row->name << " in chunks of " << chunk;
      run.cache().Close(seq);
    }
    run.cache().Close(whole);
  }
}

TEST(Policies, HeadsOfAGroupMayChangePlaces) {
  PolicyRun run({2, 6, 2, 16});
  const Rows rows = RandomRows(run.shape(), kPrompt, 4);
  Rows swapped = rows;
  for (std::vector<float>& q : swapped.q) {
    for (int row = 0; row < kPrompt; ++row) {
      for (int g = 0; g < 2; ++g) {
        const auto head = q.begin() + (row * 6 + g * 3) * 16;
        std::swap_ranges(head, head + 16, head + 32);
      }
    }
  }
  for (const PolicyRow* row : Droppers()) {
    const auto policy = run.Make(Options(row->name, KvBudget::Kind::kTokens, 40), kPrompt);
    const SeqId first = run.Prefill(**policy, rows, kPrompt, 64), second = run.Prefill(**policy, swapped, kPrompt, 64);
    EXPECT_EQ(run.Kept(first), run.Kept(second)) << row->name;
    run.cache().Close(first);
    run.cache().Close(second);
  }
}

TEST(Policies, DecodeFormsHoldTheBudget) {
  PolicyRun run({2, 4, 2, 16});
  const Rows rows = RandomRows(run.shape(), kPrompt + 200, 5);
  for (const PolicyRow* row : Droppers()) {
    for (const char* decode : {"evict", "append"}) {
      SCOPED_TRACE(absl::StrCat(row->name, " ", decode));
      KvOptions options = Options(row->name, KvBudget::Kind::kTokens, 48);
      options.params["decode"] = std::string(decode);
      options.protect.recent = 8;
      const auto policy = run.Make(options, kPrompt);
      ASSERT_TRUE(policy.ok()) << policy.status();
      const SeqId seq = run.Prefill(**policy, rows, kPrompt, 64);
      const auto at_prompt = run.Kept(seq);
      const bool evicts = std::string(decode) == "evict";
      EXPECT_EQ((*policy)->decode_interval() > 0, evicts);
      for (int i = 0; i < 200; ++i) {
        run.Step({seq, 0, 1, false}, rows, kPrompt + i);
        const auto kept = run.Kept(seq);
        const size_t overdue = evicts ? static_cast<size_t>((i + 1) % (*policy)->decode_interval()) : 0;
        size_t total = 0;
        for (size_t layer = 0; layer < kept.size(); ++layer) {
          size_t sum = 0;
          for (size_t g = 0; g < kept[layer].size(); ++g) {
            sum += kept[layer][g].size();
            if (!evicts) ASSERT_EQ(kept[layer][g].size(), at_prompt[layer][g].size() + static_cast<size_t>(i) + 1);
            for (int p = kPrompt + i; p > kPrompt + i - 8; --p) ASSERT_TRUE(Contains(kept[layer][g], p)) << p << " after " << i;
            for (const int p : {0, 1, 2, 3}) ASSERT_TRUE(Contains(kept[layer][g], p)) << p << " after " << i;
          }
          if (evicts && row->name != "pyramidkv" && row->name != "polykv") ASSERT_EQ(sum, 2 * (48 + overdue)) << "after " << i;
          total += sum;
          if (row->name == "tova") ASSERT_EQ(kept[layer][0], kept[layer][1]);
        }
        // Lists whose decode budget is above what the prompt left grow to it.
        if (evicts && row->name == "polykv") ASSERT_LE(total, 4 * (48 + overdue)) << "after " << i;
        ASSERT_LE(run.cache().Report(seq).device_bytes, (*policy)->MaxBytes(i + 1));
      }
      run.cache().Close(seq);
    }
  }
}

TEST(Policies, StreamingKeepsSinksAndTheLast) {
  PolicyRun run({1, 2, 1, 16});
  const Rows rows = RandomRows(run.shape(), kPrompt + 90, 6);
  const auto policy = run.Make(Options("streaming", KvBudget::Kind::kTokens, 40), kPrompt);
  const SeqId seq = run.Prefill(**policy, rows, kPrompt, kPrompt);
  for (int i = 0; i < 90; ++i) run.Step({seq, 0, 1, false}, rows, kPrompt + i);
  std::vector<int32_t> expected{0, 1, 2, 3};
  for (int p = kPrompt + 90 - 36; p < kPrompt + 90; ++p) expected.push_back(p);
  EXPECT_EQ(run.Kept(seq)[0][0], expected);
}

TEST(Policies, WhatCannotBeIsRefusedWithNumbers) {
  PolicyRun run({2, 4, 2, 16});
  const auto expect = [&](const KvOptions& options, std::initializer_list<const char*> parts) {
    const auto policy = run.Make(options, kPrompt);
    ASSERT_TRUE(absl::IsInvalidArgument(policy.status())) << policy.status();
    for (const char* part : parts) EXPECT_NE(policy.status().message().find(part), absl::string_view::npos) << part << " in " << policy.status();
  };
  using Kind = KvBudget::Kind;
  expect(Options("sekv", Kind::kNone, 0), {"kv.policy", "sekv", "snapkv"});
  expect(Options("full", Kind::kRatio, 0.5), {"kv.budget.ratio", "0.5", "full"});
  expect(Options("snapkv", Kind::kRatio, 0), {"kv.budget.ratio", "0"});
  expect(Options("snapkv", Kind::kRatio, -1), {"kv.budget.ratio", "-1"});
  expect(Options("snapkv", Kind::kRatio, NAN), {"kv.budget.ratio", "nan"});
  expect(Options("snapkv", Kind::kTokens, 0), {"kv.budget.tokens", "1"});
  expect(Options("snapkv", Kind::kTokens, 2.5), {"kv.budget.tokens", "2.5"});
  expect(Options("snapkv", Kind::kRatio, 0.1), {"kv.budget.ratio", "0.1", "7680", "8192"});  // 150 tokens: 15 entries a list
  expect(Options("snapkv", Kind::kBytes, 100), {"kv.budget.bytes", "100", "8192"});  // 4 lists, 16 entries of 128 bytes
  KvOptions options = Options("snapkv", Kind::kTokens, 20);
  options.protect.ranges = {{0, 30}};
  expect(options, {"kv.budget.tokens", "20", "35"});
  options.protect.ranges = {{100, 151}};
  expect(options, {"kv.protect.ranges", "[100, 151)", "150"});
  options.protect.ranges = {{7, 7}};
  expect(options, {"kv.protect.ranges", "[7, 7)"});
  options = Options("streaming", Kind::kTokens, 20);
  options.protect.recent = 17;
  expect(options, {"kv.budget.tokens", "20", "21"});
  options = Options("snapkv", Kind::kTokens, 20);
  options.params["windo"] = 4.0;
  expect(options, {"kv.params.windo", "snapkv", "window"});
  options.params = {{"window", 0.0}};
  expect(options, {"kv.params.window", "0", "1", "512"});
  options.params = {{"window", 1.5}};
  expect(options, {"kv.params.window", "1.5", "whole"});
  options.params = {{"pool", std::string("min")}};
  expect(options, {"kv.params.pool", "min", "avg, max"});
  options.params = {{"pool", 1.0}};
  expect(options, {"kv.params.pool", "avg, max"});
  options = Options("snapkv", Kind::kTokens, 20);
  options.strategy = "mine";
  expect(options, {"kv.strategy", "mine", "snapkv"});
  const auto baseline = MakePolicy(Options("random", Kind::kTokens, 20), run.cache().policy_context(kPrompt));
  EXPECT_NE(baseline.status().message().find("--allow-baselines"), absl::string_view::npos);
}

TEST(Policies, ParametersHaveDefaultsInRange) {
  for (const PolicyRow& row : AllPolicies()) {
    EXPECT_FALSE(row.summary.empty());
    for (const ParamSpec& spec : row.params) {
      SCOPED_TRACE(absl::StrCat(row.name, ".", spec.name));
      EXPECT_FALSE(spec.summary.empty());
      if (!spec.choices.empty()) {
        EXPECT_LT(static_cast<size_t>(spec.default_value), spec.choices.size());
      } else {
        EXPECT_TRUE(spec.min <= spec.default_value && spec.default_value <= spec.max && spec.min < spec.max);
      }
    }
  }
}

}  // namespace
}  // namespace loupe
