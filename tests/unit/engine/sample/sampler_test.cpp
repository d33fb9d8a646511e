// The sampler against a naive one in double precision that sorts the whole vocabulary.
#include "engine/sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "kernels/backend.h"

namespace loupe {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What the engine does: the sampler describes, the backend chooses, the sampler reads.
absl::Status Sample(const Sampler& sampler, std::vector<float>& logits, int num_generated, SampledToken* token) {
  static Backend* const backend = [] {
    BackendOptions options;
    options.device = "cpu";
    options.num_threads = 1;
    return MakeBackend(options)->release();
  }();
  static const std::unique_ptr<Stream> stream = backend->NewStream();
  std::vector<LogitChange> changes;
  SampleRow row = sampler.Describe(num_generated, &changes);
  SampledRow chosen;
  SampleArgs args;
  args.logits = MakeTensor(logits.data(), DType::kF32, 1, static_cast<int64_t>(logits.size()));
  args.rows = MakeTensor(&row, DType::kBytes, 1);
  args.changes = MakeTensor(changes.data(), DType::kBytes, static_cast<int64_t>(changes.size()));
  args.out = MakeTensor(&chosen, DType::kBytes, 1);
  backend->Sample(args, *stream);
  return sampler.Read(chosen, static_cast<int>(logits.size()), token);
}

std::vector<float> RandomLogits(int vocab, uint64_t seed, double spread) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, spread);
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float& x : logits) x = static_cast<float>(normal(random));
  return logits;
}

// Probability of every token by the documented order of steps; nothing shared with the code under test.
std::vector<double> NaiveProbabilities(const std::vector<float>& raw, const SamplingParams& params,
                                       const std::vector<int32_t>& prompt, const std::vector<int32_t>& output,
                                       const std::set<int32_t>& masked) {
  std::vector<double> x(raw.begin(), raw.end());
  for (const auto& [id, bias] : params.logit_bias) x[static_cast<size_t>(id)] += static_cast<double>(bias);
  std::set<int32_t> repeated(output.begin(), output.end());
  if (params.repetition_penalty != 1) repeated.insert(prompt.begin(), prompt.end());
  for (const int32_t id : repeated) {
    double& v = x[static_cast<size_t>(id)];
    v = v > 0 ? v / static_cast<double>(params.repetition_penalty) : v * static_cast<double>(params.repetition_penalty);
    const auto count = std::count(output.begin(), output.end(), id);
    v -= static_cast<double>(params.frequency_penalty) * static_cast<double>(count);
    if (count > 0) v -= static_cast<double>(params.presence_penalty);
  }
  for (const int32_t id : masked) x[static_cast<size_t>(id)] = -kInfinity;

  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
  std::vector<double> p(x.size(), 0.0);
  if (params.temperature == 0) {
    p[order[0]] = 1;
    return p;
  }
  size_t kept = order.size();
  if (params.top_k > 0) kept = std::min(kept, static_cast<size_t>(params.top_k));
  const auto weight = [&](size_t rank) { return std::exp((x[order[rank]] - x[order[0]]) / static_cast<double>(params.temperature)); };
  const auto sum = [&] {
    double s = 0;
    for (size_t i = 0; i < kept; ++i) s += weight(i);
    return s;
  };
  const double total = sum();
  double mass = 0;
  for (size_t i = 0; i < kept; ++i) {
    mass += weight(i);
    if (mass >= static_cast<double>(params.top_p) * total) {
      kept = i + 1;
      break;
    }
  }
  while (kept > 1 && weight(kept - 1) < static_cast<double>(params.min_p)) --kept;
  const double rest = sum();
  for (size_t i = 0; i < kept; ++i) p[order[i]] = weight(i) / rest;
  return p;
}

// Pearson's statistic against the 99.99 % quantile (Wilson-Hilferty); classes with few expected draws are pooled.
void ExpectDistribution(const std::vector<double>& expected, const std::vector<int>& counts, int draws, const std::string& what) {
  double statistic = 0, pooled_expected = 0;
  int pooled_count = 0, classes = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == 0) {
      EXPECT_EQ(counts[i], 0) << what << ": token " << i << " was filtered out and came all the same";
      continue;
    }
    const double e = expected[i] * draws;
    if (e < 8) {
      pooled_expected += e, pooled_count += counts[i];
      continue;
    }
    statistic += (counts[i] - e) * (counts[i] - e) / e;
    ++classes;
  }
  if (pooled_expected > 8) {
    statistic += (pooled_count - pooled_expected) * (pooled_count - pooled_expected) / pooled_expected;
    ++classes;
  }
  if (classes < 2) return;
  const double n = classes - 1;
  const double quantile = n * std::pow(1 - 2 / (9 * n) + 3.72 * std::sqrt(2 / (9 * n)), 3);
  EXPECT_LT(statistic, quantile) << what << ": " << classes << " classes";
}

