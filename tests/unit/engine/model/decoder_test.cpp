#include "engine/model/decoder.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "engine/load/gguf.h"
#include "engine/load/gguf_model.h"
#include "gtest/gtest.h"
#include "tests/support/model_runner.h"
#include "tests/support/tiny_model.h"
#include "tests/unit/engine/model/decoder_oracle.h"

namespace loupe {
namespace {

using testing::DecoderOracle;
using testing::MakeTinyModel;
using testing::ModelRunner;
using testing::TinyModel;
using testing::TinyOptions;

// Tensors of a tiny model in memory, as the loader would show them.
class TinySource : public WeightSource {
 public:
  explicit TinySource(const TinyModel& model) : model_(model) {}
  std::optional<HostMatrix> Find(std::string_view name) const override {
    for (const auto& t : model_.writer.tensors) {
      if (t.name != name) continue;
      HostMatrix m;
      for (WeightType type : {WeightType::kF32, WeightType::kF16, WeightType::kBF16, WeightType::kQ8_0,
                              WeightType::kQ4_0, WeightType::kQ4_1}) {
        if (testing::GgufTypeNumber(type) == t.type) m.type = type;
      }
      m.cols = t.shape[0];
      m.rows = t.shape.size() > 1 ? t.shape[1] : 1;
      m.data = t.data.data();
      return m;
    }
    return std::nullopt;
  }
  void Release(std::string_view name) const override { released.emplace_back(name); }
  mutable std::vector<std::string> released;

 private:
  const TinyModel& model_;
};

struct Loaded {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Decoder> decoder;
};

ModelConfig ConfigOf(const TinyModel& model) {
  const std::string file = model.file();
  auto gguf = Gguf::Parse(file);
  EXPECT_TRUE(gguf.ok()) << gguf.status();
  auto config = ReadModelConfig(*gguf, file);
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

Loaded Load(const TinyModel& model, bool exact, int threads = 2) {
  Loaded out;
  BackendOptions options;
  options.device = "cpu";
  options.num_threads = threads;
  options.exact = exact;
  auto backend = MakeBackend(options);
  EXPECT_TRUE(backend.ok()) << backend.status();
  out.backend = *std::move(backend);
  auto decoder = Decoder::Create(ConfigOf(model), TinySource(model), *out.backend, 128);
  EXPECT_TRUE(decoder.ok()) << decoder.status();
  out.decoder = *std::move(decoder);
  return out;
}

std::vector<int32_t> RandomIds(int count, int vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % static_cast<uint32_t>(vocab));
  return ids;
}

// Differences to the oracle over all logits of all rows: the largest by the largest logit, and root mean squares.
struct Error {
  double worst = 0, mean = 0;
};

Error Compare(const std::vector<std::vector<float>>& got, const std::vector<std::vector<double>>& wanted) {
  double worst = 0, peak = 0, errors = 0, squares = 0;
  for (size_t t = 0; t < wanted.size(); ++t) {
    for (size_t i = 0; i < wanted[t].size(); ++i) {
      const double error = static_cast<double>(got[t][i]) - wanted[t][i];
      worst = std::max(worst, std::abs(error));
      peak = std::max(peak, std::abs(wanted[t][i]));
      errors += error * error;
      squares += wanted[t][i] * wanted[t][i];
    }
  }
  return {worst / peak, std::sqrt(errors / squares)};
}

Error MeasureError(const TinyModel& model, bool exact, bool decode) {
  Loaded loaded = Load(model, exact);
  ModelRunner runner(*loaded.backend, *loaded.decoder, 128);
  const std::vector<int32_t> ids = RandomIds(67, model.vocab_size(), 5);
  const SeqId seq = runner.Open();
  std::vector<std::vector<float>> got;
  if (decode) {
    for (int32_t id : ids) got.push_back(runner.Step({{seq, {id}, true}})[0][0]);
  } else {
    got = runner.Prefill(seq, ids, ids.size());
  }
  return Compare(got, DecoderOracle(model).Logits(ids));
}

struct OracleCase {
  const char* name;
  TinyOptions options;
};

std::vector<OracleCase> OracleCases() {
  std::vector<OracleCase> cases;
  const auto add = [&](const char* name) -> TinyOptions& {
    cases.push_back({name, {}});
    return cases.back().options;
  };
  add("F32");
  add("F16").type = WeightType::kF16;
  add("BF16").type = WeightType::kBF16;
  add("Q8_0").type = WeightType::kQ8_0;
  add("Q4_0").type = WeightType::kQ4_0;
  add("Q4_1").type = WeightType::kQ4_1;
  add("Untied").tied = false;
  add("RopeFactors").rope_factors = true;
  add("Window").window = 9;
  TinyOptions& mixed = add("FineValues");
  mixed.type = WeightType::kQ4_0;
  mixed.fine_values = true;
  TinyOptions& wide = add("HeadSize64");
  wide.head_dim = 64, wide.heads = 3, wide.kv_heads = 1, wide.width = 192, wide.rope_base = 100000.0f;
  TinyOptions& single = add("OneLayerAllHeads");
  single.layers = 1, single.heads = single.kv_heads = 5, single.head_dim = 16;
  return cases;
}

class DecoderOracleTest : public ::testing::TestWithParam<OracleCase> {};

// Exact mode keeps keys and values in f32: only the rounding of f32 sums is left.
TEST_P(DecoderOracleTest, ExactModeEqualsDoublePrecision) {
  const TinyModel model = MakeTinyModel(GetParam().options);
  for (const bool decode : {false, true}) {
    const Error error = MeasureError(model, true, decode);
    EXPECT_LT(error.mean, 2e-6) << "decode " << decode << ", seed " << GetParam().options.seed;
    EXPECT_LT(error.worst, 1e-5) << "decode " << decode << ", seed " << GetParam().options.seed;
  }
}

// The fast kernels round what they multiply, prompt rows to bf16 (8 bits); on random weights such errors are larger
// than on trained ones.
TEST_P(DecoderOracleTest, FastModeIsNear) {
  const TinyModel model = MakeTinyModel(GetParam().options);
  for (const bool decode : {false, true}) {
    const Error error = MeasureError(model, false, decode);
    EXPECT_LT(error.mean, decode ? 1e-3 : 0.02) << "decode " << decode << ", seed " << GetParam().options.seed;
    EXPECT_LT(error.worst, decode ? 1e-2 : 0.1) << "decode " << decode << ", seed " << GetParam().options.seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, DecoderOracleTest, ::testing::ValuesIn(OracleCases()),
                         [](const auto& c) { return std::string(c.param.name); });

bool SameBits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size() || std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) != 0)
      return false;
  }
  return true;
}

