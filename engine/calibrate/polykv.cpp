#include "engine/calibrate/polykv.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace loupe {
namespace {

using Json = nlohmann::json;
using Compressed = SignalProbe::Compressed;

constexpr int kGainMean = 256;      // entries a list at which single lists and layers are compressed
constexpr int kGainRows = 32;       // rows of a text whose predictions are compared then

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Patterns in the order of a strategy's file, with what their defaults are today: others tomorrow shall not change a file.
std::vector<StrategyPattern> Patterns() {
  std::vector<StrategyPattern> patterns;
  for (const PolicyRow& row : AllPolicies()) {
    if (row.make_scorer == nullptr || row.baseline) continue;
    patterns.push_back({row.name, WithDefaults(row, KvOptions{}).value().params});
    patterns.back().params.erase("decode"), patterns.back().params.erase("interval");  // the strategy's own
  }
  return patterns;
}

// Part of a measurement's key: with other parameters a pattern keeps other entries.
std::string Names(const std::vector<StrategyPattern>& patterns) {
  std::string names;
  for (const StrategyPattern& pattern : patterns) {
    absl::StrAppend(&names, names.empty() ? "" : " ", pattern.policy);
    for (const auto& [param, value] : pattern.params) {
      const auto* word = std::get_if<std::string>(&value);
      absl::StrAppend(&names, ",", param, "=", word ? *word : absl::StrCat(std::get<double>(value)));
    }
  }
  return names;
}

// Local errors are measured where lists of a strategy may end: with 32 recent entries for small means, with 64 for the
// others, from what is protected up to half of the context.
std::vector<TableCase> TableCases(int context) {
  std::vector<TableCase> cases;
  for (const int recent : {32, 64}) {
    cases.push_back({recent, LeastEntries(4 * recent)});
    for (int entries = 64; entries <= context / 2; entries *= 2) {
      if (entries > cases.back().entries) cases.push_back({recent, entries});
    }
  }
  return cases;
}

// Six digits are more than a mean over 8 prompts can tell.
Json Rounded(const std::vector<double>& values) {
  Json out = Json::array();
  for (const double v : values) out.push_back(std::strtod(absl::StrFormat("%.6g", v).c_str(), nullptr));
  return out;
}

Json ToJson(const LocalSignals& s) {
  return {{"squared", Rounded(s.squared.values)},
          {"cosine", Rounded(s.cosine.values)},
          {"squared_first", Rounded(s.squared_first.values)},
          {"cosine_first", Rounded(s.cosine_first.values)},
          {"entropy", Rounded(s.entropy)}};
}

// Some cases of a table.
PatternTable Columns(const PatternTable& from, const std::vector<int>& columns) {
  PatternTable to(from.patterns, static_cast<int>(columns.size()), from.lists);
  for (int r = 0; r < from.patterns; ++r) {
    for (int c = 0; c < to.budgets; ++c) {
      for (int j = 0; j < from.lists; ++j) to.at(r, c, j) = from.at(r, columns[static_cast<size_t>(c)], j);
    }
  }
  return to;
}

// Everything that is measured, and what follows from it.
class Calibration {
 public:
  Calibration(LoadedModel& model, const PolyKvOptions& options, ResultFile& results, const EvalProgress& progress)
      : model_(model),
        options_(options),
        results_(results),
        progress_(progress),
        patterns_(Patterns()),
        cases_(TableCases(options.context)),
        layers_(model.config.num_layers),
        groups_(model.config.num_kv_heads) {}

  absl::StatusOr<PolyKvSummary> Run();

 private:
  absl::Status ReadPrompts();
  absl::Status MeasureLocal();
  absl::Status MeasureGains();
  absl::Status MeasureLayers();
  absl::StatusOr<std::vector<double>> Propagated(const CalibrationPrompt& prompt, const std::string& name,
                                                 const std::vector<Compressed>& cases, const char* field);
  absl::Status Prepare();
  FitInput Input(int mean_entries, bool decode) const;
  std::vector<int> TwoBest(int layer) const;
  int GainCase() const;
  PatternTable MeanOf(const std::vector<LocalSignals>& signals, PatternTable LocalSignals::*table) const;
  void Progress(double share, const std::string& what) const {
    if (progress_) progress_(share, what);
  }
  int lists() const { return layers_ * groups_; }

