// What one list's codes or share cost a model's predictions, measured on one prompt at a time: the list's entries are
// replaced by what their codes stand for, and the pass is run again from that layer upward. One thread drives the model.
#pragma once

#include <memory>
#include <vector>

#include "engine/calibrate/prompts.h"
#include "engine/eval/eval_runner.h"
#include "kvcache/policies/spherical_profile.h"

namespace loupe {

class SphericalProbe {
 public:
  // Prompts have at most `tokens` tokens and `rows` rows after their context.
  static absl::StatusOr<std::unique_ptr<SphericalProbe>> Create(LoadedModel& model, int tokens, int rows, int chunk);
  ~SphericalProbe();

  // [layers * G, D] mean of the context's keys, sinks apart.
  absl::StatusOr<std::vector<float>> MeanKeys(const CalibrationPrompt& prompt);

  // The prompt that is measured from now on; it outlives that.
  absl::Status Begin(const CalibrationPrompt& prompt);
  // Costs of the layer's lists. `mean_keys` as above, of all prompts.
  absl::StatusOr<std::vector<ListCosts>> Measure(int layer, std::span<const float> mean_keys);
  void End();

 private:
  explicit SphericalProbe(LoadedModel& model) : model_(model) {}
  absl::StatusOr<SeqId> Collect(const CalibrationPrompt& prompt, const Onlooker::Callback& look);
  absl::StatusOr<double> Cost(int layer, int kv_head, const std::vector<float>& keys, const std::vector<float>& values,
                              const std::vector<int32_t>* keep);
  std::vector<float> RowsOf(const std::vector<std::vector<float>>& all, int layer, int kv_head) const;

  LoadedModel& model_;
  int chunk_ = 0;
  std::unique_ptr<EvalRunner> runner_;
  // Of the prompt under measurement.
  const CalibrationPrompt* prompt_ = nullptr;
  SeqId full_;
  std::vector<std::vector<float>> keys_, values_;            // [layers][context, G, D]
  std::vector<std::vector<std::vector<int32_t>>> kept_;      // [lists][shares] entries
  std::vector<std::vector<char>> residuals_;
  std::vector<int32_t> counted_;
  Reference reference_;
};

}  // namespace loupe
