#include "engine/step_model.h"

#include <utility>

namespace loupe {
namespace {

class DecoderStepModel : public StepModel {
 public:
  explicit DecoderStepModel(std::unique_ptr<Decoder> decoder) : decoder_(std::move(decoder)) {}
  void Forward(const DecoderStep& step, Stream& stream) override { decoder_->Forward(step, stream); }
  KvShape kv_shape() const override { return decoder_->kv_shape(); }
  int vocab_size() const override { return decoder_->config().vocab_size; }
  int max_context() const override { return decoder_->config().max_context; }
  int64_t weight_bytes() const override { return decoder_->weight_bytes(); }
  int64_t weight_bytes_per_step() const override { return decoder_->weight_bytes_per_step(); }

 private:
  std::unique_ptr<Decoder> decoder_;
};

}  // namespace

std::unique_ptr<StepModel> MakeStepModel(std::unique_ptr<Decoder> decoder) {
  return std::make_unique<DecoderStepModel>(std::move(decoder));
}

}  // namespace loupe