  LoadedModel& model_;
  const PolyKvOptions& options_;
  ResultFile& results_;
  const EvalProgress& progress_;
  const std::vector<StrategyPattern> patterns_;
  const std::vector<TableCase> cases_;
  const int layers_, groups_;
  std::unique_ptr<SignalProbe> probe_;  // made when something has to be measured
  std::vector<CalibrationPrompt> texts_, items_;
  std::vector<LocalSignals> text_local_, item_local_;
  int gain_pattern_ = 0;
  std::vector<std::vector<double>> text_kl_, item_kl_;  // [prompts][lists] one list compressed
  std::vector<std::vector<double>> nll_;                // [layers][patterns] mean change
  double seconds_ = 0;
};

absl::Status Calibration::ReadPrompts() {
  auto texts = TextPrompts(options_.text, *model_.tokenizer, options_.context, options_.continuation, options_.prompts, options_.seed);
  if (!texts.ok()) return texts.status();
  texts_ = *std::move(texts);
  auto items = ItemPrompts(options_.items, *model_.tokenizer, options_.max_rows);
  if (!items.ok()) return items.status();
  items_ = *std::move(items);
  return absl::OkStatus();
}

absl::Status Calibration::Prepare() {
  if (probe_) return absl::OkStatus();
  int tokens = options_.context + options_.continuation + 1, rows = options_.continuation;
  for (const CalibrationPrompt& item : items_) {
    tokens = std::max(tokens, static_cast<int>(item.ids.size())), rows = std::max(rows, item.rows());
  }
  auto probe = SignalProbe::Create(model_, patterns_, cases_, tokens, rows, options_.chunk);
  if (!probe.ok()) return probe.status();
  probe_ = *std::move(probe);
  return absl::OkStatus();
}

absl::Status Calibration::MeasureLocal() {
  const size_t total = texts_.size() + items_.size();
  const size_t values = patterns_.size() * cases_.size() * static_cast<size_t>(lists());
  for (size_t i = 0; i < total; ++i) {
    const CalibrationPrompt& prompt = i < texts_.size() ? texts_[i] : items_[i - texts_.size()];
    const std::string key = absl::StrCat("polykv local|", options_.model_id, "|", prompt.id, "|", prompt.context, "+",
                                         prompt.rows(), "|chunk ", options_.chunk, "|cases ", cases_.size(), " to ",
                                         cases_.back().entries, "|", Names(patterns_));
    Progress(0.3 * static_cast<double>(i) / static_cast<double>(total), absl::StrCat("attention of ", prompt.id));
    if (results_.Find(key) == nullptr) {
      const double start = Seconds();
      if (absl::Status s = Prepare(); !s.ok()) return s;
      const auto signals = probe_->Local(prompt);
      if (!signals.ok()) return signals.status();
      if (absl::Status s = results_.Add(key, ToJson(*signals)); !s.ok()) return s;
      seconds_ += Seconds() - start;
    }
    LocalSignals signals;
    try {
      const Json& cell = *results_.Find(key);
      for (const auto& [name, table] : {std::pair{"squared", &signals.squared},
                                        {"cosine", &signals.cosine},
                                        {"squared_first", &signals.squared_first},
                                        {"cosine_first", &signals.cosine_first}}) {
        *table = {static_cast<int>(patterns_.size()), static_cast<int>(cases_.size()), lists()};
        table->values = cell.at(name).get<std::vector<double>>();
        if (table->values.size() != values) {
          return absl::InvalidArgumentError(
              absl::StrCat("a cell of the results file has ", table->values.size(), " numbers, not ", values));
        }
      }
      signals.entropy = cell.at("entropy").get<std::vector<double>>();
    } catch (const Json::exception& e) {
      return absl::InvalidArgumentError(absl::StrCat("a cell of the results file cannot be read: ", e.what()));
    }
    (i < texts_.size() ? text_local_ : item_local_).push_back(std::move(signals));
  }
  return absl::OkStatus();
}

PatternTable Calibration::MeanOf(const std::vector<LocalSignals>& signals, PatternTable LocalSignals::*table) const {
  PatternTable mean(static_cast<int>(patterns_.size()), static_cast<int>(cases_.size()), lists());
  for (const LocalSignals& one : signals) {
    for (size_t i = 0; i < mean.values.size(); ++i)
      mean.values[i] += (one.*table).values[i] / static_cast<double>(signals.size());
  }
  return mean;
}

// The case in which lists and layers are compressed alone.
int Calibration::GainCase() const {
  size_t at = cases_.size() - 1;
  while (at > 0 && cases_[at].entries > kGainMean) --at;
  return static_cast<int>(at);
}

std::vector<int> Calibration::TwoBest(int layer) const {
  const PatternTable cosine = MeanOf(text_local_, &LocalSignals::cosine);
  const int gain = GainCase();
  std::vector<std::pair<double, int>> order;
  for (int r = 0; r < static_cast<int>(patterns_.size()); ++r) {
    double sum = 0;
    for (int g = 0; g < groups_; ++g) sum += cosine.at(r, gain, layer * groups_ + g);
    order.emplace_back(-sum, r);
  }
  std::sort(order.begin(), order.end());
  return {order[0].second, order[1].second};
}

// One field of a cell: what each case costs the prompt's predictions.
absl::StatusOr<std::vector<double>> Calibration::Propagated(const CalibrationPrompt& prompt, const std::string& name,
                                                            const std::vector<Compressed>& cases, const char* field) {
  const TableCase& gain = cases_[static_cast<size_t>(GainCase())];
  const std::string key =
      absl::StrCat("polykv propagated|", options_.model_id, "|", prompt.id, "|", prompt.context, "+", prompt.rows(),
                   "|chunk ", options_.chunk, "|", gain.entries, " entries|", Names(patterns_), "|", name);
  if (results_.Find(key) == nullptr) {
    const double start = Seconds();
    if (absl::Status s = Prepare(); !s.ok()) return s;
    const auto changes = probe_->Propagated(prompt, gain, cases);
    if (!changes.ok()) return changes.status();
    Json cell = {{"kl", Json::array()}, {"nll", Json::array()}};
    for (const Change& c : *changes) cell["kl"].push_back(c.kl), cell["nll"].push_back(c.nll);
    if (absl::Status s = results_.Add(key, cell); !s.ok()) return s;
    seconds_ += Seconds() - start;
  }
  try {
    auto values = results_.Find(key)->at(field).get<std::vector<double>>();
    if (values.size() == cases.size()) return values;
  } catch (const Json::exception&) {
  }
  return absl::InvalidArgumentError(
      absl::StrCat("a cell of the results file has no ", cases.size(), " numbers '", field, "': ", key));
}

// Every list alone, by the pattern that is best if all lists take it.
absl::Status Calibration::MeasureGains() {
  const PatternTable cosine = MeanOf(text_local_, &LocalSignals::cosine);
  double best = -1;
  for (int r = 0; r < static_cast<int>(patterns_.size()); ++r) {
    double sum = 0;
    for (int j = 0; j < lists(); ++j) sum += cosine.at(r, GainCase(), j);
    if (sum > best) best = sum, gain_pattern_ = r;
  }
  std::vector<Compressed> cases;
  for (int j = 0; j < lists(); ++j) cases.push_back({gain_pattern_, j / groups_, j % groups_});
  const std::string name = absl::StrCat("lists by ", patterns_[static_cast<size_t>(gain_pattern_)].policy);
  const size_t total = texts_.size() + items_.size();
  for (size_t i = 0; i < total; ++i) {
    const bool is_text = i < texts_.size();
    CalibrationPrompt prompt = is_text ? texts_[i] : items_[i - texts_.size()];
    if (is_text) prompt.counted.resize(std::min<size_t>(prompt.counted.size(), kGainRows));
    Progress(0.3 + 0.5 * static_cast<double>(i) / static_cast<double>(total),
             absl::StrCat("predictions of ", prompt.id));
    auto kl = Propagated(prompt, name, cases, "kl");
    if (!kl.ok()) return kl.status();
    for (double& v : *kl) v = std::max(v, 0.0);
    (is_text ? text_kl_ : item_kl_).push_back(*std::move(kl));
  }
  return absl::OkStatus();
}

// Every layer alone, by its two best patterns: only the paper's rule asks.
absl::Status Calibration::MeasureLayers() {
  nll_.assign(static_cast<size_t>(layers_),
              std::vector<double>(patterns_.size(), std::numeric_limits<double>::quiet_NaN()));
  if (options_.fit.mode != FitMode::kPaper || !(options_.fit.prefer_by_nll || options_.fit.sensitivity_by_nll)) {
    return absl::OkStatus();
  }
  std::vector<Compressed> cases;
  std::string name = "layers by";
  for (int layer = 0; layer < layers_; ++layer) {
    for (const int r : TwoBest(layer)) {
      cases.push_back({r, layer, -1});
      absl::StrAppend(&name, " ", r);
    }
  }
  for (const Compressed& c : cases) nll_[static_cast<size_t>(c.layer)][static_cast<size_t>(c.pattern)] = 0;
  for (size_t i = 0; i < texts_.size(); ++i) {
    CalibrationPrompt prompt = texts_[i];
    prompt.counted.resize(std::min<size_t>(prompt.counted.size(), kGainRows));
    Progress(0.8 + 0.2 * static_cast<double>(i) / static_cast<double>(texts_.size()),
             absl::StrCat("layers of ", prompt.id));
    const auto change = Propagated(prompt, name, cases, "nll");
    if (!change.ok()) return change.status();
    for (size_t c = 0; c < cases.size(); ++c) {
      nll_[static_cast<size_t>(cases[c].layer)][static_cast<size_t>(cases[c].pattern)] +=
          (*change)[c] / static_cast<double>(texts_.size());
    }
  }
  return absl::OkStatus();
}

// Local errors in nats: each list's error times the ratio of the two where the list was compressed alone.
FitInput Calibration::Input(int mean_entries, bool decode) const {
  FitInput input;
  input.num_layers = layers_, input.num_kv_heads = groups_, input.full = options_.context;
  std::vector<int> columns;
  for (size_t c = 0; c < cases_.size(); ++c) {
    if (cases_[c].recent != (mean_entries < 180 ? 32 : 64)) continue;  // what a request protects: a quarter, at most 64
    columns.push_back(static_cast<int>(c));
    input.budgets.push_back(cases_[c].entries);
  }
  const int at = GainCase();
  const auto tables = [&](const std::vector<LocalSignals>& signals, const std::vector<std::vector<double>>& kl) {
    std::vector<PatternTable> out;
    // The predictions of a text were compared on its first rows.
    const PatternTable mean =
        MeanOf(signals, &signals == &text_local_ ? &LocalSignals::squared_first : &LocalSignals::squared);
    std::vector<double> gain(static_cast<size_t>(lists()), 0.0);
    for (int j = 0; j < lists(); ++j) {
      for (const std::vector<double>& one : kl)
        gain[static_cast<size_t>(j)] += one[static_cast<size_t>(j)] / static_cast<double>(kl.size());
      gain[static_cast<size_t>(j)] /= std::max(mean.at(gain_pattern_, at, j), 1e-12);
    }
    for (const LocalSignals& one : signals) {
      PatternTable& table = out.emplace_back(Columns(decode ? one.squared_first : one.squared, columns));
      for (size_t i = 0; i < table.values.size(); ++i) table.values[i] *= gain[i % static_cast<size_t>(lists())];
    }
    return out;
  };
  input.text = tables(text_local_, text_kl_);
  const auto cosine = decode ? &LocalSignals::cosine_first : &LocalSignals::cosine;
  input.cosine = Columns(MeanOf(text_local_, cosine), columns);
  input.entropy.assign(static_cast<size_t>(lists()), 0.0);
  for (const LocalSignals& one : text_local_) {
    for (size_t j = 0; j < input.entropy.size(); ++j)
      input.entropy[j] += one.entropy[j] / static_cast<double>(text_local_.size());
  }
  input.nll = nll_;
  if (items_.empty()) return input;
  input.needles = tables(item_local_, item_kl_);
  input.needle_cosine = Columns(MeanOf(item_local_, cosine), columns);
  input.needle_kl.assign(static_cast<size_t>(lists()), 0.0);
  for (const std::vector<double>& one : item_kl_) {
    for (size_t j = 0; j < one.size(); ++j) input.needle_kl[j] += one[j] / static_cast<double>(item_kl_.size());
  }
  return input;
}

absl::StatusOr<PolyKvSummary> Calibration::Run() {
  for (const int mean : options_.means) {
    if (mean < 16 || mean >= options_.context) {
      return absl::InvalidArgumentError(
          absl::StrCat("--budget is ", mean, ", must be from 16 to ", options_.context - 1, ", below --context"));
    }
  }
  if (options_.context < 256)
    return absl::InvalidArgumentError(absl::StrCat("--context is ", options_.context, ", must be at least 256"));
  if (absl::Status s = ReadPrompts(); !s.ok()) return s;
  if (absl::Status s = MeasureLocal(); !s.ok()) return s;
  if (absl::Status s = MeasureGains(); !s.ok()) return s;
  if (absl::Status s = MeasureLayers(); !s.ok()) return s;
  Progress(1, "done");

  PolyKvSummary summary;
  Strategy& strategy = summary.strategy;
  strategy.model = absl::StrCat(model_.config.architecture, " ", model_.config.name);
  strategy.weights_hash = options_.weights_hash;
  strategy.num_layers = layers_, strategy.num_kv_heads = groups_, strategy.head_dim = model_.config.head_dim;
  strategy.patterns = patterns_;
  FitOptions fit = options_.fit;
  for (size_t r = 0; r < patterns_.size(); ++r) {
    if (patterns_[r].policy == "snapkv") fit.snap_pattern = static_cast<int>(r);
  }

  nlohmann::ordered_json expected = nlohmann::ordered_json::object();
  for (const int mean : options_.means) {
    const FitInput prefill = Input(mean, false), decode = Input(mean, true);
    strategy.budgets.push_back({mean, FitPhase(prefill, mean, fit), FitPhase(decode, mean, fit)});
    // The best uniform choice beside it.
    const int uniform = BestUniformPattern(prefill, mean, fit);
    const StrategyPhase plain{std::vector<int>(static_cast<size_t>(lists()), uniform),
                              std::vector<int>(static_cast<size_t>(lists()), mean)};
    expected[absl::StrCat(mean)] = {{"kl", ExpectedCost(prefill, strategy.budgets.back().prefill, fit)},
                                    {"uniform", patterns_[static_cast<size_t>(uniform)].policy},
                                    {"uniform_kl", ExpectedCost(prefill, plain, fit)}};
  }
  if (absl::Status s = CheckStrategy(strategy); !s.ok()) return s;
  summary.calibration = {{"prompts", texts_.size()},
                         {"context", options_.context},
                         {"continuation", options_.continuation},
                         {"items", items_.size()},
                         {"seed", options_.seed},
                         {"set_hash", HashOfPrompts(texts_, items_)},
                         {"gain_pattern", patterns_[static_cast<size_t>(gain_pattern_)].policy},
                         {"expected", expected}};
  summary.seconds = seconds_;
  return summary;
}

}  // namespace

absl::StatusOr<PolyKvSummary> CalibratePolyKv(LoadedModel& model, const PolyKvOptions& options, ResultFile& results,
                                              const EvalProgress& progress) {
  return Calibration(model, options, results, progress).Run();
}

}  // namespace loupe
