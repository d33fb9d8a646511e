// The whole pass on the GPU against the CPU's f32 path: the same tokens through both, logits of every row compared.
// Takes the model of LOUPE_TEST_MODEL (a GGUF file) on text if that is set, else one of random weights in the default
// model's shape on random tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "engine/bench/random_model.h"
#include "engine/step_model.h"
#include "kernels/mirrored_buffer.h"
#include "tests/kernels/target.h"

namespace loupe {
namespace {

constexpr int kMaxRows = 256;
constexpr double kMeanKl = 5e-4;       // nats, GPU to CPU
constexpr float kCloseLogits = 0.05f;  // a greedy token may differ if the CPU's two best are closer than this

absl::StatusOr<LoadedModel> Load(const std::string& device, bool exact, bool deterministic = false) {
  EngineConfig config;
  config.backend.device = device;
  config.backend.exact = exact;
  config.backend.deterministic = deterministic;
  config.max_step_tokens = kMaxRows;
  const char* path = std::getenv("LOUPE_TEST_MODEL");
  return path ? LoadModel(path, config) : MakeRandomModel("smollm2-135m", config);
}

// Sequences of tokens through the step model, as the engine drives it.
class Pass {
 public:
  explicit Pass(LoadedModel model)
      : model_(std::move(model)),
        stream_(model_.backend->NewStream()),
        step_(MakeStepModel(*model_.decoder, *model_.backend)) {
    KvConfig config;
    config.device_bytes = int64_t{512} << 20;
    config.max_step_rows = kMaxRows;
    auto cache = KvCache::Create(config, model_.decoder->kv_shape(), *model_.backend);
    LOUPE_CHECK(cache.ok()) << cache.status().ToString();
    cache_ = *std::move(cache);
  }
  int vocab() const { return model_.config.vocab_size; }
  const Tokenizer* tokenizer() const { return model_.tokenizer.get(); }
  SeqId Open() { return *cache_->Open(); }

  // Rows of one phase, one run of tokens a sequence; logits of all rows.
  std::vector<std::vector<float>> Run(const std::vector<std::pair<SeqId, std::vector<int32_t>>>& items, bool prompt) {
    std::vector<KvStepItem> plan;
    std::vector<int32_t> ids;
    for (const auto& [seq, tokens] : items) {
      const int n = static_cast<int>(tokens.size());
      plan.push_back({seq, prompt ? n : 0, prompt ? 0 : n, false});
      ids.insert(ids.end(), tokens.begin(), tokens.end());
    }
    const auto rows = static_cast<int64_t>(ids.size());
    Backend& backend = *model_.backend;
    for (MirroredBuffer* b : {&ids_, &rows_}) LOUPE_CHECK(b->Ensure(backend, 4 * kMaxRows).ok());
    LOUPE_CHECK(logits_.Ensure(backend, int64_t{4} * kMaxRows * vocab()).ok());
    LOUPE_CHECK(cache_->Reserve(plan, &batch_).ok());
    std::copy(ids.begin(), ids.end(), ids_.host<int32_t>());
    for (int32_t i = 0; i < rows; ++i) rows_.host<int32_t>()[i] = i;
    ids_.Upload(backend, 0, 4 * rows, *stream_);
    rows_.Upload(backend, 0, 4 * rows, *stream_);
    DecoderStep step;
    step.ids = MakeTensor(ids_.device<int32_t>(), DType::kI32, rows);
    step.cache = cache_.get();
    step.batch = &batch_;
    step.logit_rows = MakeTensor(rows_.device<int32_t>(), DType::kI32, rows);
    step.logit_prompt_rows = prompt ? static_cast<int>(rows) : 0;
    step.logits = MakeTensor(logits_.device<float>(), DType::kF32, rows, vocab());
    step.logits.rank = 2;
    step_->Forward(step, *stream_);
    logits_.Download(backend, 0, rows * 4 * vocab(), *stream_);
    cache_->Commit(batch_, *stream_);
    const absl::Status status = stream_->Synchronize();
    LOUPE_CHECK(status.ok()) << status.ToString();
    std::vector<std::vector<float>> out;
    for (int64_t i = 0; i < rows; ++i) {
      const float* row = logits_.host<float>() + i * vocab();
      out.emplace_back(row, row + vocab());
    }
    return out;
  }

