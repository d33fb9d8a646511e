// Choosing tokens on every target: against a naive choice in double precision that sorts the vocabulary, and token for
// token against the CPU's. Sizes around chunks and warps, flat and peaked logits, ties, changes, shared rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "tests/kernels/reference.h"

namespace loupe::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Draws {
  int64_t vocab = 0, stride = 0;
  std::vector<float> logits;
  std::vector<SampleRow> rows;
  std::vector<LogitChange> changes;
  std::vector<uint32_t> masks;  // [k, (vocab + 31) / 32]

  float* row(int32_t i) { return logits.data() + i * stride; }
};

std::vector<SampledRow> Compute(const Target& target, Draws& draws) {
  Backend& backend = BackendOf(target, false, 3);
  std::vector<SampledRow> out(draws.rows.size());
  DeviceArrays arrays(backend);
  SampleArgs args;
  args.logits = MakeTensor(draws.logits.data(), DType::kF32, static_cast<int64_t>(draws.logits.size()) / draws.stride, draws.vocab);
  args.logits.rank = 2;
  args.logits.row_stride = draws.stride;
  const std::vector<float> before = draws.logits;
  args.logits = arrays.Out(args.logits);
  const auto structs = [](auto& v) { return MakeTensor(v.data(), DType::kBytes, static_cast<int64_t>(v.size())); };
  args.rows = arrays.In(structs(draws.rows), sizeof(SampleRow));
  args.changes = arrays.In(structs(draws.changes), sizeof(LogitChange));
  const int64_t words = (draws.vocab + 31) / 32;
  if (!draws.masks.empty()) {
    Tensor masks = MakeTensor(draws.masks.data(), DType::kI32, static_cast<int64_t>(draws.masks.size()) / words, words);
    masks.rank = 2;
    args.masks = arrays.In(masks);
  }
  args.out = arrays.Out(structs(out), sizeof(SampledRow));
  backend.Sample(args, arrays.stream());
  arrays.Finish();
  if (draws.masks.empty()) {
    EXPECT_EQ(0, std::memcmp(before.data(), draws.logits.data(), before.size() * 4)) << target << ": logits are restored";
  }
  draws.logits = before;
  return out;
}

std::vector<double> ChangedLogits(Draws& draws, const SampleRow& row) {
  const float* x = draws.row(row.logits);
  std::vector<double> out(x, x + draws.vocab);
  for (size_t id = 0; row.mask >= 0 && id < out.size(); ++id) {
    const size_t word = static_cast<size_t>(row.mask) * ((out.size() + 31) / 32) + id / 32;
    if (!(draws.masks[word] >> (id % 32) & 1)) out[id] = -static_cast<double>(kInfinity);
  }
  for (int i = 0; i < row.num_changes; ++i) {
    const LogitChange& c = draws.changes[static_cast<size_t>(row.first_change + i)];
    double& v = out[static_cast<size_t>(c.id)];
    v += static_cast<double>(c.bias);
    v = v > 0 ? v / static_cast<double>(c.repetition) : v * static_cast<double>(c.repetition);
    v -= static_cast<double>(c.frequency) + static_cast<double>(c.presence);
  }
  return out;
}

// The tokens that the draw may mean: the oracle's, and its neighbours if the draw falls within 1e-5 of a border.
std::vector<int32_t> Allowed(const std::vector<double>& x, const SampleRow& row) {
  std::vector<int32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int32_t id) { return x[static_cast<size_t>(id)]; };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return at(a) > at(b); });
  const double best = at(order[0]);
  if (row.temperature < kGreedyBelow) return {order[0]};
  const auto weight = [&](int32_t id) { return std::exp((at(id) - best) / static_cast<double>(row.temperature)); };
  const bool by_rank = (row.top_k > 0 && row.top_k < static_cast<int64_t>(x.size())) || row.top_p < 1;
  if (row.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(row.top_k)));
  double total = 0, mass = 0;
  for (const int32_t id : order) total += weight(id);
  std::vector<int32_t> allowed;
  for (const double slack : {-1e-5, 0., 1e-5}) {
    size_t kept = 0;
    for (mass = 0; kept < order.size() && (kept == 0 || mass < (static_cast<double>(row.top_p) + slack) * total); ++kept) {
      mass += weight(order[kept]);
    }
    while (kept > 1 && weight(order[kept - 1]) < static_cast<double>(row.min_p) * (1 + slack)) mass -= weight(order[--kept]);
    std::vector<int32_t> walk(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept));
    if (!by_rank) std::sort(walk.begin(), walk.end());
    for (const double nudge : {-1e-5, 0., 1e-5}) {
      double left = (row.u + nudge) * mass;
      size_t i = 0;
      while (i + 1 < walk.size() && left >= weight(walk[i])) left -= weight(walk[i++]);
      allowed.push_back(walk[i]);
    }
  }
  return allowed;
}

