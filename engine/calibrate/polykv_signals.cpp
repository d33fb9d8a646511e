#include "engine/calibrate/polykv_signals.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kvcache/policies/eviction.h"
#include "kvcache/policies/registry.h"

namespace loupe {
namespace {

constexpr int kDecodeInterval = 64;

KvOptions OptionsOf(const StrategyPattern& pattern, const TableCase& c) {
  KvOptions options;
  options.policy = pattern.policy;
  options.params = pattern.params;
  options.params["decode"] = std::string("append");
  options.budget = {KvBudget::Kind::kTokens, static_cast<double>(c.entries)};
  options.protect.recent = c.recent;
  return options;
}

ListRows RowsOf(const SequenceView& view, const ListView& list, int heads, int dim, int rows) {
  ListRows out;
  out.heads = heads, out.dim = dim;
  out.scale = 1 / std::sqrt(static_cast<float>(dim));
  out.queries = list.window_queries.last(static_cast<size_t>(rows * heads * dim));
  const auto take = [&](const std::vector<float>& from, std::vector<float>* to) {
    const size_t stride = static_cast<size_t>(view.num_kv_heads * dim);
    to->reserve(from.size() / static_cast<size_t>(view.num_kv_heads));
    for (size_t at = static_cast<size_t>(list.kv_head * dim); at < from.size(); at += stride) {
      to->insert(to->end(), from.begin() + static_cast<std::ptrdiff_t>(at),
                 from.begin() + static_cast<std::ptrdiff_t>(at) + dim);
    }
  };
  take(view.keys[static_cast<size_t>(list.layer)], &out.keys);
  take(view.values[static_cast<size_t>(list.layer)], &out.values);
  return out;
}

// What the patterns look at while a prompt is computed. All of a strategy share one window and one sample of rows.
Signals LookedAt(const std::vector<StrategyPattern>& patterns, const PolicyContext& context) {
  Signals all;
  for (const StrategyPattern& pattern : patterns) {
    const PolicyRow& row = *FindPolicy(pattern.policy);
    KvOptions options;
    options.params = pattern.params;
    const Signals one = row.make_scorer(WithDefaults(row, options).value(), EvictionBudget{}, context)->signals();
    all.window_query_rows = std::max(all.window_query_rows, one.window_query_rows);
    if (one.columns.stride > 0) all.columns = one.columns;
  }
  return all;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SignalProbe>> SignalProbe::Create(LoadedModel& model,
                                                                 std::vector<StrategyPattern> patterns,
                                                                 std::vector<TableCase> cases, int tokens, int rows,
                                                                 int chunk) {
  std::unique_ptr<SignalProbe> probe(new SignalProbe(model, std::move(patterns), std::move(cases)));
  // The shared prompt, a copy under test and one to spare.
  auto runner = EvalRunner::Create(model, 4, tokens, std::max(chunk, rows));
  if (!runner.ok()) return runner.status();
  probe->runner_ = *std::move(runner);
  probe->rows_ = rows, probe->chunk_ = chunk;
  return probe;
}

absl::StatusOr<SignalProbe::Sets> SignalProbe::Select(SeqId base, const std::vector<TableCase>& cases) {
  KvCache& cache = runner_->cache();
  const PolicyContext context = cache.policy_context(cache.num_tokens(base));
  Sets sets;
  for (const StrategyPattern& pattern : patterns_) {
    std::vector<std::unique_ptr<Policy>> policies;
    for (const TableCase& c : cases) {
      auto policy = MakePolicy(OptionsOf(pattern, c), context);
      if (!policy.ok()) return policy.status();
      policies.push_back(*std::move(policy));
    }
    auto& of_pattern = sets.emplace_back();
    const auto select = [&](const SequenceView& view) {
      for (const auto& policy : policies) {
        std::vector<int32_t> all(static_cast<size_t>(view.num_tokens));
        std::iota(all.begin(), all.end(), 0);
        auto& of_budget = of_pattern.emplace_back(view.lists.size(), all);
        if (policy->keeps_everything()) continue;
        std::vector<ListAction> actions;
        policy->AfterPrefill(view, &actions);
        for (ListAction& action : actions) {
          of_budget[static_cast<size_t>(action.layer * view.num_kv_heads + action.kv_head)] = std::move(action.keep);
        }
      }
    };
    const Onlooker onlooker(policies[0]->keeps_everything() ? Signals{} : policies[0]->signals(), select);
    const auto fork = cache.Fork(base, onlooker, runner_->stream());
    if (!fork.ok()) return fork.status();
    cache.Close(*fork);
  }
  return sets;
}

absl::StatusOr<LocalSignals> SignalProbe::Local(const CalibrationPrompt& prompt) {
  const int rows = prompt.rows(), patterns = static_cast<int>(patterns_.size()),
            columns = static_cast<int>(cases_.size());
  const ModelConfig& config = model_.config;
  const int lists = config.num_layers * config.num_kv_heads, heads = config.num_heads / config.num_kv_heads;
  KvCache& cache = runner_->cache();
  Signals asked = LookedAt(patterns_, cache.policy_context(prompt.context));
  asked.window_query_rows = std::max(asked.window_query_rows, rows_), asked.entries = true;
  const Onlooker collect(asked);
  auto base = cache.Open(collect);
  if (!base.ok()) return base.status();
  const std::span<const int32_t> ids(prompt.ids);
  auto last = runner_->Prefill(*base, ids.first(static_cast<size_t>(prompt.context)), chunk_);
  if (!last.ok()) return last.status();
  const auto sets = Select(*base, cases_);
  if (!sets.ok()) return sets.status();

  LocalSignals out;
  for (PatternTable* table : {&out.squared, &out.cosine, &out.squared_first, &out.cosine_first})
    *table = {patterns, columns, lists};
  out.entropy.resize(static_cast<size_t>(lists));
  const auto measure = [&](const SequenceView& view) {
    if (view.num_tokens == prompt.context) return;  // when the copy is made
    InParallel(model_.backend->Info().num_threads, view.lists.size(), [&](size_t i) {
      const ListRows list = RowsOf(view, view.lists[i], heads, config.head_dim, rows);
      std::vector<std::vector<int32_t>> of_list;
      for (const auto& of_pattern : *sets) {
        for (const auto& of_budget : of_pattern) of_list.push_back(of_budget[i]);
      }
      const auto errors = MeasureList(list, of_list, prompt.counted, kDecodeInterval, &out.entropy[i]);
      for (size_t k = 0; k < errors.size(); ++k) {
        const int r = static_cast<int>(k) / columns, b = static_cast<int>(k) % columns, j = static_cast<int>(i);
        out.squared.at(r, b, j) = errors[k].squared, out.cosine.at(r, b, j) = errors[k].cosine;
        out.squared_first.at(r, b, j) = errors[k].squared_first,
                                   out.cosine_first.at(r, b, j) = errors[k].cosine_first;
      }
    });
  };
  Signals wanted;
  wanted.window_query_rows = rows, wanted.entries = true;
  const Onlooker onlooker(wanted, measure);
  const auto fork = cache.Fork(*base, onlooker, runner_->stream());
  if (!fork.ok()) return fork.status();
  cache.Close(*base);
  const auto logits = runner_->Continue(
      *fork, ids.subspan(static_cast<size_t>(prompt.context), static_cast<size_t>(rows)), EvalRunner::Rows::kStay, 0, nullptr, {});
  cache.Close(*fork);
  if (!logits.ok()) return logits.status();
  return out;
}

absl::StatusOr<std::vector<Change>> SignalProbe::Propagated(const CalibrationPrompt& prompt, const TableCase& budget,
                                                            const std::vector<Compressed>& compressed) {
  KvCache& cache = runner_->cache();
  const Onlooker collect(LookedAt(patterns_, cache.policy_context(prompt.context)));
  auto base = cache.Open(collect);
  if (!base.ok()) return base.status();
  const std::span<const int32_t> ids(prompt.ids);
  if (auto last = runner_->Prefill(*base, ids.first(static_cast<size_t>(prompt.context)), chunk_); !last.ok())
    return last.status();
  const auto sets = Select(*base, {budget});
  if (!sets.ok()) return sets.status();
  const auto full = cache.Fork(*base, FullPolicy(), runner_->stream());
  if (!full.ok()) return full.status();
  cache.Close(*base);

  const auto rows = ids.subspan(static_cast<size_t>(prompt.context), static_cast<size_t>(prompt.rows()));
  std::vector<std::vector<char>> residuals;
  const std::vector<int32_t> counted = prompt.CountedRows();
  const auto logits = runner_->Continue(*full, rows, EvalRunner::Rows::kPrompt, 0, &residuals, counted);
  if (!logits.ok()) return logits.status();
  const Reference reference = Refer(prompt, *logits);
  std::vector<Change> changes;
  for (const Compressed& c : compressed) {
    std::vector<ListAction> actions;
    for (int g = 0; g < model_.config.num_kv_heads; ++g) {
      if (c.kv_head >= 0 && c.kv_head != g) continue;
      const std::vector<int32_t>& keep =
          (*sets)[static_cast<size_t>(c.pattern)][0][static_cast<size_t>(c.layer * model_.config.num_kv_heads + g)];
      if (static_cast<int>(keep.size()) < prompt.context) actions.push_back({c.layer, g, keep});
    }
    const Told told(std::move(actions));
    const auto fork = cache.Fork(*full, told, runner_->stream());
    if (!fork.ok()) return fork.status();
    const auto changed = runner_->Continue(*fork, rows, EvalRunner::Rows::kPrompt, c.layer, c.layer == 0 ? nullptr : &residuals, counted);
    cache.Close(*fork);
    if (!changed.ok()) return changed.status();
    changes.push_back(Compare(prompt, reference, *changed, model_.backend->Info().num_threads));
  }
  cache.Close(*full);
  return changes;
}

}  // namespace loupe