 private:
  LoadedModel model_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<StepModel> step_;
  std::unique_ptr<KvCache> cache_;
  KvBatch batch_;
  MirroredBuffer ids_, rows_, logits_;
};

double LogSum(const std::vector<float>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const float v : x) sum += std::exp(v - top);
  return top + std::log(sum);
}
double Kl(const std::vector<float>& p, const std::vector<float>& q) {
  const double zp = LogSum(p), zq = LogSum(q);
  double kl = 0;
  for (size_t i = 0; i < p.size(); ++i) kl += std::exp(p[i] - zp) * ((p[i] - zp) - (q[i] - zq));
  return kl;
}

class Agreement {
 public:
  void Add(const std::vector<std::vector<float>>& want, const std::vector<std::vector<float>>& got) {
    ASSERT_EQ(want.size(), got.size());
    for (size_t i = 0; i < want.size(); ++i) {
      for (const float x : got[i]) ASSERT_TRUE(std::isfinite(x)) << "row " << rows_;
      sum_ += Kl(want[i], got[i]);
      const auto best = std::max_element(want[i].begin(), want[i].end()) - want[i].begin();
      const auto chosen = std::max_element(got[i].begin(), got[i].end()) - got[i].begin();
      EXPECT_TRUE(best == chosen ||
                  want[i][static_cast<size_t>(best)] - want[i][static_cast<size_t>(chosen)] < kCloseLogits)
          << "row " << rows_ << ": " << best << " against " << chosen;
      differ_ += best != chosen;
      ++rows_;
    }
  }
  void Expect() const {
    std::printf("mean KL %.2e nats over %d rows, %d greedy tokens differ\n", sum_ / rows_, rows_, differ_);
    EXPECT_LE(sum_ / rows_, kMeanKl);
  }

 private:
  double sum_ = 0;
  int rows_ = 0, differ_ = 0;
};

// Text for a model that knows one, which `seed` chooses where to begin; else random tokens.
std::vector<int32_t> Tokens(int n, const Pass& pass, unsigned seed) {
  std::vector<int32_t> ids;
  if (const Tokenizer* tokenizer = pass.tokenizer()) {
    std::ifstream file("docs/kvcache.md");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    LOUPE_CHECK(!text.empty()) << "no docs/kvcache.md; run this from the repository's root";
    ids = tokenizer->Encode(text, false, false);
    ids.erase(ids.begin(), ids.begin() + 300 * static_cast<int>(seed));
    LOUPE_CHECK(static_cast<int>(ids.size()) >= n) << ids.size() << " tokens of text";
    ids.resize(static_cast<size_t>(n));
    return ids;
  }
  std::mt19937 random(seed);
  for (int i = 0; i < n; ++i) ids.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(pass.vocab())));
  return ids;
}

class GpuModel : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::BuiltWithCuda()) GTEST_SKIP() << "this build has no CUDA backend";
    if (const auto backend = testing::TryBackend("cuda", false, 1); !backend.ok())
      GTEST_SKIP() << backend.status().ToString();
  }
};

// A prompt in chunks, then decode steps (recorded from the second on) with a second sequence joining half way.
TEST_F(GpuModel, LogitsEqualTheCpus) {
  for (const bool exact : {false, true}) {
    SCOPED_TRACE(exact ? "exact" : "fast");
    Pass cpu(*Load("cpu", true)), gpu(*Load("cuda", exact));
    Agreement agreement;
    const std::vector<int32_t> a = Tokens(300, cpu, 1), b = Tokens(70, cpu, 2);
    const SeqId cpu_a = cpu.Open(), gpu_a = gpu.Open(), cpu_b = cpu.Open(), gpu_b = gpu.Open();
    for (int at = 0; at < 250; at += 125) {
      const std::vector<int32_t> chunk(a.begin() + at, a.begin() + at + 125);
      agreement.Add(cpu.Run({{cpu_a, chunk}}, true), gpu.Run({{gpu_a, chunk}}, true));
    }
    for (int i = 250; i < 270; ++i) agreement.Add(cpu.Run({{cpu_a, {a[i]}}}, false), gpu.Run({{gpu_a, {a[i]}}}, false));
    const std::vector<int32_t> prompt(b.begin(), b.begin() + 40);
    agreement.Add(cpu.Run({{cpu_b, prompt}}, true), gpu.Run({{gpu_b, prompt}}, true));
    for (int i = 0; i < 30; ++i) {
      agreement.Add(cpu.Run({{cpu_a, {a[270 + i]}}, {cpu_b, {b[40 + i]}}}, false),
                    gpu.Run({{gpu_a, {a[270 + i]}}, {gpu_b, {b[40 + i]}}}, false));
    }
    agreement.Expect();
  }
}

TEST_F(GpuModel, DeterministicStepsHaveTheSameBitsInCompany) {
  Pass alone(*Load("cuda", false, true)), together(*Load("cuda", false, true));
  const std::vector<int32_t> a = Tokens(120, alone, 3), b = Tokens(120, alone, 4);
  const SeqId x = alone.Open(), y = together.Open(), z = together.Open();
  const std::vector<int32_t> prompt_a(a.begin(), a.begin() + 90), prompt_b(b.begin(), b.begin() + 33);
  const auto first = alone.Run({{x, prompt_a}}, true), second = together.Run({{z, prompt_b}, {y, prompt_a}}, true);
  for (size_t i = 0; i < first.size(); ++i) ASSERT_EQ(first[i], second[33 + i]) << "prompt row " << i;
  for (int i = 90; i < 120; ++i) {
    const auto one = alone.Run({{x, {a[i]}}}, false), two = together.Run({{z, {b[i - 57]}}, {y, {a[i]}}}, false);
    ASSERT_EQ(one[0], two[1]) << "decode row " << i;
  }
}

}  // namespace
}  // namespace loupe
