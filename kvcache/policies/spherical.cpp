// Spherical: every list stores what it keeps as spherical codes. In the form that lost least where it was measured
// (docs/quality.md): by a profile of what each list loses, one price over all lists decides (spherical_plan.h) whether a list
// keeps everything at its bits, keys and values apart, or only its best share at 4. Shares are ranked by what the last rows of
// the prompt attend to (SnapKV's score). Generated tokens come on top, coded by the list's format page by page; or, with decode
// evict, within the budget, which pages of codes then make room for (spherical_decode.h).
#include <algorithm>
#include <limits>
#include <numeric>

#include "kvcache/policies/coded.h"
#include "kvcache/policies/primitives.h"
#include "kvcache/policies/snap_score.h"
#include "kvcache/policies/sorted_view.h"
#include "kvcache/policies/spherical_decode.h"
#include "kvcache/policies/spherical_request.h"

namespace loupe {
namespace {

class Spherical final : public Policy {
 public:
  Spherical(SphericalPlan plan, const PolicyContext& context)
      : plan_(std::move(plan)), context_(context), scorer_(MakeSnapScorer({}, plan_.protection.recent)) {}

  std::string_view name() const override { return "spherical"; }
  bool keeps_everything() const override {
    return plan_.coding.landing == context_.dense && std::all_of(plan_.lists.begin(), plan_.lists.end(), [&](const SphericalOption& o) {
      return o.format == context_.dense && o.kept + plan_.protected_entries >= plan_.entries;
    });
  }
  Signals signals() const override {
    Signals signals = drops() || plan_.evicts ? scorer_->signals() : Signals{};
    signals.window_goes_on = plan_.evicts;
    signals.key_norms = plan_.outliers > 0;
    return signals;
  }
  int decode_interval() const override { return keeps_everything() ? 0 : kCodeInterval; }
  std::optional<PageFormat> landing_format(bool prompt) const override {
    return prompt && !plan_.coding.while_prefilling ? std::nullopt : std::optional(plan_.coding.landing);
  }
  bool acts_in_prefill() const override { return plan_.coding.while_prefilling; }
  int64_t MaxPromptBytes() const override {
    return plan_.coding.while_prefilling ? MostBytes(plan_.entries, context_.max_step_rows + kCodeBatch)
                                         : context_.DensePromptBytes() + MaxBytes(0);
  }
  int64_t MaxBytes(int num_generated) const override;
  void AfterChunk(const SequenceView& sequence, std::vector<ListAction>* actions) const override { CodeAll(sequence, actions); }
  void AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const override;
  void AfterDecode(const SequenceView& sequence, std::vector<ListAction>* actions) const override {
    plan_.evicts ? Refresh(sequence, actions) : CodeAll(sequence, actions);
  }

 private:
  bool drops() const {
    return std::any_of(plan_.lists.begin(), plan_.lists.end(), [&](const SphericalOption& o) { return Drops(o); });
  }
  bool Drops(const SphericalOption& option) const { return option.kept + plan_.protected_entries < plan_.entries; }
  bool Windowed(int layer) const { return !context_.windows.empty() && context_.windows[static_cast<size_t>(layer)] > 0; }
  const SphericalOption& OptionOf(const ListView& list) const {
    return plan_.lists[static_cast<size_t>(list.layer * context_.num_kv_heads + list.kv_head)];
  }
  // Outliers stay as they are: of the entries that have been out of protection since the prompt's end those that are still in
  // the format of new ones.
  bool Stays(int position, bool in_landing, int num_tokens) const {
    const bool outlier = plan_.outliers > 0 && in_landing && position < plan_.entries - plan_.protection.recent;
    return outlier || plan_.protection.Covers(position, num_tokens);
  }
  PlanShape Shape() const {
    return {&context_, plan_.entries, plan_.protected_entries, plan_.coding.landing, plan_.in_entries};
  }
  int64_t MostBytes(int64_t more, int64_t waiting, bool complete = false) const;
  std::vector<int32_t> OutlierPositions(const ListView& list, int num_tokens) const;
  HeldList Hold(const ListView& list, int num_tokens) const;
  void Score(const SequenceView& sequence, std::vector<HeldList>* held) const;
  void Refresh(const SequenceView& sequence, std::vector<ListAction>* actions) const;
  void CodeAll(const SequenceView& sequence, std::vector<ListAction>* actions) const;