void ExpectRight(const Target& target, Draws& draws, const std::string& what) {
  const std::vector<SampledRow> got = Compute(target, draws), cpu = Compute("portable", draws);
  for (size_t i = 0; i < got.size(); ++i) {
    const SampleRow& row = draws.rows[i];
    const std::vector<int32_t> allowed = Allowed(ChangedLogits(draws, row), row);
    ASSERT_NE(std::find(allowed.begin(), allowed.end(), got[i].id), allowed.end())
        << target << ", " << what << ", row " << i << ": " << got[i].id << ", not " << allowed[allowed.size() / 2] << "; temperature "
        << row.temperature << ", top_k " << row.top_k << ", top_p " << row.top_p << ", min_p " << row.min_p << ", u " << row.u;
    EXPECT_EQ(got[i].id, cpu[i].id) << target << ", " << what << ", row " << i << " as on the CPU; temperature "
                                    << row.temperature << ", top_k " << row.top_k << ", top_p " << row.top_p;
    EXPECT_NEAR(got[i].logprob, cpu[i].logprob, 1e-5f) << target << ", " << what;
    ASSERT_EQ(got[i].num_top, cpu[i].num_top) << target << ", " << what;
    for (int k = 0; k < got[i].num_top; ++k) {
      EXPECT_EQ(got[i].top_ids[k], cpu[i].top_ids[k]) << target << ", " << what << ", rank " << k;
      EXPECT_NEAR(got[i].top_logprobs[k], cpu[i].top_logprobs[k], 1e-5f);
    }
  }
}

Draws RandomDraws(int64_t vocab, int rows, float spread, unsigned seed) {
  std::mt19937 random(seed);
  Draws draws;
  draws.vocab = vocab, draws.stride = vocab + 3;
  draws.logits = RandomFloats(draws.stride * rows, random);
  for (float& x : draws.logits) x *= spread;
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int i = 0; i < rows; ++i) {
    SampleRow row;
    row.logits = i;
    row.u = uniform(random);
    draws.rows.push_back(row);
  }
  return draws;
}

TEST(Sample, EveryFilterAtEverySize) {
  const float temperatures[] = {0, 0.3f, 1, 1.7f}, top_ps[] = {1, .9f, .35f}, min_ps[] = {0, .07f};
  const int top_ks[] = {0, 1, 5, 300};
  for (const Target& target : UsableTargets()) {
    for (const int64_t vocab : {1, 2, 17, 255, 257, 1023, 1024, 1025, 5003}) {
      Draws draws = RandomDraws(vocab, 96, 2, static_cast<unsigned>(vocab));
      for (size_t i = 0; i < draws.rows.size(); ++i) {
        SampleRow& row = draws.rows[i];
        row.temperature = temperatures[i % 4], row.top_p = top_ps[i / 4 % 3], row.top_k = top_ks[i / 12 % 4], row.min_p = min_ps[i / 48];
        row.num_top = static_cast<int>(i % 22) - 1;
      }
      ExpectRight(target, draws, "vocabulary " + std::to_string(vocab));
    }
  }
}

// Flat distributions keep more than any working memory holds; high and low temperatures; ties.
TEST(Sample, LargeVocabulariesFlatPeakedAndTied) {
  for (const Target& target : UsableTargets()) {
    for (const float spread : {0.f, .01f, 1.f, 4.f, 300.f}) {
      for (const float temperature : {.7f, 1.f, 50.f}) {
        Draws draws = RandomDraws(49157, 4, spread, 5);
        if (spread == 4.f) std::transform(draws.logits.begin(), draws.logits.end(), draws.logits.begin(), [](float x) { return std::round(x); });
        for (SampleRow& row : draws.rows) row.temperature = temperature, row.num_top = 20;
        draws.rows[1].top_p = .95f;
        draws.rows[2].top_k = 20000, draws.rows[2].min_p = .001f;
        draws.rows[3].top_p = .5f, draws.rows[3].top_k = 40;
        ExpectRight(target, draws, "spread " + std::to_string(spread));
      }
    }
  }
}