// Prompt of 67 rows, then 5 decode rows; logits of all.
struct Reference {
  std::vector<int32_t> prompt, answer;
  std::vector<std::vector<float>> prompt_logits, answer_logits;
};

Reference MakeReference(Loaded& loaded, int vocab, uint32_t seed) {
  Reference r;
  r.prompt = RandomIds(67, vocab, seed);
  r.answer = RandomIds(5, vocab, seed + 1000);
  ModelRunner runner(*loaded.backend, *loaded.decoder, 128);
  const SeqId seq = runner.Open();
  r.prompt_logits = runner.Prefill(seq, r.prompt, r.prompt.size());
  for (int32_t id : r.answer) r.answer_logits.push_back(runner.Step({{seq, {id}, true}})[0][0]);
  return r;
}

class DecoderInvarianceTest : public ::testing::TestWithParam<std::tuple<WeightType, bool>> {
 protected:
  TinyModel model_ = [] {
    TinyOptions options;
    options.type = std::get<0>(GetParam());
    return MakeTinyModel(options);
  }();
  const bool exact_ = std::get<1>(GetParam());
};

TEST_P(DecoderInvarianceTest, ChunksGiveTheSameBits) {
  Loaded loaded = Load(model_, exact_);
  const Reference whole = MakeReference(loaded, model_.vocab_size(), 11);
  for (size_t chunk : {1, 7, 64}) {
    ModelRunner runner(*loaded.backend, *loaded.decoder, 128);
    const SeqId seq = runner.Open();
    EXPECT_TRUE(SameBits(whole.prompt_logits, runner.Prefill(seq, whole.prompt, chunk))) << "chunks of " << chunk;
    std::vector<std::vector<float>> answers;
    for (int32_t id : whole.answer) answers.push_back(runner.Step({{seq, {id}, true}})[0][0]);
    EXPECT_TRUE(SameBits(whole.answer_logits, answers)) << "decode after chunks of " << chunk;
  }
}

