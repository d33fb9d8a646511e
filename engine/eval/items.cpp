#include "engine/eval/items.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What one item says of one policy, or of the full cache.
struct Cell {
  double score = 0;
  double gold_nll = 0;  // a token
  double bytes_ratio = 0;
  double seconds = 0;
  std::string answer;
};

std::string CellKey(const ItemsOptions& o, const EvalItem& item, const std::string& label) {
  std::string content = absl::StrCat(item.context, "\n", item.question, "\n", item.answer_prefix, "\n", item.scoring, "\n",
                                     item.max_new_tokens);
  for (const std::string& answer : item.answers) absl::StrAppend(&content, "\n", answer);
  return absl::StrCat("items|", o.model_id, "|", item.id, " ", Fingerprint(content), "|", item.context.size(), "|",
                      o.question_inside ? "inside" : "outside", "|chunk ", o.chunk, "|", label);
}
constexpr char kFullLabel[] = "full cache";

nlohmann::json ToJson(const Cell& c) {
  return {{"score", c.score},
          {"gold_nll", c.gold_nll},
          {"bytes_ratio", c.bytes_ratio},
          {"seconds", c.seconds},
          {"answer", c.answer}};
}
absl::StatusOr<Cell> FromJson(const nlohmann::json& j) {
  try {
    return Cell{j.at("score"), j.at("gold_nll"), j.at("bytes_ratio"), j.at("seconds"), j.at("answer")};
  } catch (const nlohmann::json::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("a cell of the results file cannot be read: ", e.what()));
  }
}

// An item as tokens.
struct TokenItem {
  std::vector<int32_t> compressed;  // what the policy has seen when it acts
  std::vector<int32_t> rest;        // up to the answer
  std::vector<int32_t> gold;
  int longest() const { return static_cast<int>(compressed.size() + rest.size() + gold.size()); }
};

TokenItem Tokenise(const EvalItem& item, bool question_inside, const Tokenizer& tokenizer) {
  TokenItem t;
  const auto append = [&](const std::string& text, std::vector<int32_t>* to) {
    const std::vector<int32_t> ids = tokenizer.Encode(text, false, false);
    to->insert(to->end(), ids.begin(), ids.end());
  };
  append(item.context, &t.compressed);
  append(item.question, question_inside ? &t.compressed : &t.rest);
  append(item.answer_prefix, &t.rest);
  append(GoldText(item), &t.gold);
  return t;
}

// Question, gold answer and greedy answer of one item, for all copies of its context side by side.
class AnswerRun {
 public:
  AnswerRun(EvalRunner& runner, const Tokenizer& tokenizer, const EvalItem& item, const TokenItem& tokens)
      : runner_(runner), tokenizer_(tokenizer), item_(item), tokens_(tokens) {}

  // `contexts` are left as they are.
  absl::Status Run(const std::vector<SeqId>& contexts, std::vector<Cell>* cells) {
    absl::Status status = Fork(contexts, &gold_);
    if (status.ok()) status = Question();
    if (status.ok()) status = Fork(gold_, &greedy_);
    if (status.ok()) status = Answer(cells);
    for (const std::vector<SeqId>* seqs : {&gold_, &greedy_}) {
      for (const SeqId seq : *seqs) runner_.cache().Close(seq);
    }
    return status;
  }

 private:
  absl::Status Fork(const std::vector<SeqId>& from, std::vector<SeqId>* to) {
    for (const SeqId seq : from) {
      const auto fork = runner_.cache().Fork(seq);
      if (!fork.ok()) return fork.status();
      to->push_back(*fork);
    }
    return absl::OkStatus();
  }

  absl::Status Question() {
    // Without a question the context's last token is fed again: its logits are what the answer starts from.
    std::vector<int32_t> ids = tokens_.rest;
    if (ids.empty()) ids.push_back(tokens_.compressed.back());
    for (const int32_t id : ids) {
      const auto logits = runner_.Decode(gold_, std::vector<int32_t>(gold_.size(), id));
      if (!logits.ok()) return logits.status();
      logits_.assign(logits->begin(), logits->end());
    }
    return absl::OkStatus();
  }

  std::span<const float> Row(size_t i) const {
    const auto vocab = static_cast<size_t>(runner_.vocab_size());
    return std::span<const float>(logits_).subspan(i * vocab, vocab);
  }