struct Case {
  int vocab;
  double spread;
  SamplingParams params;
};

std::string Describe(const Case& c) {
  return "vocab " + std::to_string(c.vocab) + " spread " + std::to_string(c.spread) + " temperature " +
         std::to_string(c.params.temperature) + " top_k " + std::to_string(c.params.top_k) + " top_p " +
         std::to_string(c.params.top_p) + " min_p " + std::to_string(c.params.min_p);
}

TEST(SamplerTest, DrawsFollowTheNaiveDistribution) {
  std::vector<Case> cases;
  for (const int vocab : {1, 2, 17, 255, 256, 257, 1009}) {
    for (const float temperature : {0.3f, 1.0f, 1.7f}) {
      for (const int top_k : {0, 1, 5, 300}) {
        for (const float top_p : {1.0f, 0.9f, 0.35f}) {
          SamplingParams params;
          params.temperature = temperature;
          params.top_k = top_k;
          params.top_p = top_p;
          params.min_p = (vocab + top_k) % 2 == 0 ? 0.0f : 0.07f;
          cases.push_back({vocab, 1.5, params});
        }
      }
    }
  }
  constexpr int kDraws = 2000;
  uint64_t seed = 20;
  for (const Case& c : cases) {
    std::vector<float> logits = RandomLogits(c.vocab, ++seed, c.spread);
    const std::vector<float> before = logits;
    const Sampler sampler(c.params, seed, {}, {});
    std::vector<int> counts(logits.size());
    for (int i = 0; i < kDraws; ++i) {
      SampledToken token;
      ASSERT_TRUE(Sample(sampler, logits, i, &token).ok());
      ++counts[static_cast<size_t>(token.id)];
    }
    EXPECT_EQ(before, logits) << Describe(c);
    ExpectDistribution(NaiveProbabilities(before, c.params, {}, {}, {}), counts, kDraws, Describe(c) + " seed " + std::to_string(seed));
  }
}

TEST(SamplerTest, PenaltiesBiasAndMaskChangeTheDistributionAsDocumented) {
  constexpr int kVocab = 40, kDraws = 20000;
  const std::vector<int32_t> prompt = {3, 3, 4, 5}, output = {5, 6, 6, 6, 7}, ends = {9, 10};
  for (int variant = 0; variant < 16; ++variant) {
    SamplingParams params;
    if (variant & 1) params.repetition_penalty = 1.4f;
    if (variant & 2) params.frequency_penalty = 0.5f, params.presence_penalty = -0.4f;
    if (variant & 4) params.logit_bias = {{6, 3.0f}, {11, -2.0f}, {9, 1.0f}};
    std::set<int32_t> masked;
    if (variant & 8) {
      params.min_tokens = kDraws + 1;
      params.stop_token_ids = {12};
      masked = {9, 10, 12};
    }
    std::vector<float> logits = RandomLogits(kVocab, 77 + static_cast<uint64_t>(variant), 1);
    const std::vector<float> before = logits;
    Sampler sampler(params, 5, prompt, ends);
    for (const int32_t id : output) sampler.Accept(id);
    std::vector<int> counts(kVocab);
    for (int i = 0; i < kDraws; ++i) {
      SampledToken token;
      ASSERT_TRUE(Sample(sampler, logits, i, &token).ok());
      ++counts[static_cast<size_t>(token.id)];
    }
    EXPECT_EQ(before, logits) << "logits are restored, variant " << variant;
    ExpectDistribution(NaiveProbabilities(before, params, prompt, output, masked), counts, kDraws, "variant " + std::to_string(variant));
  }
}

TEST(SamplerTest, GreedyTakesTheLowestOfEqualBest) {
  SamplingParams params;
  params.temperature = 0;
  const Sampler sampler(params, 1, {}, {});
  for (const int vocab : {1, 2, 15, 16, 17, 255, 256, 257, 49152}) {
    for (uint64_t seed = 1; seed < 6; ++seed) {
      std::vector<float> logits = RandomLogits(vocab, seed, 1);
      for (float& x : logits) x = std::round(x);  // many ties
      SampledToken token;
      ASSERT_TRUE(Sample(sampler, logits, 0, &token).ok());
      EXPECT_EQ(token.id, std::max_element(logits.begin(), logits.end()) - logits.begin()) << vocab << " seed " << seed;
    }
  }
}

