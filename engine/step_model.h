// What the step loop needs of a model: one pass over a batch. The decoder implements it; simulations script it.
#pragma once

#include <cstdint>

#include "engine/model/decoder.h"
#include "kernels/backend.h"
#include "kvcache/kv_cache.h"

namespace loupe {

class StepModel {
 public:
  virtual ~StepModel() = default;
  virtual KvShape kv_shape() const = 0;
  virtual int vocab_size() const = 0;
  virtual int64_t weight_bytes() const = 0;
  virtual int64_t weight_bytes_per_step() const = 0;
  // Writes keys and values of all rows into the cache and the logits of the wanted rows.
  virtual void Forward(const DecoderStep& step, Stream& stream) = 0;
};

class DecoderStepModel : public StepModel {
 public:
  explicit DecoderStepModel(Decoder& decoder) : decoder_(decoder) {}
  KvShape kv_shape() const override { return decoder_.kv_shape(); }
  int vocab_size() const override { return decoder_.config().vocab_size; }
  int64_t weight_bytes() const override { return decoder_.weight_bytes(); }
  int64_t weight_bytes_per_step() const override { return decoder_.weight_bytes_per_step(); }
  void Forward(const DecoderStep& step, Stream& stream) override { decoder_.Forward(step, stream); }

 private:
  Decoder& decoder_;
};

}  // namespace loupe
