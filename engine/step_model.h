// The model pass as the engine sees it: narrow, so that simulations replace it by a script. Step thread only.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/model/decoder.h"
#include "kernels/backend.h"
#include "kvcache/kv_config.h"

namespace loupe {

class StepModel {
 public:
  virtual ~StepModel() = default;
  // One pass: keys and values of the rows go into the cache, the wanted logits into step.logits. Cannot fail.
  virtual void Forward(const DecoderStep& step, Stream& stream) = 0;
  virtual KvShape kv_shape() const = 0;
  virtual int vocab_size() const = 0;
  virtual int max_context() const = 0;
  virtual int64_t weight_bytes() const = 0;           // resident
  virtual int64_t weight_bytes_per_step() const = 0;  // read by one pass
  virtual int64_t graph_bytes() const { return 0; }   // device memory of recorded steps
};

// The real one. Takes the decoder over; the backend, which it was made from, outlives it.
std::unique_ptr<StepModel> MakeStepModel(std::unique_ptr<Decoder> decoder, Backend& backend);
// The same around a decoder that somebody else keeps alive.
std::unique_ptr<StepModel> MakeStepModel(Decoder& decoder, Backend& backend);

}  // namespace loupe