  absl::Status Answer(std::vector<Cell>* cells) {
    const size_t n = gold_.size();
    std::vector<double> nll(n, 0);
    std::vector<std::vector<int32_t>> said(n);
    std::vector<int32_t> next(2 * n);
    std::vector<bool> ended(n, item_.max_new_tokens == 0);
    for (size_t i = 0; i < n; ++i) {
      nll[i] += NegativeLogProbability(Row(i), tokens_.gold[0]);
      Say(ArgMax(Row(i)), i, &said, &ended);
      next[n + i] = said[i].empty() ? 0 : said[i].back();
    }
    const size_t steps = std::max(tokens_.gold.size(), static_cast<size_t>(item_.max_new_tokens));
    for (size_t t = 1; t < steps; ++t) {
      // Gold rows first; those that are done are left out.
      std::vector<SeqId> seqs;
      std::vector<int32_t> ids;
      std::vector<size_t> who;
      for (size_t i = 0; i < n && t < tokens_.gold.size(); ++i)
        seqs.push_back(gold_[i]), ids.push_back(tokens_.gold[t - 1]), who.push_back(i);
      const size_t gold_rows = seqs.size();
      for (size_t i = 0; i < n; ++i) {
        if (!ended[i]) seqs.push_back(greedy_[i]), ids.push_back(said[i].back()), who.push_back(i);
      }
      if (seqs.empty()) break;
      const auto logits = runner_.Decode(seqs, ids);
      if (!logits.ok()) return logits.status();
      logits_.assign(logits->begin(), logits->end());
      for (size_t row = 0; row < seqs.size(); ++row) {
        if (row < gold_rows)
          nll[who[row]] += NegativeLogProbability(Row(row), tokens_.gold[t]);
        else
          Say(ArgMax(Row(row)), who[row], &said, &ended);
      }
    }
    for (size_t i = 0; i < n; ++i) {
      (*cells)[i].gold_nll = nll[i] / static_cast<double>(tokens_.gold.size());
      (*cells)[i].answer = tokenizer_.Decode(said[i]);
      (*cells)[i].score = ScoreAnswer(item_, (*cells)[i].answer);
    }
    return absl::OkStatus();
  }

  void Say(int32_t token, size_t i, std::vector<std::vector<int32_t>>* said, std::vector<bool>* ended) const {
    if ((*ended)[i]) return;
    if (tokenizer_.IsEndOfGeneration(token)) {
      (*ended)[i] = true;
      return;
    }
    (*said)[i].push_back(token);
    if (static_cast<int>((*said)[i].size()) >= item_.max_new_tokens) (*ended)[i] = true;
  }

  EvalRunner& runner_;
  const Tokenizer& tokenizer_;
  const EvalItem& item_;
  const TokenItem& tokens_;
  std::vector<SeqId> gold_, greedy_;
  std::vector<float> logits_;
};

ItemsResult Summarise(const std::string& label, const std::vector<EvalItem>& items, const std::vector<Cell>& cells,
                      const std::vector<Cell>& full) {
  ItemsResult r;
  r.label = label;
  r.items = static_cast<int>(items.size());
  std::map<std::string, std::pair<double, double>> groups;  // kept, full: contexts are resampled whole
  for (size_t i = 0; i < items.size(); ++i) {
    TaskScore& task = r.by_task[items[i].task];
    const bool full_right = full[i].score >= 1, right = cells[i].score >= 1;
    const double share = 1.0 / static_cast<double>(items.size());
    ++task.items;
    task.recall += cells[i].score, task.recall_full += full[i].score;
    task.gold_nll += cells[i].gold_nll, task.gold_nll_full += full[i].gold_nll;
    task.full += full_right, task.kept += full_right && right;
    r.full += full_right, r.kept += full_right && right;
    groups[items[i].group].first += full_right && right, groups[items[i].group].second += full_right;
    r.recall += cells[i].score * share, r.recall_full += full[i].score * share;
    r.gold_nll += cells[i].gold_nll * share, r.gold_nll_full += full[i].gold_nll * share;
    r.bytes_ratio += cells[i].bytes_ratio * share;
    r.seconds += cells[i].seconds;
  }
  for (auto& [name, task] : r.by_task) {
    task.recall /= task.items, task.recall_full /= task.items, task.gold_nll /= task.items,
        task.gold_nll_full /= task.items;
  }
  r.recall_relative = r.full > 0 ? static_cast<double>(r.kept) / r.full : 0;
  std::vector<double> kept, answered;
  for (const auto& [name, counts] : groups) kept.push_back(counts.first), answered.push_back(counts.second);
  r.recall_ci95 = BootstrapRatio(kept, answered);
  return r;
}

}  // namespace

