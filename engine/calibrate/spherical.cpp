#include "engine/calibrate/spherical.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/spherical.h"

namespace loupe {
namespace {

using Json = nlohmann::json;

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

absl::StatusOr<std::vector<float>> Numbers(const Json& cell, size_t count) {
  try {
    auto numbers = cell.get<std::vector<float>>();
    if (numbers.size() == count) return numbers;
  } catch (const Json::exception&) {
  }
  return absl::InvalidArgumentError(absl::StrCat("a cell of the results file has no ", count, " numbers"));
}

// [lists of a layer][key bits, value bits, shares]
Json ToJson(const std::vector<ListCosts>& costs) {
  Json out = Json::array();
  for (const ListCosts& c : costs) {
    for (const auto x : c.key) out.push_back(x);
    for (const auto x : c.value) out.push_back(x);
    for (const auto x : c.share) out.push_back(x);
  }
  return out;
}

class Calibration {
 public:
  Calibration(LoadedModel& model, const SphericalOptions& options, ResultFile& results, const EvalProgress& progress)
      : model_(model), options_(options), results_(results), progress_(progress) {}

  absl::StatusOr<SphericalSummary> Run();

 private:
  absl::Status CheckOptions() const;
  absl::Status ReadPrompts();
  absl::Status Prepare();
  absl::Status MeasureMeans();
  absl::Status MeasurePrompt(size_t index);
  absl::Status Collect(SphericalSummary* summary);
  absl::Status AddCell(size_t prompt, int layer, double weight, SphericalSummary* summary);
  std::string Key(const char* what, const CalibrationPrompt& prompt) const {
    return absl::StrCat("spherical ", what, "|", options_.model_id, "|", prompt.id, "|", prompt.context, "+", prompt.rows(), "|chunk ",
                        options_.chunk);
  }
  std::string CostKey(size_t prompt, int layer) const {
    return absl::StrCat(Key("costs", Prompt(prompt)), "|means ", means_hash_, "|bits ", absl::StrJoin(kProfileBits, " "), "|shares ",
                        absl::StrJoin(kProfileShares, " "), "|layer ", layer);
  }
  // Texts, then items.
  const CalibrationPrompt& Prompt(size_t i) const { return i < texts_.size() ? texts_[i] : items_[i - texts_.size()]; }
  size_t num_prompts() const { return texts_.size() + items_.size(); }
  void Progress(double share, const std::string& what) const {
    if (progress_) progress_(share, what);
  }