TEST(SamplerTest, TopKTiesGoToTheLowestIds) {
  SamplingParams params;
  params.top_k = 7;
  const Sampler sampler(params, 3, {}, {});
  std::vector<float> logits(1000, 1.0f);
  std::set<int32_t> drawn;
  for (int i = 0; i < 300; ++i) {
    SampledToken token;
    ASSERT_TRUE(Sample(sampler, logits, i, &token).ok());
    drawn.insert(token.id);
  }
  EXPECT_EQ(drawn, (std::set<int32_t>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(SamplerTest, DrawDependsOnSeedIndexAndLogitsAlone) {
  SamplingParams params;
  params.top_p = 0.95f;
  std::vector<float> logits = RandomLogits(500, 4, 1.5);
  const Sampler a(params, 42, {}, {}), b(params, 42, {}, {}), c(params, 43, {}, {});
  int differing = 0;
  for (int i = 100; i-- > 0;) {
    SampledToken from_a, from_b, from_c;
    ASSERT_TRUE(Sample(a, logits, i, &from_a).ok());
    std::vector<float> noise = RandomLogits(300, static_cast<uint64_t>(i), 2);
    ASSERT_TRUE(Sample(c, noise, i, &from_b).ok());
    ASSERT_TRUE(Sample(b, logits, i, &from_b).ok());
    ASSERT_TRUE(Sample(c, logits, i, &from_c).ok());
    EXPECT_EQ(from_a.id, from_b.id) << i;
    differing += from_a.id != from_c.id;
  }
  EXPECT_GT(differing, 50) << "another seed gives other tokens";
}

TEST(SamplerTest, NeighbouringSeedsAreIndependent) {
  // Correlation of u over neighbouring seeds and indexes, 6 standard deviations.
  constexpr int kCount = 20000;
  double across_seeds = 0, across_indexes = 0, mean = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    mean += UniformAt(i, 0);
    across_seeds += (UniformAt(i, 5) - 0.5) * (UniformAt(i + 1, 5) - 0.5) * 12;
    across_indexes += (UniformAt(9, i) - 0.5) * (UniformAt(9, i + 1) - 0.5) * 12;
  }
  EXPECT_NEAR(mean / kCount, 0.5, 6 * std::sqrt(1.0 / 12 / kCount));
  EXPECT_NEAR(across_seeds / kCount, 0, 6 / std::sqrt(kCount));
  EXPECT_NEAR(across_indexes / kCount, 0, 6 / std::sqrt(kCount));
}

TEST(SamplerTest, LogprobsAreThoseOfTheRawLogits) {
  for (const int vocab : {1, 7, 257, 49152}) {
    SamplingParams params;
    params.temperature = 0.5f;
    params.logprobs = 5;
    params.logit_bias = {{0, 100.0f}};
    std::vector<float> logits = RandomLogits(vocab, 6, 3);
    double sum = 0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x));
    const auto logprob = [&](int32_t id) { return static_cast<double>(logits[static_cast<size_t>(id)]) - std::log(sum); };
    SampledToken token;
    ASSERT_TRUE(Sample(Sampler(params, 8, {}, {}), logits, 0, &token).ok());
    EXPECT_EQ(token.id, 0) << "the bias forces it";
    EXPECT_EQ(token.logprobs.chosen.id, 0);
    EXPECT_NEAR(static_cast<double>(token.logprobs.chosen.logprob), logprob(0), 2e-5) << vocab;
    std::vector<int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
    ASSERT_EQ(token.logprobs.top.size(), std::min<size_t>(5, logits.size()));
    for (size_t i = 0; i < token.logprobs.top.size(); ++i) {
      EXPECT_EQ(token.logprobs.top[i].id, order[i]) << vocab << " rank " << i;
      EXPECT_NEAR(static_cast<double>(token.logprobs.top[i].logprob), logprob(order[i]), 2e-5);
    }
  }
}

TEST(SamplerTest, IgnoreEosNeverEndsAndMinTokensEndsOnlyLater) {
  std::vector<float> logits = {0, 0, 30, 20, 10};
  const std::vector<int32_t> ends = {2};
  SamplingParams params;
  params.temperature = 0;
  params.min_tokens = 3;
  params.stop_token_ids = {3};
  SampledToken token;
  const auto at = [&](int n) {
    EXPECT_TRUE(Sample(Sampler(params, 0, {}, ends), logits, n, &token).ok());
    return token.id;
  };
  EXPECT_EQ(at(2), 4) << "end and stop ids are masked";
  EXPECT_EQ(at(3), 2);
  params.ignore_eos = true;
  EXPECT_EQ(at(3), 3) << "stop ids still count";
}