absl::StatusOr<std::vector<ItemsResult>> EvalItems(LoadedModel& model, const std::vector<EvalPolicy>& policies,
                                                   const ItemsOptions& options, ResultFile& results,
                                                   const EvalProgress& progress) {
  const std::vector<EvalItem>& items = options.items;
  std::vector<TokenItem> tokens;
  int longest = 0;
  for (const EvalItem& item : items) {
    tokens.push_back(Tokenise(item, options.question_inside, *model.tokenizer));
    longest = std::max(longest, tokens.back().longest() + item.max_new_tokens);
  }
  // Of each policy and the full cache: the context, the gold and the greedy answer; and the shared prompt.
  const int sequences = 3 * (static_cast<int>(policies.size()) + 1) + 1;
  auto runner = EvalRunner::Create(model, sequences, longest, options.chunk);
  if (!runner.ok()) return runner.status();

  std::vector<std::vector<Cell>> cells(policies.size());
  std::vector<Cell> full;
  std::vector<SeqId> contexts;
  std::vector<KvSequenceReport> reports;
  std::vector<EvalPolicy> missing;
  absl::Status status = absl::OkStatus();
  for (size_t at = 0; at < items.size() && status.ok(); ++at) {
    const EvalItem& item = items[at];
    if (progress) {
      progress(static_cast<double>(at) / static_cast<double>(items.size()),
               absl::StrCat("item ", at + 1, " of ", items.size(), " (", item.task, ")"));
    }
    std::vector<EvalPolicy> wanted;
    for (const EvalPolicy& policy : policies) {
      if (results.Find(CellKey(options, item, policy.label)) == nullptr) wanted.push_back(policy);
    }
    if (!wanted.empty() || results.Find(CellKey(options, item, kFullLabel)) == nullptr) {
      const double start = Seconds();
      const auto same = [](const EvalPolicy& a, const EvalPolicy& b) { return a.label == b.label; };
      // Questions about one context share its copies.
      const bool reuse = !contexts.empty() && tokens[at].compressed == tokens[at - 1].compressed &&
                         std::equal(wanted.begin(), wanted.end(), missing.begin(), missing.end(), same);
      if (!reuse) {
        (*runner)->CloseAll(&contexts);
        missing = wanted;
        auto opened = (*runner)->OpenAll(missing, tokens[at].compressed, options.chunk, &reports);
        if (!opened.ok()) return opened.status();
        contexts = *std::move(opened);
      }
      std::vector<Cell> fresh(contexts.size());
      AnswerRun run(**runner, *model.tokenizer, item, tokens[at]);
      status = run.Run(contexts, &fresh);
      for (size_t i = 0; i < fresh.size() && status.ok(); ++i) {
        fresh[i].bytes_ratio =
            static_cast<double>(reports[i].prompt_device_bytes) / static_cast<double>(reports[i].prompt_full_bytes);
        fresh[i].seconds = (Seconds() - start) / static_cast<double>(fresh.size());
        status = results.Add(CellKey(options, item, i == 0 ? kFullLabel : missing[i - 1].label), ToJson(fresh[i]));
      }
    }
    for (size_t i = 0; i <= policies.size() && status.ok(); ++i) {
      auto cell = FromJson(*results.Find(CellKey(options, item, i == 0 ? kFullLabel : policies[i - 1].label)));
      if (!cell.ok())
        status = cell.status();
      else
        (i == 0 ? full : cells[i - 1]).push_back(*std::move(cell));
    }
  }
  (*runner)->CloseAll(&contexts);
  if (!status.ok()) return status;
  if (progress) progress(1, "done");
  std::vector<ItemsResult> summaries;
  for (size_t i = 0; i < policies.size(); ++i) summaries.push_back(Summarise(policies[i].label, items, cells[i], full));
  return summaries;
}

}  // namespace loupe
