// Any policy with fewer bits: budgets in coded bytes, protection, what is coded when, prompts that are coded as they come,
// faults, and what is refused.
#include "kvcache/policies/coded.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "kvcache/page_format.h"
#include "kvcache/policies/sorted_view.h"
#include "tests/unit/kvcache/policies/policy_run.h"

namespace loupe {
namespace {

constexpr int kPrompt = 500;
constexpr PageFormat kS8{Codec::kS8, Codec::kS8}, kS4{Codec::kS4, Codec::kS4}, kS2{Codec::kS2, Codec::kS2};

KvOptions Options(std::string_view policy, int bits, KvBudget budget = {}) {
  KvOptions options;
  options.policy = std::string(policy);
  options.bits = {bits, bits};
  options.budget = budget;
  return options;
}

// Format of every position that a list holds.
std::map<int, PageFormat> FormatsByPosition(const KvCache& cache, SeqId seq, int layer, int kv_head) {
  std::map<int, PageFormat> formats;
  const std::vector<int32_t> positions = cache.ListPositions(seq, layer, kv_head);
  size_t entry = 0;
  for (const PageRef& page : cache.ListPages(seq, layer, kv_head)) {
    for (int slot = 0; slot < page.count; ++slot) formats[positions.at(entry++)] = page.page_class().format;
  }
  EXPECT_EQ(entry, positions.size());
  return formats;
}

TEST(Coded, BudgetsCountCodedBytesAndAreUsed) {
  PolicyRun run({2, 4, 2, 64});
  const Rows rows = RandomRows(run.shape(), kPrompt, 1);
  const PolicyContext context = run.cache().policy_context(kPrompt);
  const double full = static_cast<double>(context.entry_bytes * context.num_lists() * kPrompt);
  for (const PolicyRow& row : AllPolicies()) {
    if (row.name == "full") continue;
    for (const int bits : {8, 4, 2}) {
      int64_t fewer = 0;
      for (const double ratio : {0.05, 0.1, 0.2, 0.5}) {
        SCOPED_TRACE(absl::StrCat(row.name, " ", bits, " bits ", ratio));
        const auto policy = run.Make(Options(row.name, bits, {KvBudget::Kind::kRatio, ratio}), kPrompt);
        ASSERT_TRUE(policy.ok()) << policy.status();
        EXPECT_EQ((*policy)->name(), row.name);
        const SeqId seq = run.Prefill(**policy, rows, kPrompt, 128);
        const KvSequenceReport report = run.cache().Report(seq);
        EXPECT_LE(static_cast<double>(report.prompt_device_bytes), ratio * full);
        EXPECT_LE(report.device_bytes, (*policy)->MaxBytes(0));
        EXPECT_GE(report.entries_kept, fewer) << "a larger budget keeps fewer entries";
        fewer = report.entries_kept;
        // A list loses less than two tails, and the pyramid what its layers lose each.
        if (report.entries_kept < context.num_lists() * kPrompt) {
          const int64_t tails = context.RunBytes(kS8, 1) + context.RunBytes(context.dense, 1) + context.RunBytes(kS8, 64);
          EXPECT_GT(static_cast<double>(report.prompt_device_bytes), ratio * full - static_cast<double>(context.num_lists() * tails));
        }
        EXPECT_LE(report.entries_kept + report.entries_dropped, context.num_lists() * kPrompt);
        run.cache().Close(seq);
      }
    }
  }
}

TEST(Coded, MoreEntriesFitThanDenseOnes) {
  PolicyRun run({2, 4, 2, 64});
  const Rows rows = RandomRows(run.shape(), kPrompt, 1);
  for (const PolicyRow& row : AllPolicies()) {
    if (row.name == "full") continue;
    int64_t before = 0;
    for (const int bits : {16, 8, 4, 2}) {
      const auto policy = run.Make(Options(row.name, bits, {KvBudget::Kind::kRatio, 0.1}), kPrompt);
      ASSERT_TRUE(policy.ok()) << policy.status();
      const SeqId seq = run.Prefill(**policy, rows, kPrompt, 128);
      const int64_t kept = run.cache().Report(seq).entries_kept;
      EXPECT_GT(kept, before * 5 / 4) << row.name << " with " << bits << " bits";
      before = kept;
      run.cache().Close(seq);
    }
  }
}

TEST(Coded, ProtectedEntriesAreDenseAndAllOthersCoded) {
  PolicyRun run({2, 4, 2, 64});
  const Rows rows = RandomRows(run.shape(), kPrompt + 200, 2);
  for (const PolicyRow& row : AllPolicies()) {
    for (const char* protected_bits : {"16", "8"}) {
      SCOPED_TRACE(absl::StrCat(row.name, " protected ", protected_bits));
      KvOptions options = Options(row.name, 4, {row.name == "full" ? KvBudget::Kind::kNone : KvBudget::Kind::kTokens, 200});
      options.bits.value = 2;
      options.protect = {.sinks = 3, .recent = 20, .ranges = {{50, 60}}, .messages = {}, .roles = {}};
      options.params["protected_bits"] = std::string(protected_bits);
      const auto policy = run.Make(options, kPrompt);
      ASSERT_TRUE(policy.ok()) << policy.status();
      const SeqId seq = run.Prefill(**policy, rows, kPrompt, 128);
      const PageFormat landing = std::string(protected_bits) == "8" ? kS8 : run.cache().dense_format();
      const PageFormat coded{Codec::kS4, Codec::kS2};
      const auto is_protected = [](int p, int tokens) { return p < 3 || (p >= 50 && p < 60) || p >= tokens - 20; };
      const auto check = [&](int tokens, bool at_once) {
        for (int list = 0; list < 4; ++list) {
          int waiting = 0;
          for (const auto& [position, format] : FormatsByPosition(run.cache(), seq, list / 2, list % 2)) {
            if (is_protected(position, tokens)) {
              EXPECT_TRUE(format == landing) << position << " is " << FormatName(format);
            } else if (format != coded) {
              EXPECT_TRUE(format == landing) << position << " is " << FormatName(format);
              ++waiting;
            }
          }
          const int interval = (*policy)->decode_interval();
          EXPECT_LT(waiting, at_once ? 1 : std::max(kCodeBatch + kCodeInterval, interval)) << "list " << list << " at " << tokens;
        }
      };
      check(kPrompt, true);
      const KvSequenceReport at_prompt = run.cache().Report(seq);
      for (int i = 0; i < 200; ++i) {
        run.Step({seq, 0, 1, false}, rows, kPrompt + i);
        if (i % 7 == 0) check(kPrompt + i + 1, false);
        ASSERT_LE(run.cache().Report(seq).device_bytes, (*policy)->MaxBytes(i + 1)) << "after " << i + 1;
      }
      EXPECT_GE(run.cache().Report(seq).entries_kept, at_prompt.entries_kept) << "nothing came";
      run.cache().Close(seq);
    }
  }
}

TEST(Coded, EvictFormsHoldTheirBytes) {
  PolicyRun run({2, 4, 2, 64});
  const Rows rows = RandomRows(run.shape(), kPrompt + 200, 3);
  const PolicyContext context = run.cache().policy_context(kPrompt);
  const double full = static_cast<double>(context.entry_bytes * context.num_lists() * kPrompt);
  for (const PolicyRow& row : AllPolicies()) {
    if (row.name == "full") continue;
    SCOPED_TRACE(row.name);
    KvOptions options = Options(row.name, 4, {KvBudget::Kind::kRatio, 0.15});
    options.params["decode"] = std::string("evict");
    const auto policy = run.Make(options, kPrompt);
    ASSERT_TRUE(policy.ok()) << policy.status();
    EXPECT_GT((*policy)->decode_interval(), 1) << "a slot of a coded page was overwritten";
    const SeqId seq = run.Prefill(**policy, rows, kPrompt, 128);
    for (int i = 0; i < 200; ++i) {
      run.Step({seq, 0, 1, false}, rows, kPrompt + i);
      // A tail may be a large page until the next cut.
      const int64_t slack = context.num_lists() * context.page_bytes;
      ASSERT_LE(static_cast<double>(run.cache().Report(seq).device_bytes), 0.15 * full + static_cast<double>(slack)) << "after " << i + 1;
      ASSERT_LE(run.cache().Report(seq).device_bytes, (*policy)->MaxBytes(i + 1));
    }
    EXPECT_GT(run.cache().Report(seq).entries_dropped, context.num_lists() * 100);
    run.cache().Close(seq);
  }
}

// After a preemption generated tokens come back many at a time, into other pages than those they came to one by one.
void ExpectRowsSeeTheSameTogether(PolicyRun& run, const Rows& rows, int prompt, int generated, const KvOptions& options) {
  const auto made = run.Make(options, prompt);
  ASSERT_TRUE(made.ok()) << made.status();
  const SeqId alone = run.Prefill(**made, rows, prompt, 64), together = run.Prefill(**made, rows, prompt, 64);
  for (int at = prompt, n = 0; at < prompt + generated; at += n) {
    n = std::min({7, prompt + generated - at, kCodeInterval - (at - prompt) % kCodeInterval});
    std::vector<float> one_by_one;
    for (int i = 0; i < n; ++i) {
      const std::vector<float> out = run.Step({alone, 0, 1, false}, rows, at + i);
      one_by_one.insert(one_by_one.end(), out.begin(), out.end());
    }
    EXPECT_EQ(run.Step({together, 0, n, false}, rows, at), one_by_one) << "from token " << at << " on";
  }
  run.cache().Close(alone), run.cache().Close(together);
}

TEST(Coded, RowsThatComeTogetherSeeWhatTheySawAlone) {
  constexpr int kGenerated = 50;
  PolicyRun run({2, 4, 2, 64});
  const Rows rows = RandomRows(run.shape(), 400 + kGenerated, 9);
  for (const int prompt : {180, 400}) {
    // 97 entries leave three small pages behind a full one, 225 behind three.
    for (const int tokens : {0, 97, prompt == 180 ? 100 : 225}) {
      const KvBudget budget = tokens > 0 ? KvBudget{KvBudget::Kind::kTokens, static_cast<double>(tokens)} : KvBudget{};
      for (const int recent : {0, 13, 64}) {
        for (const char* protected_bits : {"dense", "16", "8"}) {
          KvOptions options = Options(tokens > 0 ? "snapkv" : "full", protected_bits == std::string("dense") ? 16 : 4, budget);
          SCOPED_TRACE(absl::StrCat(prompt, " tokens, budget ", tokens, ", recent ", recent, ", protected ", protected_bits));
          options.protect.recent = recent;
          if (options.bits.key == 4) options.params["protected_bits"] = std::string(protected_bits);
          ExpectRowsSeeTheSameTogether(run, rows, prompt, kGenerated, options);
        }
      }
    }
  }
}

TEST(Coded, SixteenBitsAreTheDensePolicy) {
  PolicyRun run({2, 4, 2, 64});
  const Rows rows = RandomRows(run.shape(), kPrompt, 4);
  const auto dense = run.Make(Options("snapkv", 0, {KvBudget::Kind::kTokens, 100}), kPrompt);
  const auto sixteen = run.Make(Options("snapkv", 16, {KvBudget::Kind::kTokens, 100}), kPrompt);
  const SeqId a = run.Prefill(**dense, rows, kPrompt, 128), b = run.Prefill(**sixteen, rows, kPrompt, 128);
  EXPECT_EQ(run.Kept(a), run.Kept(b));
  EXPECT_EQ(run.cache().Report(a).device_bytes, run.cache().Report(b).device_bytes);
  EXPECT_TRUE((*run.Make(Options("full", 16), kPrompt))->keeps_everything());
}

TEST(Coded, ChunksOfADensePromptKeepTheSame) {
  PolicyRun run({2, 4, 2, 64});
  const Rows rows = RandomRows(run.shape(), kPrompt, 5);
  for (const PolicyRow& row : AllPolicies()) {
    const KvBudget budget{row.name == "full" ? KvBudget::Kind::kNone : KvBudget::Kind::kRatio, 0.1};
    const auto policy = run.Make(Options(row.name, 4, budget), kPrompt);
    ASSERT_TRUE(policy.ok()) << policy.status();
    const SeqId whole = run.Prefill(**policy, rows, kPrompt, kPrompt), parts = run.Prefill(**policy, rows, kPrompt, 77);
    EXPECT_EQ(run.Kept(whole), run.Kept(parts)) << row.name;
    EXPECT_EQ(run.cache().Report(whole).device_bytes, run.cache().Report(parts).device_bytes) << row.name;
    run.cache().Close(whole);
    run.cache().Close(parts);
  }
}

TEST(Coded, APromptThatIsCodedAsItComesIsNeverDense) {
  PolicyRun run({2, 4, 2, 64});
  const Rows rows = RandomRows(run.shape(), kPrompt, 6);
  for (const PolicyRow& row : AllPolicies()) {
    SCOPED_TRACE(row.name);
    KvOptions options = Options(row.name, 4, {row.name == "full" ? KvBudget::Kind::kNone : KvBudget::Kind::kRatio, 0.1});
    const auto dense_first = run.Make(options, kPrompt);
    options.params["prefill"] = std::string("coded");
    const auto policy = run.Make(options, kPrompt);
    ASSERT_TRUE(policy.ok()) << policy.status();
    const SeqId seq = run.cache().Open(**policy).value(), other = run.Prefill(**dense_first, rows, kPrompt, 64);
    for (int at = 0; at < kPrompt; at += 64) {
      const int n = std::min(64, kPrompt - at);
      run.Step({seq, n, 0, at + n == kPrompt}, rows, at);
      for (const KvFormatUse& use : run.cache().Report(seq).formats) EXPECT_TRUE(use.format == kS8 || use.format == kS4);
      if (at + n < kPrompt) EXPECT_LE(run.cache().Report(seq).device_bytes, (*policy)->MaxPromptBytes());
    }
    const KvSequenceReport coded = run.cache().Report(seq), dense = run.cache().Report(other);
    EXPECT_LT(coded.peak_device_bytes, dense.peak_device_bytes / 3);
    EXPECT_EQ(coded.entries_kept + coded.entries_dropped, 4 * kPrompt);
    run.cache().Close(seq);
    run.cache().Close(other);
  }
}

TEST(Coded, ReportsSayWhatIsStoredAndRead) {
  PolicyRun run({2, 4, 2, 64});
  const Rows rows = RandomRows(run.shape(), kPrompt, 7);
  KvOptions options = Options("full", 4);
  options.bits.value = 2;
  options.protect.recent = 60;
  const auto policy = run.Make(options, kPrompt);
  const SeqId seq = run.Prefill(**policy, rows, kPrompt, 128);
  const KvSequenceReport report = run.cache().Report(seq);
  ASSERT_EQ(report.formats.size(), 2u);
  EXPECT_EQ(FormatName(report.formats[0].format), "s4v2");
  EXPECT_EQ(report.formats[0].entries, 4 * (kPrompt - 64));
  EXPECT_EQ(report.formats[0].read_bytes_per_token, 4 * (kPrompt - 64) * (32 + 2 + 16 + 2));
  EXPECT_EQ(report.formats[1].entries, 4 * 64);
  EXPECT_EQ(report.read_bytes_per_token, report.formats[0].read_bytes_per_token + 4 * 64 * 512);
  EXPECT_NEAR(report.key_bits, (436 * 4.25 + 64 * 32) / 500, 1e-9);
  EXPECT_NEAR(report.value_bits, (436 * 2.25 + 64 * 32) / 500, 1e-9);
}

TEST(Coded, AValueThatIsNotFiniteIsFoundAndNobodyElse) {
  PolicyRun run({2, 4, 2, 64});
  const Rows rows = RandomRows(run.shape(), kPrompt, 8);
  Rows broken = rows;
  broken.k[1][static_cast<size_t>(300 * 2 * 64 + 70)] = std::numeric_limits<float>::quiet_NaN();
  for (const char* prefill : {"dense", "coded"}) {
    KvOptions options = Options("full", 4);
    options.params["prefill"] = std::string(prefill);
    const auto policy = run.Make(options, kPrompt);
    const int64_t before = run.cache().Stats().encode_faults;
    const SeqId good = run.Prefill(**policy, rows, kPrompt, 128);
    EXPECT_TRUE(run.TakeFaults().empty());
    const SeqId bad = run.Prefill(**policy, broken, kPrompt, 128), third = run.Prefill(FullPolicy(), broken, kPrompt, 128);
    EXPECT_EQ(run.TakeFaults(), std::vector<SeqId>{bad}) << prefill;
    EXPECT_GT(run.cache().Stats().encode_faults, before);
    EXPECT_TRUE(run.TakeFaults().empty()) << "a fault is told once";
    for (const SeqId seq : {good, bad, third}) run.cache().Close(seq);
    run.cache().Audit();
    EXPECT_EQ(run.cache().Stats().resident_bytes, 0);
  }
}

TEST(Coded, WhatCannotBeIsRefusedWithNumbers) {
  PolicyRun run({2, 4, 2, 64});
  const auto expect = [&](const PolicyRun& where, const KvOptions& options, std::initializer_list<const char*> parts) {
    const auto policy = where.Make(options, kPrompt);
    ASSERT_TRUE(absl::IsInvalidArgument(policy.status())) << policy.status();
    for (const char* part : parts) EXPECT_NE(policy.status().message().find(part), absl::string_view::npos) << part << " in " << policy.status();
  };
  expect(run, Options("full", 5), {"kv.bits.key", "5", "16, 8, 4, 3, 2"});
  KvOptions options = Options("full", 16);
  options.params["prefill"] = std::string("coded");
  expect(run, options, {"kv.params.prefill", "16"});
  options = Options("full", 4);
  options.params["prefill"] = std::string("soon");
  expect(run, options, {"kv.params.prefill", "soon", "dense, coded"});
  options.params = {{"prefill", std::string("coded")}, {"protected_bits", 16.0}};
  expect(run, options, {"kv.params.protected_bits", "16", "8"});
  options.params = {{"protected_bits", 4.0}};
  expect(run, options, {"kv.params.protected_bits", "4", "16, 8"});
  options = Options("full", 4);
  options.floor.bits = 8;
  expect(run, options, {"kv.floor.bits", "8", "4"});
  options = Options("snapkv", 4, {KvBudget::Kind::kRatio, 0.1});
  options.floor.ratio = 0.2;
  expect(run, options, {"kv.floor.ratio", "0.2", "0.1"});
  options.floor.ratio = 0;
  options.protect.ranges = {{0, 400}};
  expect(run, options, {"kv.budget.ratio", "0.1", "protected", "bytes"});
  expect(run, Options("full", 4, {KvBudget::Kind::kRatio, 0.1}), {"kv.budget.ratio", "0.1", "full"});
  EXPECT_TRUE(run.Make(Options("full", 4, {KvBudget::Kind::kRatio, 0.5}), kPrompt).ok()) << "all of it fits in 4 bits";
  PolicyRun odd({2, 4, 2, 48});
  expect(odd, Options("full", 4), {"kv.bits", "48", "64"});
}

TEST(Coded, LayersWithAWindowStayDense) {
  PolicyRun run({2, 4, 2, 64, {100, 0}});
  const Rows rows = RandomRows(run.shape(), kPrompt + 100, 9);
  for (const char* prefill : {"dense", "coded"}) {
    KvOptions options = Options("snapkv", 4, {KvBudget::Kind::kTokens, 200});
    options.params["prefill"] = std::string(prefill);
    const auto policy = run.Make(options, kPrompt);
    ASSERT_TRUE(policy.ok()) << policy.status();
    const SeqId seq = run.Prefill(**policy, rows, kPrompt, 128);
    for (int i = 0; i < 100; ++i) run.Step({seq, 0, 1, false}, rows, kPrompt + i);
    for (int list = 0; list < 4; ++list) {
      int coded = 0;
      for (const auto& [position, format] : FormatsByPosition(run.cache(), seq, list / 2, list % 2)) coded += format == kS4 ? 1 : 0;
      EXPECT_EQ(coded > 0, list / 2 == 1) << "layer " << list / 2;
      if (list / 2 == 0) {
        for (const PageRef& page : run.cache().ListPages(seq, 0, list % 2)) EXPECT_TRUE(page.page_class().format == run.cache().dense_format());
      }
    }
    run.cache().Close(seq);
  }
  const auto refused = run.Make(Options("snapkv", 4, {KvBudget::Kind::kRatio, 0.5}), kPrompt);
  EXPECT_NE(refused.status().message().find("sliding windows"), absl::string_view::npos) << refused.status();
}

ListView ViewOf(std::span<const int32_t> positions, std::span<const FormatRun> runs) {
  ListView list;
  list.positions = positions;
  list.runs = runs;
  return list;
}

TEST(Coded, AgedEntriesFillPages) {
  const PageFormat dense{};
  std::vector<int32_t> positions;
  for (int p = 4; p < 34; ++p) positions.push_back(p);  // 30 coded
  for (int p = 0; p < 4; ++p) positions.push_back(p);
  for (int p = 34; p < 200; ++p) positions.push_back(p);
  const std::vector<FormatRun> runs{{kS4, 0, 30}, {dense, 30, 200}};
  Protection protection;
  protection.sinks = 4, protection.recent = 32;
  const auto action = CodeAged(ViewOf(positions, runs), protection, 200, kS4, dense);
  ASSERT_TRUE(action.has_value());
  ASSERT_EQ(action->coded.size(), 1u);
  EXPECT_EQ(action->coded[0].entries.size(), 128u) << "of 30 and 134 entries two pages";
  EXPECT_EQ(action->keep.size(), 72u);
  EXPECT_EQ(action->keep[0], 30);
  EXPECT_EQ(positions[static_cast<size_t>(action->coded[0].entries.back())], 34 + 97);
  protection.recent = 103;
  EXPECT_FALSE(CodeAged(ViewOf(positions, runs), protection, 200, kS4, dense)) << "63 entries are no page";
}

TEST(Coded, EntriesGoToRunsByBits) {
  const PageFormat dense{};
  const std::vector<int32_t> positions{0, 1, 2, 3, 4, 5}, kept{0, 1, 3, 4, 5};
  const std::vector<FormatRun> runs{{dense, 0, 6}};
  const std::vector<PageFormat> formats{kS2, dense, kS8, kS2, {Codec::kS8, Codec::kS4}};
  const ListAction action = StoreEntries(ViewOf(positions, runs), kept, formats, dense);
  EXPECT_EQ(action.keep, std::vector<int32_t>{1});
  ASSERT_EQ(action.coded.size(), 3u);
  EXPECT_EQ(FormatName(action.coded[0].format), "s8");
  EXPECT_EQ(FormatName(action.coded[1].format), "s8v4");
  EXPECT_EQ(action.coded[2].entries, (std::vector<int32_t>{0, 4}));
}

TEST(Coded, PoliciesSeeEntriesInOrderOfPositions) {
  const std::vector<int32_t> positions{5, 6, 9, 0, 1, 12};
  const std::vector<float> mass{50, 60, 90, 0, 10, 120}, probability{51, 52, 61, 62, 91, 92, 1, 2, 11, 12, 121, 122};
  std::vector<ListView> lists(1);
  lists[0].positions = positions;
  lists[0].window_mass = {mass};
  lists[0].entry_probability = probability;
  SequenceView view;
  view.num_kv_heads = 1;
  view.lists = lists;
  const SortedView sorted(view);
  const ListView& list = sorted.view().lists[0];
  EXPECT_TRUE(std::equal(list.positions.begin(), list.positions.end(), std::vector<int32_t>{0, 1, 5, 6, 9, 12}.begin()));
  EXPECT_EQ(list.window_mass[0][2], 50);
  EXPECT_EQ(list.entry_probability[5], 52);
  ListAction action{0, 0, {1, 2, 5}};
  sorted.ToListOrder(&action);
  EXPECT_EQ(action.keep, (std::vector<int32_t>{0, 4, 5}));
}

TEST(Coded, NamesOfFormats) {
  for (const char* name : {"dense", "s8", "s4", "s3", "s2", "s4v2", "s8v4", "s16v4", "s4v16"}) {
    const auto format = FormatByName(name, PageFormat{});
    ASSERT_TRUE(format.has_value()) << name;
    EXPECT_EQ(FormatName(*format), name);
  }
  for (const char* name : {"", "s", "s5", "s4v", "s4v4", "s16", "S4", "s4v2x", "dense2", "v4"}) EXPECT_FALSE(FormatByName(name, PageFormat{})) << name;
}

}  // namespace
}  // namespace loupe
