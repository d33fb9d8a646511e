// What calibrations measure on: contexts and rows that go on from them, and how far a changed pass predicts these rows
// differently. Pure but for reading files; any thread.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/eval/items.h"
#include "engine/text/tokenizer.h"
#include "kvcache/policies/policy.h"

namespace loupe {

// A context, and rows that go on from it. Row i is ids[context + i] and predicts ids[context + i + 1].
struct CalibrationPrompt {
  std::string id;            // part of a cell's key
  std::vector<int32_t> ids;  // one more than context + rows
  int context = 0;
  std::vector<bool> counted;  // [rows] whose outputs and predictions matter: all of a text, the answer's of an item

  int rows() const { return static_cast<int>(counted.size()); }
  // Indexes of the rows that count.
  std::vector<int32_t> CountedRows() const;
};

// `count` windows of running text, all of whose rows count. Errors as CutWindows'.
absl::StatusOr<std::vector<CalibrationPrompt>> TextPrompts(const std::string& folder, const Tokenizer& tokenizer, int context,
                                                           int continuation, int count, uint64_t seed);
// Items with a hidden fact: the rows are question and answer, those count that predict the answer. INVALID_ARGUMENT: an item
// has too little context to learn from, or more than `max_rows` rows.
absl::StatusOr<std::vector<CalibrationPrompt>> ItemPrompts(std::span<const EvalItem> items, const Tokenizer& tokenizer, int max_rows);
// Tells sets of prompts apart, as 16 hex digits (FNV-1a over all tokens).
std::string HashOfPrompts(std::span<const CalibrationPrompt> texts, std::span<const CalibrationPrompt> items);

// What the full cache says of the rows that count; logits are [counted][V].
struct Reference {
  std::vector<std::vector<float>> probability;  // [counted][V]
  std::vector<double> negative_entropy;         // sum of p log p
  std::vector<double> nll;
};
Reference Refer(const CalibrationPrompt& prompt, std::span<const float> logits);

// Means over counted rows.
struct Change {
  double kl = 0;   // KL(full || changed), nats
  double nll = 0;  // of the token that follows, changed minus full
};
// `threads` share the rows; their number changes no bit.
Change Compare(const CalibrationPrompt& prompt, const Reference& reference, std::span<const float> logits, int threads);

// Calls work(i) for every i below `count`, spread over threads.
void InParallel(int threads, size_t count, const std::function<void(size_t)>& work);

// Keeps everything, and calls back with what it asked to see at the end of the prompt.
class Onlooker final : public Policy {
 public:
  using Callback = std::function<void(const SequenceView&)>;
  explicit Onlooker(const Signals& signals, Callback callback = {}) : signals_(signals), callback_(std::move(callback)) {}
  std::string_view name() const override { return "onlooker"; }
  Signals signals() const override { return signals_; }
  void AfterPrefill(const SequenceView& sequence, std::vector<ListAction>*) const override {
    if (callback_) callback_(sequence);
  }
  void AfterDecode(const SequenceView&, std::vector<ListAction>*) const override {}

 private:
  Signals signals_;
  Callback callback_;
};

// Keeps what it was told to.
class Told final : public Policy {
 public:
  explicit Told(std::vector<ListAction> actions) : actions_(std::move(actions)) {}
  std::string_view name() const override { return "told"; }
  void AfterPrefill(const SequenceView&, std::vector<ListAction>* actions) const override { *actions = actions_; }
  void AfterDecode(const SequenceView&, std::vector<ListAction>*) const override {}

 private:
  std::vector<ListAction> actions_;
};

}  // namespace loupe