  SphericalPlan plan_;
  PolicyContext context_;
  std::unique_ptr<Scorer> scorer_;
};

// Pages of lists that hold `more` entries beside what is planned (or, of an incomplete prompt, in place of it), `waiting` of
// which are not coded yet.
int64_t Spherical::MostBytes(int64_t more, int64_t waiting, bool complete) const {
  const auto pages = [&](const PageFormat& format, int64_t entries) {
    return (entries + kPageEntries - 1) / kPageEntries * MakePageLayout({format, false, false}, context_.head_dim).bytes;
  };
  int64_t bytes = 0;
  for (const SphericalOption& option : plan_.lists) {
    const int64_t entries = more + (complete ? plan_.protected_entries + option.kept : 0);
    const int64_t landing = std::min(entries, plan_.protected_entries + waiting);
    bytes += option.format == plan_.coding.landing ? pages(option.format, entries)
                                                   : pages(plan_.coding.landing, landing) + pages(option.format, entries - landing);
  }
  return bytes;
}

int64_t Spherical::MaxBytes(int num_generated) const {
  const int64_t appended = MostBytes(num_generated, std::min(num_generated, kCodeBatch + kCodeInterval), true);
  if (!plan_.evicts || plan_.in_entries) return appended;
  // The budget, and of each list a tail that has just become a large page.
  const int64_t tail = MakePageLayout({plan_.coding.landing, false, false}, context_.head_dim).bytes;
  return std::min(appended, plan_.bytes + context_.num_lists() * tail);
}

// Of the entries that are not protected those with the longest keys, ascending.
std::vector<int32_t> Spherical::OutlierPositions(const ListView& list, int num_tokens) const {
  std::vector<size_t> others;
  for (size_t e = 0; plan_.outliers > 0 && e < list.positions.size(); ++e) {
    if (!plan_.protection.Covers(list.positions[e], num_tokens)) others.push_back(e);
  }
  const auto longer = [&norms = list.key_norms](size_t a, size_t b) { return norms[a] != norms[b] ? norms[a] > norms[b] : a < b; };
  const size_t count = std::min(others.size(), static_cast<size_t>(plan_.outliers));
  std::partial_sort(others.begin(), others.begin() + static_cast<std::ptrdiff_t>(count), others.end(), longer);
  std::vector<int32_t> positions;
  for (size_t i = 0; i < count; ++i) positions.push_back(list.positions[others[i]]);
  std::sort(positions.begin(), positions.end());
  return positions;
}

void Spherical::AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const {
  const SortedView sorted(sequence);
  LayerScores scores(static_cast<size_t>(sequence.num_kv_heads));
  for (int layer = 0; layer < sequence.num_layers(); ++layer) {
    if (Windowed(layer)) continue;
    const auto lists = sorted.view().layer(layer);
    const bool ranks = std::any_of(lists.begin(), lists.end(), [&](const ListView& list) { return Drops(OptionOf(list)); });
    if (ranks) scorer_->ScoreLayer(sorted.view(), layer, &scores);
    for (const ListView& list : lists) {
      const SphericalOption& option = OptionOf(list);
      ListAction chosen{list.layer, list.kv_head, {}};
      chosen.keep.resize(list.positions.size());
      std::iota(chosen.keep.begin(), chosen.keep.end(), 0);
      const std::vector<int32_t> outliers = OutlierPositions(list, sequence.num_tokens);
      if (Drops(option)) {
        for (const int32_t position : outliers) {
          const auto at = std::lower_bound(list.positions.begin(), list.positions.end(), position) - list.positions.begin();
          scores[static_cast<size_t>(list.kv_head)][static_cast<size_t>(at)] = std::numeric_limits<float>::infinity();
        }
        chosen.keep = KeepBest(list, scores[static_cast<size_t>(list.kv_head)], plan_.protection, sequence.num_tokens,
                               plan_.protected_entries + option.kept);
      }
      sorted.ToListOrder(&chosen);
      const ListView& stored = sequence.layer(layer)[static_cast<size_t>(list.kv_head)];
      std::vector<PageFormat> formats;
      for (const int32_t entry : chosen.keep) {
        const int32_t position = stored.positions[static_cast<size_t>(entry)];
        const bool stays = plan_.protection.Covers(position, sequence.num_tokens) ||
                           std::binary_search(outliers.begin(), outliers.end(), position);
        formats.push_back(stays ? plan_.coding.landing : option.format);
      }
      actions->push_back(StoreEntries(stored, chosen.keep, formats, plan_.coding.landing));
    }
  }
}

void Spherical::CodeAll(const SequenceView& sequence, std::vector<ListAction>* actions) const {
  for (const ListView& list : sequence.lists) {
    if (Windowed(list.layer)) continue;
    const int from = plan_.outliers > 0 ? plan_.entries - plan_.protection.recent : 0;
    auto action = CodeAged(list, plan_.protection, sequence.num_tokens, OptionOf(list).format, plan_.coding.landing, from);
    if (action) actions->push_back(*std::move(action));
  }
}

// The list with all entries coded that are out of protection.
HeldList Spherical::Hold(const ListView& list, int num_tokens) const {
  HeldList held;
  const PageFormat& landing = plan_.coding.landing;
  for (const FormatRun& run : list.runs) {
    for (int e = run.begin; e < run.end; ++e) {
      const bool stays = Stays(list.positions[static_cast<size_t>(e)], run.format == landing, num_tokens);
      held.formats.push_back(run.format == landing && !stays ? OptionOf(list).format : run.format);
      held.open.push_back(!stays);
    }
  }
  return held;
}

void Spherical::Score(const SequenceView& sequence, std::vector<HeldList>* held) const {
  const SortedView sorted(sequence);
  LayerScores scores(static_cast<size_t>(sequence.num_kv_heads));
  for (int layer = 0; layer < sequence.num_layers(); ++layer) {
    scorer_->ScoreLayer(sorted.view(), layer, &scores);
    for (const ListView& list : sequence.layer(layer)) {
      const size_t head = static_cast<size_t>(list.kv_head);
      const std::span<const int32_t> order = sorted.view().layer(layer)[head].positions;
      HeldList& of_list = (*held)[static_cast<size_t>(layer * sequence.num_kv_heads) + head];
      for (const int32_t position : list.positions) {
        of_list.scores.push_back(scores[head][static_cast<size_t>(std::lower_bound(order.begin(), order.end(), position) - order.begin())]);
      }
    }
  }
}

// Frees, whenever the budget is exceeded, what two refreshes bring, so that a page that was looked at has some rest.
void Spherical::Refresh(const SequenceView& sequence, std::vector<ListAction>* actions) const {
  std::vector<HeldList> held;
  for (const ListView& list : sequence.lists) held.push_back(Hold(list, sequence.num_tokens));
  if (SizeOf(held, Shape()) > plan_.bytes - plan_.growth) {
    Score(sequence, &held);
    std::span<const ListCosts> costs;
    if (plan_.profile) costs = plan_.profile->lists;
    FitPages(costs, Shape(), plan_.limits, plan_.bytes - 2 * plan_.growth, &held);
  }
  for (size_t i = 0; i < held.size(); ++i) {
    const std::vector<PageFormat> now = FormatsOf(sequence.lists[i]);
    std::vector<int32_t> kept;
    std::vector<PageFormat> formats;
    for (size_t e = 0; e < now.size(); ++e) {
      if (held[i].formats[e]) kept.push_back(static_cast<int32_t>(e)), formats.push_back(*held[i].formats[e]);
    }
    if (formats != now) actions->push_back(StoreEntries(sequence.lists[i], kept, formats, plan_.coding.landing));
  }
}

absl::StatusOr<std::unique_ptr<Policy>> Make(const KvOptions& options, const PolicyContext& context) {
  auto plan = PlanSpherical(options, context);
  if (!plan.ok()) return plan.status();
  return std::unique_ptr<Policy>(new Spherical(*std::move(plan), context));
}

}  // namespace

PolicyRow SphericalRow() {
  PolicyRow row;
  row.name = "spherical";
  row.summary = "stores keys and values as codes of 8 to 2 bits; by a profile each kv head keeps everything at its bits, or its best share";
  row.needs = "nothing; a profile (--strategy FILE, made by loupe calibrate spherical) to choose bits and shares for each kv head";
  row.params = {{"retention", "joint: bits or shares, whichever loses less; drop: shares at 4 bits only; bits: nothing is dropped", 0, 0, 0,
                 false, {"joint", "drop", "bits"}},
                {"outliers", "share of a list's entries that are stored as protected ones, those with the longest keys", 0, 0, 0.1, false},
                DecodeParam(false)};
  for (ParamSpec spec : CodingParams()) {
    if (spec.name == "protected_bits") {
      spec.summary = "how protected and new entries are stored; auto: in 8 bits where that loses less, without a profile below 13 %";
    }
    row.params.push_back(std::move(spec));
  }
  row.make = Make;
  row.chooses_formats = true;
  return row;
}

}  // namespace loupe