TEST(Sample, ChangesHoldForTheirRowAlone) {
  for (const Target& target : UsableTargets()) {
    Draws draws = RandomDraws(3001, 40, 2, 9);
    std::mt19937 random(3);
    for (size_t i = 0; i < draws.rows.size(); ++i) {
      SampleRow& row = draws.rows[i];
      row.logits = static_cast<int32_t>(i / 3);  // siblings share their logits
      row.temperature = i % 4 == 0 ? 0 : .8f;
      row.top_p = i % 3 == 0 ? 1 : .9f;
      row.num_top = 3;
      row.first_change = static_cast<int32_t>(draws.changes.size());
      for (int32_t id = static_cast<int32_t>(random() % 5); id < 3001 && i % 5 != 0; id += 1 + static_cast<int32_t>(random() % (i % 2 ? 3 : 900))) {
        const float kinds[] = {3, -2, -kInfinity, 0};
        draws.changes.push_back({id, kinds[random() % 4], random() % 2 ? 1.3f : 1.f, random() % 2 ? .4f : 0, random() % 2 ? -.3f : 0});
      }
      row.num_changes = static_cast<int32_t>(draws.changes.size()) - row.first_change;
    }
    ExpectRight(target, draws, "changes");
  }
}

// Siblings share a mask; log-probabilities are those of the logits as they came, whatever the mask leaves.
TEST(Sample, MasksLeaveWhatTheyAllow) {
  for (const Target& target : UsableTargets()) {
    for (const int64_t vocab : {1, 31, 32, 33, 1025, 5003, 49157}) {
      Draws draws = RandomDraws(vocab, 24, 2, 21);
      std::mt19937 random(static_cast<unsigned>(vocab));
      const size_t words = static_cast<size_t>((vocab + 31) / 32);
      for (size_t i = 0; i < draws.rows.size(); ++i) {
        SampleRow& row = draws.rows[i];
        row.logits = static_cast<int32_t>(i / 2);
        row.temperature = i % 4 == 0 ? 0 : .9f;
        row.top_p = i % 3 == 0 ? 1 : .9f, row.top_k = i % 5 == 0 ? 7 : 0;
        row.num_top = row.logits % 2 == 0 ? 5 : -1;
        if (row.logits % 3 == 2) continue;  // and some without
        if (i % 2 == 0) {
          // One token, about every tenth, nearly all.
          const auto only = static_cast<size_t>(random() % static_cast<unsigned>(vocab));
          const size_t begin = draws.masks.size();
          for (size_t w = 0; w < words; ++w) draws.masks.push_back(0);
          const unsigned kinds[] = {0, 10, 97};
          for (size_t id = 0; id < static_cast<size_t>(vocab); ++id) {
            if (id == only || random() % 100 < kinds[i / 2 % 3]) draws.masks[begin + id / 32] |= 1u << (id % 32);
          }
        }
        row.mask = static_cast<int32_t>(draws.masks.size() / words) - 1;
        const int32_t id = static_cast<int32_t>(random() % static_cast<unsigned>(vocab));
        row.first_change = static_cast<int32_t>(draws.changes.size()), row.num_changes = 1;
        draws.changes.push_back({id, -2, 1.2f, 0, 0});
      }
      ExpectRight(target, draws, "masks");
    }
    Draws none = RandomDraws(65, 1, 1, 3);
    none.masks.assign(3, 0);
    none.rows[0].mask = 0;
    EXPECT_EQ(Compute(target, none)[0].id, kNoTokenLeft) << target;
  }
}

TEST(Sample, SaysWhatIsBroken) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Target& target : UsableTargets()) {
    for (const float temperature : {0.f, 1.f}) {
      Draws draws = RandomDraws(300, 5, 1, 2);
      std::fill_n(draws.row(0), 300, nan);
      std::fill_n(draws.row(1), 300, -kInfinity);
      draws.row(2)[17] = kInfinity;
      std::fill_n(draws.row(4), 299, nan);
      for (SampleRow& row : draws.rows) row.temperature = temperature, row.num_top = 2, row.top_p = .9f;
      draws.rows[3].num_changes = 300;
      for (int32_t id = 0; id < 300; ++id) draws.changes.push_back({id, -kInfinity, 1, 0, 0});
      const std::vector<SampledRow> out = Compute(target, draws);
      EXPECT_EQ(out[0].id, kNoFiniteLogit) << target;
      EXPECT_EQ(out[1].id, kNoFiniteLogit) << target;
      EXPECT_EQ(out[2].id, kNoFiniteLogit) << target;
      EXPECT_EQ(out[3].id, kNoTokenLeft) << target;
      EXPECT_EQ(out[4].id, 299) << target;
    }
  }
}

}  // namespace
}  // namespace loupe::testing
