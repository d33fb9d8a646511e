// A GPU that fails for good in the middle of a step: what runs and waits ends with UNAVAILABLE, nothing new is let in, and
// the reason stands in the statistics, which /livez and the exit code follow. A program of its own: the device stays failed
// for the process.
#include <gtest/gtest.h>

#include "engine/bench/random_model.h"
#include "engine/engine_core.h"
#include "engine/step_model.h"
#include "tests/kernels/target.h"
#include "tests/sim/fake_model.h"

namespace loupe {
namespace {

// Memory that is nobody's.
class NoMemory : public DeviceBuffer {
 public:
  void* data() const override { return reinterpret_cast<void*>(4096); }
  int64_t bytes() const override { return 1 << 20; }
};

// A real pass that reads where nothing is in its fifth step.
class FailingModel : public StepModel {
 public:
  FailingModel(Decoder& decoder, Backend& backend) : backend_(backend), model_(MakeStepModel(decoder, backend)) {}
  void Forward(const DecoderStep& step, Stream& stream) override {
    if (++steps == 5) backend_.ReadMemory(NoMemory(), 1 << 20, stream);
    model_->Forward(step, stream);
  }
  KvShape kv_shape() const override { return model_->kv_shape(); }
  int vocab_size() const override { return model_->vocab_size(); }
  int max_context() const override { return 512; }
  int64_t weight_bytes() const override { return model_->weight_bytes(); }
  int64_t weight_bytes_per_step() const override { return model_->weight_bytes_per_step(); }

  int steps = 0;

 private:
  Backend& backend_;
  std::unique_ptr<StepModel> model_;
};

Request Ask(const std::string& id) {
  Request request;
  request.id = id;
  for (int i = 0; i < 20; ++i) request.prompt.push_back(1 + i);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = 100;
  request.sampling.ignore_eos = true;
  return request;
}

TEST(GpuFault, EndsWhatRunsAndRefusesWhatComes) {
  if (!testing::BuiltWithCuda()) GTEST_SKIP() << "this build has no CUDA backend";
  EngineConfig config;
  config.backend.device = "cuda";
  config.max_step_tokens = 64;
  auto loaded = MakeRandomModel("smollm2-135m", config);
  if (!loaded.ok()) GTEST_SKIP() << loaded.status().ToString();
  FailingModel model(*loaded->decoder, *loaded->backend);
  FakeTokenizer tokenizer;
  FakeClock clock;
  CoreLimits limits;
  limits.kv_device_bytes = int64_t{64} << 20;
  limits.max_context = 512;
  limits.max_sequences = 1;
  limits.max_step_rows = 64;
  limits.max_queue = 3;
  auto core = *EngineCore::Create(limits, {loaded->backend.get(), &model, &tokenizer, nullptr, &clock, 1});
  const auto running = *core->Submit(Ask("runs")), waiting = *core->Submit(Ask("waits"));
  for (int i = 0; i < 10; ++i) core->Step();
  EXPECT_EQ(model.steps, 5) << "nothing is computed on a failed device";
  for (const auto& stream : {running, waiting}) {
    std::optional<Finished> finished;
    int tokens = 0;
    while (auto event = stream->TryNext()) {
      if (auto* delta = std::get_if<Delta>(&*event)) tokens += static_cast<int>(delta->token_ids.size());
      if (auto* end = std::get_if<Finished>(&*event)) finished = *end;
    }
    ASSERT_TRUE(finished.has_value());
    EXPECT_EQ(finished->reason, FinishReason::kError);
    EXPECT_TRUE(absl::IsUnavailable(finished->error)) << finished->error;
    EXPECT_EQ(tokens, stream == running ? 4 : 0);
  }
  EXPECT_TRUE(absl::IsUnavailable(core->Submit(Ask("comes")).status()));
  EXPECT_FALSE(core->queue().Stats().failure.empty());
  EXPECT_EQ(core->cache().Stats().resident_bytes, 0);
}

}  // namespace
}  // namespace loupe