TEST_P(DecoderInvarianceTest, ThreadsGiveTheSameBits) {
  Loaded one = Load(model_, exact_, 1);
  const Reference wanted = MakeReference(one, model_.vocab_size(), 12);
  for (int threads : {2, 3}) {
    Loaded many = Load(model_, exact_, threads);
    const Reference got = MakeReference(many, model_.vocab_size(), 12);
    EXPECT_TRUE(SameBits(wanted.prompt_logits, got.prompt_logits)) << threads << " threads";
    EXPECT_TRUE(SameBits(wanted.answer_logits, got.answer_logits)) << threads << " threads";
  }
}

// Five sequences at different stages share every step: some feed chunks of their prompts, others decode.
TEST_P(DecoderInvarianceTest, CompanyGivesTheSameBits) {
  Loaded loaded = Load(model_, exact_);
  std::vector<Reference> alone;
  for (uint32_t i = 0; i < 5; ++i) alone.push_back(MakeReference(loaded, model_.vocab_size(), 20 + i));
  ModelRunner runner(*loaded.backend, *loaded.decoder, 128);
  std::vector<SeqId> seqs;
  std::vector<size_t> fed(5, 0);
  for (size_t i = 0; i < 5; ++i) seqs.push_back(runner.Open());
  std::vector<std::vector<std::vector<float>>> prompts(5), answers(5);
  const std::vector<size_t> chunks = {3, 13, 17, 23, 67};  // so that they reach their answers at different steps
  for (bool busy = true; busy;) {
    std::vector<ModelRunner::Item> items;
    std::vector<size_t> who;
    size_t rows = 0;
    for (size_t i = 0; i < 5; ++i) {
      const Reference& r = alone[i];
      const bool decode = fed[i] >= r.prompt.size();
      const size_t at = decode ? fed[i] - r.prompt.size() : fed[i];
      const size_t count = decode ? size_t{at < r.answer.size()} : std::min(chunks[i], r.prompt.size() - at);
      if (count == 0 || rows + count > 128) continue;
      const auto begin = (decode ? r.answer : r.prompt).begin() + static_cast<std::ptrdiff_t>(at);
      items.push_back({seqs[i], {begin, begin + static_cast<std::ptrdiff_t>(count)}, decode});
      who.push_back(i);
      rows += count;
      fed[i] += count;
    }
    busy = !items.empty();
    if (!busy) break;
    const auto logits = runner.Step(items);
    for (size_t j = 0; j < items.size(); ++j) {
      auto& into = items[j].decode ? answers[who[j]] : prompts[who[j]];
      into.insert(into.end(), logits[j].begin(), logits[j].end());
    }
  }
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_TRUE(SameBits(alone[i].prompt_logits, prompts[i])) << "prompt of sequence " << i;
    EXPECT_TRUE(SameBits(alone[i].answer_logits, answers[i])) << "answer of sequence " << i;
  }
}

// After a preemption generated tokens are computed again, many rows in one step, in the phase decode.
TEST_P(DecoderInvarianceTest, RecomputedAnswersGiveTheSameBits) {
  Loaded loaded = Load(model_, exact_);
  const Reference wanted = MakeReference(loaded, model_.vocab_size(), 31);
  ModelRunner runner(*loaded.backend, *loaded.decoder, 128);
  const SeqId seq = runner.Open();
  runner.Prefill(seq, wanted.prompt, 50);
  const auto again = runner.Step({{seq, wanted.answer, true}});
  EXPECT_TRUE(SameBits(wanted.answer_logits, again[0]));
}