  LoadedModel& model_;
  const SphericalOptions& options_;
  ResultFile& results_;
  const EvalProgress& progress_;
  std::unique_ptr<SphericalProbe> probe_;  // made when something has to be measured
  std::vector<CalibrationPrompt> texts_, items_;
  std::vector<float> means_;  // [lists, D]
  std::string means_hash_;
  double seconds_ = 0;
};

absl::Status Calibration::CheckOptions() const {
  if (options_.context < 256) {
    return absl::InvalidArgumentError(absl::StrCat("--context is ", options_.context, ", must be at least 256"));
  }
  if (model_.config.head_dim % spherical::kDimStep != 0) {
    return absl::InvalidArgumentError(absl::StrCat("model ", model_.config.name, " has heads of ", model_.config.head_dim,
                                                   " dimensions; codes take multiples of ", spherical::kDimStep));
  }
  if (options_.part < 0 || options_.part >= options_.parts) {
    return absl::InvalidArgumentError(absl::StrCat("--part is ", options_.part, ", must be from 0 to ", options_.parts - 1));
  }
  return absl::OkStatus();
}

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
  int tokens = 0, rows = 0;
  for (size_t i = 0; i < num_prompts(); ++i) {
    tokens = std::max(tokens, static_cast<int>(Prompt(i).ids.size())), rows = std::max(rows, Prompt(i).rows());
  }
  auto probe = SphericalProbe::Create(model_, tokens, rows, options_.chunk);
  if (!probe.ok()) return probe.status();
  probe_ = *std::move(probe);
  return absl::OkStatus();
}

// Codes are measured around the means of all texts.
absl::Status Calibration::MeasureMeans() {
  const size_t count = static_cast<size_t>(model_.config.num_layers * model_.config.num_kv_heads * model_.config.head_dim);
  std::vector<double> sums(count, 0.0);
  for (const CalibrationPrompt& prompt : texts_) {
    const std::string key = Key("mean keys", prompt);
    Progress(0, absl::StrCat("mean keys of ", prompt.id));
    if (results_.Find(key) == nullptr) {
      const double start = Seconds();
      if (absl::Status s = Prepare(); !s.ok()) return s;
      const auto means = probe_->MeanKeys(prompt);
      if (!means.ok()) return means.status();
      if (absl::Status s = results_.Add(key, *means); !s.ok()) return s;
      seconds_ += Seconds() - start;
    }
    const auto means = Numbers(*results_.Find(key), count);
    if (!means.ok()) return means.status();
    for (size_t i = 0; i < count; ++i) sums[i] += double{(*means)[i]} / static_cast<double>(texts_.size());
  }
  means_.assign(sums.begin(), sums.end());
  means_hash_ = Fingerprint(std::string_view(reinterpret_cast<const char*>(means_.data()), means_.size() * sizeof(float)));
  return absl::OkStatus();
}

absl::Status Calibration::MeasurePrompt(size_t index) {
  const CalibrationPrompt& prompt = Prompt(index);
  bool begun = false;
  for (int layer = 0; layer < model_.config.num_layers; ++layer) {
    const std::string key = CostKey(index, layer);
    Progress((static_cast<double>(index) + static_cast<double>(layer) / model_.config.num_layers) / static_cast<double>(num_prompts()),
             absl::StrCat("layer ", layer, " of ", prompt.id));
    if (results_.Find(key) != nullptr) continue;
    const double start = Seconds();
    if (absl::Status s = Prepare(); !s.ok()) return s;
    if (absl::Status s = begun ? absl::OkStatus() : probe_->Begin(prompt); !s.ok()) return s;
    begun = true;
    const auto costs = probe_->Measure(layer, means_);
    if (!costs.ok()) return costs.status();
    if (absl::Status s = results_.Add(key, ToJson(*costs)); !s.ok()) return s;
    seconds_ += Seconds() - start;
  }
  if (begun) probe_->End();
  return absl::OkStatus();
}

absl::Status Calibration::AddCell(size_t prompt, int layer, double weight, SphericalSummary* summary) {
  const Json* cell = results_.Find(CostKey(prompt, layer));
  if (cell == nullptr) {
    ++summary->missing_cells;
    return absl::OkStatus();
  }
  const size_t groups = static_cast<size_t>(model_.config.num_kv_heads), width = 2 * kProfileBits.size() + kProfileShares.size();
  const auto numbers = Numbers(*cell, groups * width);
  if (!numbers.ok()) return numbers.status();
  auto next = numbers->begin();
  for (size_t g = 0; g < groups; ++g) {
    ListCosts& costs = summary->profile.lists[static_cast<size_t>(layer) * groups + g];
    for (const auto add : {std::span<double>(costs.key), std::span<double>(costs.value), std::span<double>(costs.share)}) {
      for (double& cost : add) cost += weight * double{*next++};
    }
  }
  return absl::OkStatus();
}

absl::Status Calibration::Collect(SphericalSummary* summary) {
  SphericalProfile& profile = summary->profile;
  profile.model = absl::StrCat(model_.config.architecture, " ", model_.config.name);
  profile.weights_hash = options_.weights_hash;
  profile.num_layers = model_.config.num_layers, profile.num_kv_heads = model_.config.num_kv_heads;
  profile.head_dim = model_.config.head_dim;
  profile.mean_keys = means_;
  profile.lists.resize(static_cast<size_t>(profile.num_lists()));
  for (size_t i = 0; i < num_prompts(); ++i) {
    const double weight = i < texts_.size() ? 1.0 / static_cast<double>(texts_.size())
                                            : options_.needle_weight / static_cast<double>(items_.size());
    for (int layer = 0; layer < profile.num_layers; ++layer) {
      if (absl::Status s = AddCell(i, layer, weight, summary); !s.ok()) return s;
    }
  }
  return summary->missing_cells > 0 ? absl::OkStatus() : CheckProfile(profile);
}

absl::StatusOr<SphericalSummary> Calibration::Run() {
  if (absl::Status s = CheckOptions(); !s.ok()) return s;
  if (absl::Status s = ReadPrompts(); !s.ok()) return s;
  if (absl::Status s = MeasureMeans(); !s.ok()) return s;
  for (size_t i = static_cast<size_t>(options_.part); i < num_prompts(); i += static_cast<size_t>(options_.parts)) {
    if (absl::Status s = MeasurePrompt(i); !s.ok()) return s;
  }
  Progress(1, "done");
  SphericalSummary summary;
  if (absl::Status s = Collect(&summary); !s.ok()) return s;
  summary.calibration = {{"prompts", texts_.size()},
                         {"context", options_.context},
                         {"continuation", options_.continuation},
                         {"items", items_.size()},
                         {"needle_weight", options_.needle_weight},
                         {"seed", options_.seed},
                         {"set_hash", HashOfPrompts(texts_, items_)}};
  summary.seconds = seconds_;
  return summary;
}

}  // namespace

absl::StatusOr<SphericalSummary> CalibrateSpherical(LoadedModel& model, const SphericalOptions& options, ResultFile& results,
                                                    const EvalProgress& progress) {
  return Calibration(model, options, results, progress).Run();
}

}  // namespace loupe
