// The optimiser beside brute force, and what must hold for any tables.
#include "kvcache/calibration/polykv_fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

namespace loupe {
namespace {

// A power law a list and pattern, the same in every prompt but for `noise`.
FitInput PowerLaws(int layers, int groups, const std::vector<int>& budgets, int full,
                   const std::vector<std::vector<double>>& scale, const std::vector<double>& exponent, double noise,
                   uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, noise);
  FitInput input;
  input.num_layers = layers, input.num_kv_heads = groups, input.budgets = budgets, input.full = full;
  const int lists = layers * groups, patterns = static_cast<int>(scale.size());
  for (int prompt = 0; prompt < 6; ++prompt) {
    PatternTable table(patterns, static_cast<int>(budgets.size()), lists);
    for (int r = 0; r < patterns; ++r) {
      for (int j = 0; j < lists; ++j) {
        const double wobble = std::exp(normal(random));
        for (int b = 0; b < table.budgets; ++b) {
          const double size = budgets[static_cast<size_t>(b)];
          table.at(r, b, j) = wobble * scale[static_cast<size_t>(r)][static_cast<size_t>(j)] *
                              std::pow(size, -exponent[static_cast<size_t>(j)]);
        }
      }
    }
    input.text.push_back(std::move(table));
  }
  input.cosine = PatternTable(patterns, static_cast<int>(budgets.size()), lists);
  input.entropy.assign(static_cast<size_t>(lists), 0.5);
  input.nll.assign(static_cast<size_t>(layers), std::vector<double>(static_cast<size_t>(patterns), 0.1));
  return input;
}

// Every pair of patterns, every split of the entries: the cheapest of two layers of one list each.
StrategyPhase BruteForce(const FitInput& input, int mean, const FitOptions& options) {
  StrategyPhase best;
  double least = INFINITY;
  const int patterns = input.text[0].patterns;
  for (int first = 0; first < patterns; ++first) {
    for (int second = 0; second < patterns; ++second) {
      for (int entries = LeastEntries(mean); entries <= 2 * mean - LeastEntries(mean); ++entries) {
        const StrategyPhase phase{{first, second}, {entries, 2 * mean - entries}};
        const double cost = ExpectedCost(input, phase, options);
        if (cost < least) least = cost, best = phase;
      }
    }
  }
  return best;
}

TEST(PolyKvFit, ATwoLayerToyEqualsBruteForce) {
  const std::vector<int> budgets{16, 32, 64, 128, 256, 512};
  std::mt19937 random(1);
  for (int trial = 0; trial < 40; ++trial) {
    std::vector<std::vector<double>> scale(3, std::vector<double>(2));
    for (auto& row : scale) {
      for (double& s : row) s = std::exp(static_cast<double>(random() % 600) / 100);
    }
    const std::vector<double> exponent{1.05 + static_cast<double>(random() % 100) / 60,
                                       1.05 + static_cast<double>(random() % 100) / 60};
    const FitInput input = PowerLaws(2, 1, budgets, 1024, scale, exponent, 0, 1);
    for (const int mean : {64, 100, 200}) {
      const FitOptions options;
      const StrategyPhase fitted = FitPhase(input, mean, options), brute = BruteForce(input, mean, options);
      EXPECT_EQ(fitted.entries[0] + fitted.entries[1], 2 * mean);
      // The hull has a point every eighth of a doubling and straight lines between; the curves bend by a little more.
      const double ours = ExpectedCost(input, fitted, options), least = ExpectedCost(input, brute, options);
      EXPECT_GE(ours, least * (1 - 1e-12));
      EXPECT_LE(ours, least * 1.003) << "trial " << trial << " mean " << mean << ": " << fitted.entries[0] << " beside "
                                     << brute.entries[0];
      EXPECT_EQ(fitted.patterns, brute.patterns);
    }
  }
}

TEST(PolyKvFit, SumsAreExactAndBudgetsGrowWithTheMean) {
  const std::vector<int> budgets{32, 64, 128, 256, 512, 1024, 2048};
  std::mt19937 random(2);
  const int layers = 7, groups = 3;
  std::vector<std::vector<double>> scale(4, std::vector<double>(layers * groups));
  for (auto& row : scale) {
    for (double& s : row) s = std::exp(static_cast<double>(random() % 900) / 100);
  }
  std::vector<double> exponent;
  for (int j = 0; j < layers * groups; ++j) exponent.push_back(1.05 + static_cast<double>(random() % 100) / 60);
  const FitInput input = PowerLaws(layers, groups, budgets, 4096, scale, exponent, 0.3, 3);
  for (const bool per_head : {true, false}) {
    for (const FitVary vary : {FitVary::kBoth, FitVary::kPattern, FitVary::kBudget}) {
      FitOptions options;
      options.per_head = per_head, options.vary = vary;
      double before = INFINITY;
      for (const int mean : {16, 64, 128, 200, 256, 512, 1024, 2048, 4000}) {
        const StrategyPhase phase = FitPhase(input, mean, options);
        EXPECT_EQ(std::accumulate(phase.entries.begin(), phase.entries.end(), 0), layers * groups * mean);
        for (size_t j = 0; j < phase.entries.size(); ++j) {
          EXPECT_GE(phase.entries[j], LeastEntries(mean));
          EXPECT_LE(phase.entries[j], 4096);
          if (vary == FitVary::kPattern) EXPECT_EQ(phase.entries[j], mean);
          if (!per_head) EXPECT_EQ(phase.entries[j], phase.entries[j / groups * groups]);
        }
        const double cost = ExpectedCost(input, phase, options);
        EXPECT_LT(cost, before) << mean;
        before = cost;
      }
    }
  }
  // What may choose more freely is never worse.
  const auto cost = [&](bool per_head, FitVary vary) {
    FitOptions options;
    options.per_head = per_head, options.vary = vary;
    return ExpectedCost(input, FitPhase(input, 256, options), options);
  };
  EXPECT_LT(cost(true, FitVary::kBoth), cost(false, FitVary::kBoth));
  EXPECT_LT(cost(true, FitVary::kBoth), cost(true, FitVary::kPattern));
  EXPECT_LT(cost(true, FitVary::kBoth), cost(true, FitVary::kBudget));
}

TEST(PolyKvFit, NoiseDoesNotMoveAPattern) {
  FitInput input = PowerLaws(3, 1, {32, 64, 128}, 256, {{100, 100, 100}, {100, 100, 100}}, {1, 1, 1}, 0, 1);
  for (size_t p = 0; p < input.text.size(); ++p) {
    for (int b = 0; b < 3; ++b) {
      input.text[p].at(1, b, 0) *= p % 2 == 0 ? 0.5 : 1.4;  // better in the mean, by less than its error
      input.text[p].at(1, b, 1) *= 0.5;                     // better everywhere
      input.text[p].at(1, b, 2) *= 3;                       // so bad that the first pattern is the best uniform one
    }
  }
  EXPECT_EQ(BestUniformPattern(input, 64, {}), 0);
  EXPECT_EQ(FitPhase(input, 64, {}).patterns, (std::vector<int>{0, 1, 0}));
  // A pattern that loses more than half a point of the needles' cosine is passed over, however cheap.
  input.needle_cosine = PatternTable(2, 3, 3);
  for (double& cosine : input.needle_cosine.values) cosine = 0.9;
  for (int b = 0; b < 3; ++b) input.needle_cosine.at(1, b, 1) = 0.896;
  EXPECT_EQ(FitPhase(input, 64, {}).patterns, (std::vector<int>{0, 1, 0}));
  for (int b = 0; b < 3; ++b) input.needle_cosine.at(1, b, 1) = 0.894;
  EXPECT_EQ(FitPhase(input, 64, {}).patterns, (std::vector<int>{0, 0, 0}));
}

TEST(PolyKvFit, ListsThatHoldNeedlesKeepTheMean) {
  const std::vector<int> budgets{32, 64, 128, 256};
  std::vector<std::vector<double>> scale(1, std::vector<double>(10, 1000.0));
  scale[0][3] = 0.001;  // hardly matters for text
  FitInput input = PowerLaws(10, 1, budgets, 512, scale, std::vector<double>(10, 1.0), 0, 1);
  EXPECT_EQ(FitPhase(input, 128, {}).entries[3], LeastEntries(128));
  input.needle_kl.assign(10, 0.001);
  input.needle_kl[3] = 1;
  EXPECT_GE(FitPhase(input, 128, {}).entries[3], 128);
  FitOptions unpinned;
  unpinned.pin_share = 0;
  EXPECT_EQ(FitPhase(input, 128, unpinned).entries[3], LeastEntries(128));
}

TEST(PolyKvFit, ThePapersRuleFollowsItsSignals) {
  const std::vector<int> budgets{64, 128, 256, 512};
  FitInput input = PowerLaws(4, 2, budgets, 1024, {std::vector<double>(8, 10.0), std::vector<double>(8, 9.0)},
                             std::vector<double>(8, 1.0), 0.01, 1);
  for (int b = 0; b < 4; ++b) {
    for (int j = 0; j < 8; ++j) input.cosine.at(0, b, j) = 0.9, input.cosine.at(1, b, j) = j < 4 ? 0.95 : 0.85;
  }
  input.entropy = {0.1, 0.1, 0.4, 0.4, 0.4, 0.4, 0.9, 0.9};
  FitOptions options;
  options.mode = FitMode::kPaper;
  options.per_head = false;
  const StrategyPhase phase = FitPhase(input, 256, options);
  EXPECT_EQ(std::accumulate(phase.entries.begin(), phase.entries.end(), 0), 8 * 256);
  EXPECT_LT(phase.entries[0], phase.entries[2]);
  EXPECT_LT(phase.entries[2], phase.entries[6]);
  EXPECT_EQ(phase.patterns[0], 1);
  for (const int entries : FitPhase(input, 128, options).entries) EXPECT_EQ(entries, 128);
  options.sensitivity_by_nll = options.prefer_by_nll = true;
  input.nll = {{0.5, 0.4}, {NAN, 0.1}, {0.1, 0.2}, {0.01, NAN}};
  const StrategyPhase by_nll = FitPhase(input, 256, options);
  EXPECT_GT(by_nll.entries[0], by_nll.entries[2]);
  EXPECT_GT(by_nll.entries[4], by_nll.entries[6]);
  EXPECT_EQ(by_nll.patterns[0], 1);
}

}  // namespace
}  // namespace loupe