TEST(SamplerTest, BrokenLogitsAreAnErrorNotACrash) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (const float temperature : {0.0f, 1.0f}) {
    SamplingParams params;
    params.temperature = temperature;
    params.logprobs = 2;
    params.ignore_eos = true;
    const std::vector<int32_t> ends = {0, 1, 2};
    for (const std::vector<float>& broken : {std::vector<float>{nan, nan, nan}, {-infinity, -infinity, -infinity}, {1, infinity, 2}}) {
      std::vector<float> logits = broken;
      SampledToken token;
      EXPECT_EQ(Sample(Sampler(params, 1, {}, {}), logits, 0, &token).code(), absl::StatusCode::kInternal);
    }
    std::vector<float> logits = {1, 2, 3};
    SampledToken token;
    EXPECT_EQ(Sample(Sampler(params, 1, {}, ends), logits, 0, &token).code(), absl::StatusCode::kOutOfRange);
    logits[1] = nan;
    ASSERT_TRUE(Sample(Sampler(params, 1, {}, {}), logits, 0, &token).ok());
    EXPECT_NE(token.id, 1);
  }
}

TEST(SamplerTest, ExtremeTemperaturesAndSpreads) {
  for (const float temperature : {1e-4f, 1e-5f, 1e-6f, 2.0f, 100.0f}) {
    for (const double spread : {1e-3, 1.0, 1e4}) {
      for (const float top_p : {1.0f, 0.999f, 1e-6f}) {
        SamplingParams params;
        params.temperature = temperature;
        params.top_p = top_p;
        std::vector<float> logits = RandomLogits(5000, 3, spread);
        const Sampler sampler(params, 1, {}, {});
        for (int i = 0; i < 20; ++i) {
          SampledToken token;
          ASSERT_TRUE(Sample(sampler, logits, i, &token).ok());
          ASSERT_TRUE(token.id >= 0 && token.id < 5000) << temperature << " " << spread << " " << top_p;
        }
      }
    }
  }
}

TEST(Sampler, AKnownTokenIsToldAsAChosenOne) {
  BackendOptions options;
  options.device = "cpu";
  options.num_threads = 1;
  const std::unique_ptr<Backend> backend = *MakeBackend(options);
  const std::unique_ptr<Stream> stream = backend->NewStream();
  for (const int vocab : {1, 2, 63, 1024, 1025}) {
    std::vector<float> logits = RandomLogits(vocab, 91 + static_cast<uint64_t>(vocab), 3);
    if (vocab > 60) logits[5] = -std::numeric_limits<float>::infinity(), logits[6] = std::nanf("");
    const std::vector<float> before = logits;
    double sum = 0;
    for (const float x : before) sum += std::isnan(x) ? 0 : std::exp(static_cast<double>(x));
    for (const int32_t id : {0, vocab / 2, vocab - 1, std::min(5, vocab - 1), std::min(6, vocab - 1)}) {
      LogitChange change;
      SampleRow row = DescribeKnown(id, 3, &change);
      SampledRow chosen;
      SampleArgs args;
      args.logits = MakeTensor(logits.data(), DType::kF32, 1, vocab);
      args.rows = MakeTensor(&row, DType::kBytes, 1);
      args.changes = MakeTensor(&change, DType::kBytes, 1);
      args.out = MakeTensor(&chosen, DType::kBytes, 1);
      backend->Sample(args, *stream);
      const auto read = ReadKnown(chosen, id, vocab);
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(read->chosen.id, id);
      const float own = before[static_cast<size_t>(id)];
      if (std::isfinite(own)) {
        EXPECT_NEAR(static_cast<double>(read->chosen.logprob), static_cast<double>(own) - std::log(sum), 1e-4) << vocab << " " << id;
      } else {
        EXPECT_EQ(read->chosen.logprob, -std::numeric_limits<float>::infinity());
      }
      EXPECT_EQ(read->top.size(), static_cast<size_t>(std::min(vocab, 3)));
      for (size_t i = 1; i < read->top.size(); ++i) EXPECT_GE(read->top[i - 1].logprob, read->top[i].logprob);
      EXPECT_EQ(std::memcmp(before.data(), logits.data(), before.size() * sizeof(float)), 0) << "restored";
    }
  }
  SampledRow broken;
  broken.id = kNoFiniteLogit;
  EXPECT_EQ(ReadKnown(broken, 3, 10).status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace loupe
