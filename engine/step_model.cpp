#include "engine/step_model.h"

#include <map>
#include <tuple>
#include <utility>

namespace loupe {
namespace {

// Decode steps are recorded once for every number of rows and replayed from then on, where the backend knows how: the host
// then gives the device one thing to do in place of hundreds.
class DecoderStepModel : public StepModel {
 public:
  DecoderStepModel(Decoder& decoder, std::unique_ptr<Decoder> owned, Backend& backend)
      : owned_(std::move(owned)), decoder_(&decoder), backend_(backend), records_(!backend.Info().host_memory) {}

  void Forward(const DecoderStep& step, Stream& stream) override {
    if (!records_ || !step.batch->recordable()) return decoder_->Forward(step, stream);
    const auto [rows_place, pages_place] = step.batch->place();
    const bool advances = step.batch->only_advances();  // then the recording begins the step, too
    const Key key(step.ids.rows(), step.batch->num_items, step.logit_rows.rows(), step.ids.data, step.logits.data, rows_place, pages_place,
                  advances);
    Recording& recording = recordings_[key];
    if (!advances) step.cache->Begin(*step.batch, stream);
    if (recording.runs++ == 1) {
      recording.graph = backend_.Record([&] { decoder_->Forward(step, stream); }, stream);
      if (recording.graph) graph_bytes_ += recording.graph->bytes();
      step.cache->SetRun(*step.batch, false);
    }
    if (!recording.graph) return decoder_->Forward(step, stream);
    step.cache->SetRun(*step.batch, true);
    recording.graph->Launch(stream);
  }

  KvShape kv_shape() const override { return decoder_->kv_shape(); }
  int vocab_size() const override { return decoder_->config().vocab_size; }
  int max_context() const override { return decoder_->config().max_context; }
  int64_t weight_bytes() const override { return decoder_->weight_bytes(); }
  int64_t weight_bytes_per_step() const override { return decoder_->weight_bytes_per_step(); }
  int64_t graph_bytes() const override { return graph_bytes_; }

 private:
  // Rows, sequences, rows with logits, where the inputs and outputs lie, and whether the last step's arrays are moved on.
  using Key = std::tuple<int64_t, int, int64_t, const void*, const void*, const void*, const void*, bool>;
  struct Recording {
    int runs = 0;
    std::unique_ptr<OpGraph> graph;
  };

  std::unique_ptr<Decoder> owned_;  // or null
  Decoder* decoder_;
  Backend& backend_;
  const bool records_;
  std::map<Key, Recording> recordings_;
  int64_t graph_bytes_ = 0;
};

}  // namespace

std::unique_ptr<StepModel> MakeStepModel(std::unique_ptr<Decoder> decoder, Backend& backend) {
  Decoder& there = *decoder;
  return std::make_unique<DecoderStepModel>(there, std::move(decoder), backend);
}
std::unique_ptr<StepModel> MakeStepModel(Decoder& decoder, Backend& backend) {
  return std::make_unique<DecoderStepModel>(decoder, nullptr, backend);
}

}  // namespace loupe
