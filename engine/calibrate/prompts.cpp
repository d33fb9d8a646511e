#include "engine/calibrate/prompts.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/eval/result_file.h"
#include "engine/eval/text_windows.h"

namespace loupe {
namespace {

constexpr int kLeastContext = 128;  // tokens of an item, below which nothing can be learnt from it

double LogSum(std::span<const float> x) {
  const float highest = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const float v : x) sum += double{std::exp(v - highest)};
  return std::log(sum) + double{highest};
}

// Of each counted row, the token that follows it.
std::vector<int32_t> Followers(const CalibrationPrompt& prompt) {
  std::vector<int32_t> ids;
  for (const int32_t row : prompt.CountedRows()) ids.push_back(prompt.ids[static_cast<size_t>(prompt.context + row) + 1]);
  return ids;
}

}  // namespace

std::vector<int32_t> CalibrationPrompt::CountedRows() const {
  std::vector<int32_t> out;
  for (size_t row = 0; row < counted.size(); ++row) {
    if (counted[row]) out.push_back(static_cast<int32_t>(row));
  }
  return out;
}

absl::StatusOr<std::vector<CalibrationPrompt>> TextPrompts(const std::string& folder, const Tokenizer& tokenizer, int context,
                                                           int continuation, int count, uint64_t seed) {
  const auto windows = CutWindows(folder, tokenizer, context + continuation + 1, count, seed);
  if (!windows.ok()) return windows.status();
  std::vector<CalibrationPrompt> prompts;
  for (const TextWindow& window : *windows) {
    prompts.push_back({absl::StrCat(window.file, "@", window.first, " ", Fingerprint(window.ids)), window.ids, context,
                       std::vector<bool>(static_cast<size_t>(continuation), true)});
  }
  return prompts;
}

absl::StatusOr<std::vector<CalibrationPrompt>> ItemPrompts(std::span<const EvalItem> items, const Tokenizer& tokenizer, int max_rows) {
  std::vector<CalibrationPrompt> prompts;
  for (const EvalItem& item : items) {
    CalibrationPrompt prompt;
    prompt.id = absl::StrCat("item ", item.id, " of ", item.context.size(), " bytes");
    prompt.ids = tokenizer.Encode(item.context, false, false);
    prompt.context = static_cast<int>(prompt.ids.size());
    const std::vector<int32_t> asked = tokenizer.Encode(item.question + item.answer_prefix, false, false);
    const std::vector<int32_t> gold = tokenizer.Encode(GoldText(item), false, false);
    prompt.ids.insert(prompt.ids.end(), asked.begin(), asked.end());
    prompt.ids.insert(prompt.ids.end(), gold.begin(), gold.end());
    absl::StrAppend(&prompt.id, " ", Fingerprint(prompt.ids));
    // The row before each token of the answer predicts it.
    prompt.counted.assign(asked.size() + gold.size() - 1, false);
    for (size_t i = std::max<size_t>(asked.size(), 1) - 1; i < prompt.counted.size(); ++i) prompt.counted[i] = true;
    if (item.answers.empty()) return absl::InvalidArgumentError(absl::StrCat("--items: ", item.id, " has no answer"));
    if (prompt.context <= kLeastContext) {
      return absl::InvalidArgumentError(absl::StrCat("--items: ", item.id, " has ", prompt.context,
                                                     " tokens of context, must have more than ", kLeastContext));
    }
    if (prompt.rows() > max_rows) {
      return absl::InvalidArgumentError(absl::StrCat("--items: ", item.id, " has ", prompt.rows(),
                                                     " tokens of question and answer, at most ", max_rows, " are taken"));
    }
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

std::string HashOfPrompts(std::span<const CalibrationPrompt> texts, std::span<const CalibrationPrompt> items) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const auto& prompts : {texts, items}) {
    for (const CalibrationPrompt& prompt : prompts) {
      for (const int32_t id : prompt.ids) hash = (hash ^ static_cast<uint32_t>(id)) * 1099511628211u;
    }
  }
  return absl::StrFormat("%016x", hash);
}

Reference Refer(const CalibrationPrompt& prompt, std::span<const float> logits) {
  Reference reference;
  const std::vector<int32_t> next = Followers(prompt);
  const size_t vocab = logits.size() / next.size();
  for (size_t number = 0; number < next.size(); ++number) {
    const std::span<const float> row = logits.subspan(number * vocab, vocab);
    const double sum = LogSum(row);
    std::vector<float>& p = reference.probability.emplace_back();
    double entropy = 0;
    for (const float x : row) {
      const double log_p = double{x} - sum;
      p.push_back(static_cast<float>(std::exp(log_p)));
      entropy += double{p.back()} * log_p;
    }
    reference.negative_entropy.push_back(entropy);
    reference.nll.push_back(sum - double{row[static_cast<size_t>(next[number])]});
  }
  return reference;
}

// KL = sum of p (log p - log q), log q = x - log sum exp x, sum of p = 1.
Change Compare(const CalibrationPrompt& prompt, const Reference& reference, std::span<const float> logits, int threads) {
  const std::vector<int32_t> next = Followers(prompt);
  const size_t vocab = logits.size() / next.size();
  std::vector<Change> rows(next.size());
  InParallel(threads, rows.size(), [&](size_t number) {
    const std::span<const float> row = logits.subspan(number * vocab, vocab);
    const double sum = LogSum(row);
    const std::vector<float>& p = reference.probability[number];
    double expected = 0, all = 0;
    for (size_t i = 0; i < row.size(); ++i) expected += double{p[i]} * double{row[i]}, all += double{p[i]};
    rows[number].kl = reference.negative_entropy[number] - expected + all * sum;
    rows[number].nll = sum - double{row[static_cast<size_t>(next[number])]} - reference.nll[number];
  });
  Change mean;
  for (const Change& row : rows) {
    mean.kl += row.kl / static_cast<double>(rows.size());
    mean.nll += row.nll / static_cast<double>(rows.size());
  }
  return mean;
}

void InParallel(int threads, size_t count, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next{0};
  const auto some = [&] {
    for (size_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads && static_cast<size_t>(t) < count; ++t) others.emplace_back(some);
  some();
  for (std::thread& thread : others) thread.join();
}

}  // namespace loupe