TEST_P(DecoderInvarianceTest, FewerWantedRowsGiveTheSameBits) {
  Loaded loaded = Load(model_, exact_);
  const Reference wanted = MakeReference(loaded, model_.vocab_size(), 41);
  ModelRunner runner(*loaded.backend, *loaded.decoder, 128);
  const SeqId seq = runner.Open();
  const auto last = runner.Step({{seq, wanted.prompt}}, true);
  ASSERT_EQ(last[0].size(), 1u);
  EXPECT_TRUE(SameBits({wanted.prompt_logits.back()}, last[0]));
}

INSTANTIATE_TEST_SUITE_P(Modes, DecoderInvarianceTest,
                         ::testing::Combine(::testing::Values(WeightType::kF32, WeightType::kQ8_0, WeightType::kQ4_1),
                                            ::testing::Bool()),
                         [](const auto& c) {
                           const WeightType type = std::get<0>(c.param);
                           const char* name = type == WeightType::kF32    ? "F32"
                                              : type == WeightType::kQ8_0 ? "Q8_0"
                                                                          : "Q4_1";
                           return std::string(name) + (std::get<1>(c.param) ? "Exact" : "Fast");
                         });

TEST(DecoderTest, SurprisalIsThatOfTheLogits) {
  const TinyModel model = MakeTinyModel(TinyOptions{});
  Loaded loaded = Load(model, true);
  ModelRunner runner(*loaded.backend, *loaded.decoder, 128);
  runner.wants_surprisal = true;
  const std::vector<int32_t> ids = RandomIds(41, model.vocab_size(), 8);
  const auto logits = runner.Prefill(runner.Open(), ids, ids.size());
  ASSERT_EQ(runner.surprisal.size(), 40u);
  for (size_t row = 0; row < 40; ++row) {
    double sum = 0;
    for (const float x : logits[row]) sum += std::exp(static_cast<double>(x));
    const double expected = std::log(sum) - static_cast<double>(logits[row][static_cast<size_t>(ids[row + 1])]);
    EXPECT_NEAR(static_cast<double>(runner.surprisal[row]), expected, 1e-4) << row;
  }
}

TEST(DecoderCreateTest, NamesMissingTensorsAndWrongShapes) {
  BackendOptions options;
  options.num_threads = 1;
  auto backend = MakeBackend(options);
  ASSERT_TRUE(backend.ok()) << backend.status();
  TinyModel model = MakeTinyModel();
  const ModelConfig config = ConfigOf(model);
  TinyModel missing = model;
  missing.writer.RemoveTensor("blk.1.ffn_up.weight");
  auto decoder = Decoder::Create(config, TinySource(missing), **backend, 8);
  ASSERT_EQ(decoder.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(decoder.status().message(), "tensor 'blk.1.ffn_up.weight' is missing; wanted is a shape of [160, 96]");
  TinyModel narrow = model;
  narrow.writer.Find("blk.0.attn_k.weight")->shape = {96, 63};
  decoder = Decoder::Create(config, TinySource(narrow), **backend, 8);
  ASSERT_EQ(decoder.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(decoder.status().message(),
            "tensor 'blk.0.attn_k.weight' has shape [63, 96]; the configuration demands [64, 96]");
}

TEST(DecoderCreateTest, ReleasesEveryTensorOnceAndReportsProgress) {
  BackendOptions options;
  options.num_threads = 1;
  auto backend = MakeBackend(options);
  ASSERT_TRUE(backend.ok()) << backend.status();
  const TinyModel model = MakeTinyModel();
  const TinySource source(model);
  std::vector<double> shares;
  auto decoder = Decoder::Create(ConfigOf(model), source, **backend, 8, [&](double share) { shares.push_back(share); });
  ASSERT_TRUE(decoder.ok()) << decoder.status();
  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  ASSERT_FALSE(shares.empty());
  EXPECT_DOUBLE_EQ(shares.back(), 1.0);
  std::vector<std::string> released = source.released, all;
  for (const auto& t : model.writer.tensors) all.push_back(t.name);
  std::sort(released.begin(), released.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(released, all);
  EXPECT_GT((*decoder)->weight_bytes(), 0);
  EXPECT_EQ((*decoder)->weight_bytes(), (*decoder)->weight_bytes_per_step());  // tied: the table is read as the head
}

}  // namespace
}  // namespace loupe
