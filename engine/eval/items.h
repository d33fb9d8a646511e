// `loupe eval items`: questions about a context, answered from what a policy kept of it. Each context is computed once;
// each policy acts on a copy; question and answer are then fed token by token to all copies side by side. The gold
// answer is teacher-forced for its likelihood, and an answer is decoded greedily for recall.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/eval/eval_runner.h"
#include "engine/eval/result_file.h"
#include "engine/eval/statistics.h"

namespace loupe {

// One line of an items file.
struct EvalItem {
  std::string id, task, group;  // items of one group share a context
  std::string context, question, answer_prefix;
  std::vector<std::string> answers;
  std::string scoring;  // contains_all | contains_any | first_word | lcp_words; others are judged by likelihood alone
  int max_new_tokens = 24;
};

// INVALID_ARGUMENT names file, line and field. `limit` 0: all.
absl::StatusOr<std::vector<EvalItem>> ReadItems(const std::string& path, int limit);

// 0 to 1: whether an answer names what was asked for. A name counts only as a whole: no letter or digit on either side.
double ScoreAnswer(const EvalItem& item, const std::string& answer);
// What the model would have said: the answers joined, with the space that the prefix lacks.
std::string GoldText(const EvalItem& item);

struct ItemsOptions {
  std::vector<EvalItem> items;
  bool question_inside = false;  // the policy has seen the question when it acts
  int chunk = 512;
  std::string model_id;
};

struct TaskScore {
  int items = 0;
  double recall = 0, recall_full = 0;  // mean scores
  double gold_nll = 0, gold_nll_full = 0;
  int kept = 0, full = 0;  // items that the full cache answers, and of them those that the policy still answers
};
struct ItemsResult {
  std::string label;
  int items = 0;
  double bytes_ratio = 0;
  double gold_nll = 0, gold_nll_full = 0;  // nats a token of the gold answer
  double recall = 0, recall_full = 0;
  double recall_relative = 0;  // of the items that the full cache answers, the share that the policy still answers
  int kept = 0, full = 0;
  Interval recall_ci95;  // of recall_relative, contexts resampled
  std::map<std::string, TaskScore> by_task;
  double seconds = 0;
};

absl::StatusOr<std::vector<ItemsResult>> EvalItems(LoadedModel& model, const std::vector<EvalPolicy>& policies,
                                                   const ItemsOptions& options, ResultFile& results,
                                                   const EvalProgress& progress);

}  // namespace loupe
